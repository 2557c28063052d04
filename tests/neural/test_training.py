"""The default's own steps and choices: nobody's numbers depend on others' rows, and what is decided is right."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from privrep.privacy.protocol import UserBatch
from privrep.users.performance import Performance

torch = pytest.importorskip("torch")

from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import InputError  # noqa: E402
from privrep.heads.neural import (  # noqa: E402
    CANDIDATES,
    Candidate,
    HeadInputs,
    HeadLosses,
    fit,
    fit_own_heads,
    left_out_loss,
    predict,
)
from privrep.neural.class_moments import ClassMoments, Scatter, classes_agree, directions  # noqa: E402
from privrep.neural.gradient_step import GradientStep  # noqa: E402
from privrep.neural.plan import LEAST_SIGNAL, Options, most_parameters, plan_sharing, signal  # noqa: E402
from privrep.neural.training import LINEAR, MeanRow, Shape, SharedPart, learn, linear_split  # noqa: E402
from privrep.privacy.billboard import Billboard  # noqa: E402
from privrep.privacy.bounds import Bound  # noqa: E402
from privrep.privacy.ledger import Budget, Ledger  # noqa: E402
from privrep.privacy.noise import simulated_noise  # noqa: E402
from privrep.privacy.run import Run  # noqa: E402
from privrep.users.memory import InMemoryUsers  # noqa: E402

USERS, SLOTS, FEATURES, CLASSES = 6, 7, 12, 4
SHAPE = Shape(CLASSES, SLOTS)


def crowd(seed: int = 0, users: int = USERS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(users, SLOTS, FEATURES)).astype(np.float32)
    X /= np.linalg.norm(X, axis=2, keepdims=True)
    y = rng.integers(0, CLASSES, (users, SLOTS)).astype(np.float32)
    y[1, 4:] = -1
    return X, y


def learned(seed: int = 5) -> SharedPart:
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=FEATURES) * 0.1
    both = linear_split(centre, 0.9, SHAPE)
    weights = rng.normal(size=both.representation.size).astype(np.float32)
    plan = plan_sharing(Options(CLASSES, FEATURES), 10_000, 0.3, "linear")
    return SharedPart(plan, both, weights, centre, 0.9, 0, CANDIDATES[3], CANDIDATES[10], 0.0)


def steps() -> dict[str, tuple[object, str, int, bool]]:
    """By name: a step, its statistic, how many numbers that has, and whether it is acute."""
    known = learned()
    update = GradientStep(known.split, known.weights, known.split.head.weights(), LINEAR.head_fit, 1.0, SLOTS)
    pairs = FEATURES * (FEATURES + 1) // 2
    return {
        "update": (update, "update", FEATURES * CLASSES, False),
        "mean": (MeanRow(SLOTS, CLASSES, 0), "mean", FEATURES, False),
        "heads": (HeadLosses(known, SLOTS), "losses", len(CANDIDATES), False),
        "look": (ClassMoments(SLOTS, CLASSES, 0, known.centre), "moments", FEATURES * CLASSES, False),
        "within": (Scatter(SLOTS, CLASSES, 0), "within", pairs, True),
        "between": (Scatter(SLOTS, CLASSES, 0), "between", pairs, True),
    }


def hostile() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    X, y = crowd(9)
    other, label = X[0], y[0]
    return {
        "another": (other, label),
        "empty": (np.zeros_like(other), np.full_like(label, -1)),
        "huge": (np.full_like(other, 1e30), label),
        "largest": (np.where(other > 0, 3e38, -3e38).astype(np.float32), label),
        "not finite": (np.where(other > 0, np.nan, np.inf).astype(np.float32), label),
        "no classes": (other, np.full_like(label, 1e9)),
        "all alike": (np.repeat(other[:1], SLOTS, axis=0), np.zeros_like(label)),
        "tiny": ((other * 1e-42).astype(np.float32), label),
    }


def numbers(contributions: object, user: int) -> np.ndarray:
    if hasattr(contributions, "parts"):
        return np.concatenate([numbers(part, user) for part in contributions.parts])
    arrays = [np.asarray(getattr(contributions, field.name))[user].ravel() for field in fields(contributions)]
    return np.concatenate([*arrays, contributions.norms()[[user]]])


@pytest.mark.parametrize("name", list(steps()))
def test_a_user_in_anothers_place_changes_nobody_else(name: str) -> None:
    step, key, _, _ = steps()[name]
    X, y = crowd()
    places = np.arange(USERS)
    with np.errstate(all="ignore"):
        before = step(UserBatch(X, y, places))[key]
        for words, (rows, labels) in hostile().items():
            X2, y2 = X.copy(), y.copy()
            X2[3], y2[3] = rows, labels
            after = step(UserBatch(X2, y2, places))[key]
            for user in (0, 1, 2, 4, 5):
                assert np.array_equal(numbers(after, user), numbers(before, user)), (words, user)


@pytest.mark.parametrize("name", list(steps()))
def test_the_clipped_sum_moves_by_the_sensitivity_at_most(name: str) -> None:
    step, key, size, acute = steps()[name]
    X, y = crowd(users=20)
    rows = [(X[u, y[u] >= 0], y[u, y[u] >= 0]) for u in range(20)]
    bound = Bound(1e-3, size, acute=acute)

    def total(users):
        offsets = np.cumsum([0, *(len(labels) for _, labels in users)]).astype(np.int64)
        flat = np.concatenate([x for x, _ in users]), np.concatenate([labels for _, labels in users])
        return InMemoryUsers(UserTable(*flat, offsets, np.arange(len(users))), Performance(2)).sums(step, {key: bound})[
            key
        ]

    before = total(rows)
    moved = []
    for other, labels in [*hostile().values(), (np.repeat(X[0], 9, axis=0), np.repeat(y[0], 9))]:
        after = total([*rows[:4], (other[labels >= 0], labels[labels >= 0]), *rows[5:]])
        moved.append(np.linalg.norm(after.total - before.total))
    assert max(moved) <= before.sensitivity("replace-one-user")
    assert max(moved) > 5e-4


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.words)
def test_left_out_scores_are_those_of_a_head_without_the_row(candidate: Candidate) -> None:
    """Frequencies and regression without a row: exact, but for residuals, which know the row's own class nowhere."""
    X, y = crowd()
    known = learned()
    labels = torch.from_numpy(y).long()
    seen = known(torch.from_numpy(X))
    fits = fit(candidate, seen, labels)
    base = seen.scores(candidate.kind)
    for row in (0, 2):
        kept = [r for r in range(SLOTS) if r != row]
        counts = torch.stack([(labels[:, kept] == c).sum(dim=1) for c in range(CLASSES)], dim=1)
        prior = torch.log((counts + candidate.pseudo_count) / (counts + candidate.pseudo_count).sum(1, keepdim=True))
        expected = base[:, row] + prior
        if candidate.slope:
            rows = seen.rows(candidate.kind) * (labels >= 0)[..., None]
            full = fit(replace(candidate, slope=0.0), seen, labels).left_out
            hot = torch.nn.functional.one_hot(labels.clamp(min=0), CLASSES)
            residual = (hot - torch.softmax(full, dim=-1)) * (labels >= 0)[..., None]
            some, gram = rows[:, kept].double(), rows[:, kept].double() @ rows[:, kept].double().mT
            ridge = candidate.ridge * torch.eye(len(kept)).double()
            dual = torch.linalg.solve(gram + ridge, residual[:, kept].double())
            expected = expected + candidate.slope * (rows[:, [row]].double() @ some.mT @ dual)[:, 0]
        there = labels[:, row] >= 0
        assert torch.allclose(fits.left_out[there, row].double(), expected[there].double(), atol=1e-4)


def test_a_head_predicts_by_base_frequencies_and_its_own_rows() -> None:
    X, y = crowd()
    labels = torch.from_numpy(y).long()
    seen = learned()(torch.from_numpy(X))
    candidate = Candidate("shared", 0.3, ridge=1e-4, slope=20.0)
    scores = predict(candidate, fit(candidate, seen, labels), seen, seen)
    there = labels >= 0
    assert (scores.argmax(dim=-1)[there] == labels[there]).float().mean() > 0.95  # fewer rows than features: they fit


def test_a_user_without_rows_has_no_loss_and_no_say() -> None:
    seen = HeadInputs(torch.zeros(1, SLOTS, CLASSES), torch.zeros(1, SLOTS, 3), torch.zeros(1, SLOTS, 3))
    labels = torch.full((1, SLOTS), -1)
    assert left_out_loss(fit(CANDIDATES[5], seen, labels), labels).item() == 0.0


def test_the_plan_carries_what_the_signal_says() -> None:
    assert signal(1_000, 0.268, 40, 235_000) == pytest.approx(0.0019, rel=0.02)
    most = most_parameters(2_000, 0.268, 16)
    assert signal(2_000, 0.268, 16, most) >= LEAST_SIGNAL > signal(2_000, 0.268, 16, most + 1)
    assert plan_sharing(Options(10, 256), 200, 0.03, "auto").share == "nothing"
    assert plan_sharing(Options(10, 256), 2_000, 0.268, "auto").features == 256
    small = plan_sharing(Options(10, 256), 500, 0.268, "auto")
    assert 8 <= small.features < 256
    assert small.signal >= LEAST_SIGNAL
    assert plan_sharing(Options(10, 256, whole=235_000), 1_000, 0.268, "auto").share == "linear"
    assert plan_sharing(Options(10, 256, whole=235_000), 100_000, 0.268, "auto").share == "all"
    adapters = Options(10, 256, whole=235_000, adapters=((4, 9_000), (1, 1_500)))
    assert plan_sharing(adapters, 2_000, 0.268, "auto").rank == 1
    with pytest.raises(InputError, match="needs a representation"):
        plan_sharing(Options(10, 256), 1_000, 0.268, "all")


def population(users: int, agree: bool, seed: int = 3) -> tuple[UserTable, UserTable]:
    """Four classes apart in two of twelve features; their names are everybody's, or each user's own."""
    rng = np.random.default_rng(seed)
    means = np.zeros((CLASSES, FEATURES))
    means[:, :2] = [[1, 1], [1, -1], [-1, 1], [-1, -1]]
    tables = []
    names = np.array([rng.permutation(CLASSES) if not agree else np.arange(CLASSES) for _ in range(users)])
    for rows in (6, 6):
        kinds = rng.integers(0, CLASSES, (users, rows))
        X = (1.5 * means[kinds] + rng.normal(size=(users, rows, FEATURES))).reshape(-1, FEATURES).astype(np.float32)
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        y = np.take_along_axis(names, kinds, axis=1).ravel().astype(np.float32)
        tables.append(UserTable.from_rows(X, y, np.repeat(np.arange(users), rows)))
    return tables[0], tables[1]


def new_run(table: UserTable, epsilon: float) -> Run:
    ledger = Ledger(Budget(epsilon, 1e-5), seeded=True)
    return Run(InMemoryUsers(table), ledger, Billboard(), simulated_noise(7))


@pytest.mark.parametrize("agree", [True, False])
def test_the_look_tells_whether_classes_mean_the_same(agree: bool) -> None:
    table, _ = population(1_000, agree)
    step = ClassMoments(SLOTS, CLASSES, 0, np.zeros(FEATURES))
    run = new_run(table, 4.0)
    assert classes_agree(run, step, 0.1 * run.ledger.capacity) == agree


def test_directions_are_those_in_which_classes_differ() -> None:
    table, _ = population(2_000, agree=False)
    run = new_run(table, 4.0)
    basis = directions(run, Scatter(SLOTS, CLASSES, 0), 2, run.ledger.capacity)
    found = np.linalg.qr(basis)[0]
    assert np.linalg.svd(found[:2])[1].min() > 0.95  # the first two features


@pytest.mark.parametrize("agree", [True, False])
def test_the_default_beats_everybody_alone(agree: bool) -> None:
    table, fresh = population(2_000, agree)
    run = new_run(table, 4.0)
    plan = plan_sharing(Options(CLASSES, FEATURES), 2_000, run.ledger.budget.mu, "auto")
    found = learn(run, plan, None, SHAPE)
    assert found.plan.share == ("linear" if agree else "directions")
    assert run.ledger.epsilon <= 4.0
    users = np.repeat(np.arange(2_000), 6)

    def accuracy(part: SharedPart) -> float:
        return float((fit_own_heads(part, table).scores(part, fresh.X, users).argmax(axis=1) == fresh.y).mean())

    alone = accuracy(replace(found, plan=replace(found.plan, share="nothing")))
    assert accuracy(found) > alone + 0.05
