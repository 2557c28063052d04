"""Heads that are softmax regressions of users: what they fit, what they leave out, and points of users' own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from privrep.heads import softmax  # noqa: E402
from privrep.heads.neural import CANDIDATES  # noqa: E402
from privrep.heads.softmax import (  # noqa: E402
    FOLDS,
    Candidate,
    HeadInputs,
    OwnRows,
    Sight,
    fit,
    left_out_losses,
    log_frequencies,
    one_hot,
    user_frequencies,
)
from privrep.heads.standard import standardise  # noqa: E402

USERS, ROWS, SIZE, CLASSES = 5, 9, 6, 3


def crowd(seed: int = 0, pull: float = 2.0) -> tuple[HeadInputs, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(USERS, ROWS, SIZE)).astype(np.float32))
    centre, layer = rng.normal(size=SIZE), torch.from_numpy(rng.normal(size=(SIZE, CLASSES)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, CLASSES, (USERS, ROWS)))
    labels[1, 6:] = -1
    sight = Sight(rows, centre, pull)
    return HeadInputs(rows @ layer, torch.from_numpy(centre.astype(np.float32)) @ layer, sight, sight), labels


def test_points_lie_between_a_users_mean_and_the_centre() -> None:
    rng = np.random.default_rng(2)
    rows, there = rng.normal(size=(3, 4, SIZE)) + 5, np.ones((3, 4), dtype=bool)
    there[2] = False
    centre = np.zeros(SIZE)
    own, half, public = (standardise(rows, there, centre, pull) for pull in (0.0, 4.0, 1e9))
    assert np.allclose(own.point[:2, 0], rows[:2].mean(axis=1), atol=1e-5)
    assert np.allclose(half.point[:2, 0], rows[:2].mean(axis=1) / 2, atol=1e-5)
    assert np.allclose(public.point[:2], 0, atol=1e-5)
    assert np.allclose((own.rows[:2] ** 2).sum(axis=(1, 2)), 3, rtol=1e-4)  # mean square one, a mean taken off
    assert not own.rows[2].any()
    assert np.isfinite(own.point).all()
    assert np.allclose(own.rows[:2] * own.size[:2] + own.point[:2], rows[:2], atol=1e-4)


@pytest.mark.parametrize(("rows", "least"), [(0, 0.03), (1, 1.0), (5, 0.2), (20, 0.05), (40, 0.03)])
def test_a_class_that_few_rows_have_not_shown_counts_as_one_row_in_as_many(rows: int, least: float) -> None:
    counts = torch.tensor([[[float(rows), 0.0, 0.0]]])
    found = user_frequencies(counts, 0.03).exp()[0, 0]
    assert found.sum() == pytest.approx(1.0)
    assert found[2] == pytest.approx(least / (rows + 3 * least))
    assert torch.equal(user_frequencies(counts, 5.0), log_frequencies(counts, 5.0))


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.words)
def test_a_head_scores_its_own_rows_as_its_parts_say(candidate: Candidate) -> None:
    """Scores by the head as it is kept are those about the user's point and over its size."""
    seen, labels = crowd()
    found, own = fit(candidate, seen, labels), OwnRows(seen.sight(candidate.kind), labels)
    kept = found.scale[:, None, None] * seen.base + found.prior[:, None] + torch.bmm(seen.own.rows, found.slopes)
    there = labels >= 0
    prior = user_frequencies(one_hot(labels, CLASSES).sum(dim=1, keepdim=True), candidate.pseudo_count)
    base = candidate.scale * (seen.base - own.point_base(seen, there[..., None])) / own.size
    expected = prior + (0 if candidate.kind == "alone" else base)
    expected = expected + torch.bmm(own.rows, found.slopes * own.size)
    assert torch.allclose(kept[there], expected.expand_as(kept)[there], atol=1e-3)
    assert bool(found.slopes.abs().sum() > 0) == (candidate.penalty > 0)


def test_slopes_are_at_the_posterior_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "STEPS", 400)
    seen, labels = crowd()
    candidate = Candidate("shared", 0.3, 0.1, 2.0)
    found, own = fit(candidate, seen, labels), OwnRows(seen.shared, labels)
    scores = found.scale[:, None, None] * seen.base + found.prior[:, None] + torch.bmm(seen.own.rows, found.slopes)
    there = (labels >= 0)[..., None]
    left = torch.where(there, one_hot(labels, CLASSES) - torch.softmax(scores, dim=-1), 0.0)
    pulled = torch.bmm(own.rows.mT, left)  # the gradient of the likelihood, in standardised slopes
    assert torch.allclose(pulled, candidate.penalty * found.slopes * own.size, atol=2e-3)
    assert pulled.abs().max() > 0.05


@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_no_row_is_judged_by_a_head_that_knows_its_class(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, labels = crowd()
    candidate = Candidate(kind, 0.3, 0.1)  # type: ignore[arg-type]
    judged: list[torch.Tensor] = []
    honest = softmax._costs

    def kept(scores: torch.Tensor, labels: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        judged.append(torch.where(out[..., None], scores, 0.0))
        return honest(scores, labels, out)

    monkeypatch.setattr(softmax, "_costs", kept)
    left_out_losses([candidate], seen, labels)
    for fold in range(FOLDS):
        other = labels.clone()
        mine = (torch.arange(ROWS) % FOLDS == fold) & (labels >= 0)
        other[mine] = (labels[mine] + 1) % CLASSES
        before, judged[:] = list(judged), []
        left_out_losses([candidate], seen, other)
        assert torch.equal(judged[fold], before[fold])
        assert not torch.equal(judged[(fold + 1) % FOLDS], before[(fold + 1) % FOLDS])  # others know it
        judged[:] = before


def test_losses_without_slopes_are_those_of_frequencies_and_base() -> None:
    seen, labels = crowd(pull=0.0)
    candidate = Candidate("shared", 0.3, 0.0, 1.0)
    losses = left_out_losses([candidate], seen, labels)[:, 0]
    own, expected = OwnRows(seen.shared, labels), []
    for user in range(USERS):
        cost = []
        for row in np.flatnonzero(labels[user] >= 0):
            others = [r for r in range(ROWS) if labels[user, r] >= 0 and r % FOLDS != row % FOLDS]
            counts = np.bincount(labels[user, others].numpy(), minlength=CLASSES) + 0.3
            base = (seen.base[user, row] - seen.base[user][labels[user] >= 0].mean(dim=0)) / own.size[user, 0, 0]
            scores = base.numpy() + np.log(counts / counts.sum())
            cost.append(np.log(np.exp(scores).sum()) - scores[labels[user, row]])
        expected.append(np.mean(cost))
    assert np.allclose(losses, expected, atol=1e-4)


def test_a_user_without_rows_loses_nothing_and_has_a_head() -> None:
    seen, labels = crowd()
    labels = labels.clone()
    labels[3] = -1
    assert not left_out_losses(CANDIDATES, seen, labels)[3].any()
    for candidate in CANDIDATES:
        found = fit(candidate, seen, labels)
        assert torch.isfinite(found.prior[3]).all()
        assert not found.slopes[3].any()
    assert left_out_losses(CANDIDATES, seen, labels)[0].all()


def test_a_head_does_not_change_with_where_rows_lie() -> None:
    """All rows moved and stretched alike: with no centre to pull them, the same scores."""
    seen, labels = crowd(pull=0.0)
    moved = replace(seen.own, rows=3 * seen.own.rows + 7)
    other = HeadInputs(torch.zeros_like(seen.base), torch.zeros(CLASSES), moved, moved)
    here = HeadInputs(torch.zeros_like(seen.base), torch.zeros(CLASSES), seen.own, seen.own)
    for candidate in (each for each in CANDIDATES if each.kind == "alone"):
        one, two = fit(candidate, here, labels), fit(candidate, other, labels)
        first = one.prior[:, None] + torch.bmm(seen.own.rows, one.slopes)
        second = two.prior[:, None] + torch.bmm(moved.rows, two.slopes)
        assert torch.allclose(first, second, atol=2e-3)
