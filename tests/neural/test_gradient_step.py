"""What users of a network compute: heads, one step for all at once, several steps each; and that nobody's depends on
anybody else's rows."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from clipping import add_up
from privrep.privacy.protocol import UserBatch
from strangers import assert_nobody_else_moves, assert_sum_stays_within_bound, numbers, strangers

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from privrep.errors import InputError  # noqa: E402
from privrep.heads.gradient import HeadFit, labels_of  # noqa: E402
from privrep.neural import gradient_step as ghost  # noqa: E402
from privrep.neural.gradient_step import GradientStep  # noqa: E402
from privrep.neural.local_sgd import LocalSgdStep, is_stack, local_sgd, stack_sgd  # noqa: E402
from privrep.neural.models import add_adapters, lenet, mlp  # noqa: E402
from privrep.nn.flat_module import FlatModule, Split, split  # noqa: E402
from privrep.nn.ghost_clipping import count_numbers_per_row, find_obstacle  # noqa: E402
from privrep.nn.threads import one_thread  # noqa: E402
from privrep.privacy.bounds import Bound  # noqa: E402

SLOTS, USERS, CLASSES = 7, 5, 4
FIT = HeadFit(steps=4, rate=0.5, momentum=0.5, ridge=0.1)


class Residual(nn.Module):
    """Layers on (rows, positions, features), one without bias, one in place, one around another."""

    def __init__(self):
        super().__init__()
        self.mix, self.up, self.act = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, rows):
        x = rows.reshape(len(rows), 3, 6)
        return (x + self.up(self.act(self.mix(x)))).flatten(1)


def started(representation, head, features):
    """Biases that are not zero, so that rows without numbers are not without an output."""
    parts = split(representation, head, features)
    for part in (parts.representation, parts.head):
        part.load((part.weights() + 0.05 * np.cos(np.arange(part.size))).astype(np.float32))
    return parts


def small(name):
    match name:
        case "mlp":
            return started(*mlp(18, (12, 5), CLASSES), 18)
        case "no bias":
            return started(nn.Sequential(nn.Linear(18, 9, bias=False), nn.Linear(9, 5)), nn.Linear(5, 4, False), 18)
        case "other head":
            deep = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
            return started(mlp(18, (12, 5))[0], deep, 18)
        case "residual":
            return started(Residual(), nn.Linear(18, CLASSES), 18)
        case "lenet":
            return started(*lenet(1, 16, (6, 5), CLASSES), 256)
        case "adapted lenet":
            return started(add_adapters(lenet(1, 16, (6, 5), CLASSES)[0], 2), nn.Linear(5, CLASSES), 256)
    raise AssertionError(name)


NETWORKS = ["mlp", "no bias", "other head", "residual", "lenet", "adapted lenet"]


def crowd(features, seed=0, users=USERS):
    """Users with all kinds of numbers of rows, none among them; rows that are absent as the engine has them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(users, SLOTS, features)).astype(np.float32)
    y = rng.integers(0, CLASSES, (users, SLOTS)).astype(np.float32)
    for user in range(users):
        y[user, [SLOTS, 0, 1, 3, 6][user % 5] :] = -1
    X[y < 0] = 0
    return X, y


def public(parts, **changes):
    return {
        "split": parts,
        "weights": parts.representation.weights(),
        "head_start": parts.head.weights(),
        "head_fit": FIT,
        "step_size": 0.3,
        "rows_per_user": SLOTS,
    } | changes


def sent(step, X, y):
    with threadpool_limits(1, user_api="blas"), np.errstate(all="ignore"):
        return step(UserBatch(X, y, np.arange(len(X))))["update"]


def vectors(contributions, users):
    """(users, size): what each user sends, written out."""
    return np.stack([add_up(contributions, np.eye(users)[user]) for user in range(users)])


@one_thread()
def plain_head(parts, Z, labels):
    """One user's, as anyone would write it."""
    head = copy.deepcopy(parts.head.module)
    start = [p.detach().clone() for p in head.parameters()]
    descent = torch.optim.SGD(head.parameters(), FIT.rate, FIT.momentum)
    for _ in range(FIT.steps):
        descent.zero_grad()
        pull = sum(((p - q) ** 2).sum() for p, q in zip(head.parameters(), start, strict=True))
        (functional.cross_entropy(head(Z), labels) + FIT.ridge / 2 * pull).backward()
        descent.step()
    return head


@one_thread()
def plain_update(parts, X, y, rate, batch=SLOTS, epochs=1):
    """One user's: its head first, then steps on the representation."""
    mine = y >= 0
    if not mine.any():
        return np.zeros(parts.representation.size)
    rows, labels = torch.tensor(X), torch.tensor(y, dtype=torch.int64)
    body = copy.deepcopy(parts.representation.module)
    head = plain_head(parts, body(rows[mine]).detach(), labels[mine])
    descent = torch.optim.SGD([p for p in body.parameters() if p.requires_grad], rate)
    for _ in range(epochs):
        for first in range(0, SLOTS, batch):
            some = [row for row in range(first, min(first + batch, SLOTS)) if mine[row]]
            if some:
                descent.zero_grad()
                functional.cross_entropy(head(body(rows[some])), labels[some]).backward()
                descent.step()
    after = np.concatenate([p.detach().numpy().ravel() for p in body.parameters() if p.requires_grad])
    return after - parts.representation.weights()


# Heads


@pytest.mark.parametrize("name", ["mlp", "no bias", "other head"])
def test_heads_are_those_of_a_plain_descent(name):
    parts = small(name)
    rng = np.random.default_rng(1)
    Z, (_, y) = torch.tensor(rng.normal(size=(USERS, SLOTS, parts.rank)), dtype=torch.float32), crowd(3)
    start = torch.tensor(parts.head.weights())
    found = FIT.fit(start, Z, labels_of(y, CLASSES), parts.head)
    for user in range(USERS):
        mine = y[user] >= 0
        if mine.any():
            head = plain_head(parts, Z[user, mine], torch.tensor(y[user, mine], dtype=torch.int64))
            expected = torch.cat([p.detach().ravel() for p in head.parameters()])
            assert torch.allclose(found[user], expected, atol=1e-5)
            assert not torch.allclose(found[user], start, atol=1e-2)
        else:
            assert torch.equal(found[user], start)


def test_heads_may_start_from_heads():
    parts, y = small("mlp"), crowd(3)[1]
    Z = torch.cos(torch.arange(float(USERS * SLOTS * parts.rank))).reshape(USERS, SLOTS, -1)
    labels, start = labels_of(y, CLASSES), torch.tensor(parts.head.weights())
    halfway = HeadFit(3, 0.2).fit(start, Z, labels, parts.head)
    whole = HeadFit(5, 0.2).fit(start, Z, labels, parts.head)
    assert torch.equal(HeadFit(2, 0.2).fit(halfway, Z, labels, parts.head), whole)


def test_what_is_no_class_is_a_row_that_is_absent():
    y = np.array([[0, 3, 4, -1, 2.5, 1e30, np.nan, -np.inf]], dtype=np.float32)
    assert labels_of(y, 4).tolist() == [[0, 3, -1, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"rate": 0.0}, {"momentum": 1.0}, {"ridge": -1.0}])
def test_a_fit_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError, match="heads are fitted"):
        HeadFit(**wrong)


# Updates


@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_the_gradient_that_differentiation_gives(name):
    parts = small(name)
    assert find_obstacle(parts) is None
    X, y = crowd(parts.features)
    update = sent(GradientStep(**public(parts)), X, y)
    expected = np.stack([plain_update(parts, X[u], y[u], 0.3) for u in range(USERS)])
    scale = np.abs(expected).max()
    assert scale > 1e-3
    assert np.allclose(vectors(update, USERS), expected, atol=2e-5 * scale + 2e-7)
    lengths = np.sqrt((expected**2).sum(axis=1))
    assert np.all(update.norms() >= lengths * (1 - 1e-4) - 1e-6)
    assert np.allclose(update.norms(), lengths, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_is_many_steps_with_one_batch(name):
    parts = small(name)
    X, y = crowd(parts.features, 1)
    one, many = (vectors(sent(kind(**public(parts)), X, y), USERS) for kind in (GradientStep, LocalSgdStep))
    assert np.allclose(one, many, atol=2e-5 * np.abs(many).max())


@pytest.mark.parametrize(("batch", "epochs"), [(2, 1), (3, 2), (100, 3), (None, 2)])
@pytest.mark.parametrize("name", NETWORKS)
def test_many_steps_are_those_of_a_plain_loop(name, batch, epochs):
    parts = small(name)
    X, y = crowd(parts.features, 2)
    rate = 0.01  # small enough for descents that go down: others magnify rounding errors
    update = sent(LocalSgdStep(**public(parts, step_size=rate), batch=batch, epochs=epochs), X, y)
    expected = np.stack([plain_update(parts, X[u], y[u], rate, batch or SLOTS, epochs) for u in range(USERS)])
    apart = np.linalg.norm(vectors(update, USERS) - expected, axis=1)
    assert (apart <= 1e-3 * np.linalg.norm(expected, axis=1)).all()
    assert np.linalg.norm(expected, axis=1).max() > 1e-3


def test_formulas_for_stacks_and_differentiation_agree():
    parts = small("mlp")
    assert is_stack(parts.representation)
    assert not is_stack(small("lenet").representation)
    assert not is_stack(small("residual").representation)
    X, y = crowd(18)
    rows, labels, start = torch.tensor(X), labels_of(y, CLASSES), torch.tensor(parts.representation.weights())
    target = torch.cos(torch.arange(5.0 * USERS)).reshape(USERS, 5)
    how = {"rate": 0.1, "batch": 2, "epochs": 2}

    def loss(flat, some, classes, mine):
        return (((parts.representation(flat, some) - mine) ** 2).sum(dim=1) * (classes >= 0)).sum() / 2

    def top(out, classes, theirs):
        return (out - theirs[:, None]) * (classes >= 0)[..., None]

    one = local_sgd(loss, start, rows, labels, target, **how)
    other = stack_sgd(parts.representation, top, start, rows, labels, target, **how)
    assert torch.allclose(one, other, atol=1e-5)
    assert torch.equal(one[1], start)  # who has no rows
    assert torch.equal(other[1], start)


def test_a_frozen_layer_is_in_no_update():
    representation, head = mlp(18, (12, 5), CLASSES)
    representation[0].requires_grad_(False)
    parts = started(representation, head, 18)
    X, y = crowd(18)
    for kind in (GradientStep, LocalSgdStep):
        found = vectors(sent(kind(**public(parts)), X, y), USERS)
        expected = np.stack([plain_update(parts, X[u], y[u], 0.3) for u in range(USERS)])
        assert found.shape == (USERS, 12 * 5 + 5)
        assert np.allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_users_may_be_cut_up_into_groups(monkeypatch):
    parts = small("lenet")
    X, y = crowd(parts.features)
    whole = vectors(sent(GradientStep(**public(parts)), X, y), USERS)
    monkeypatch.setattr(ghost, "NUMBERS_AT_ONCE", 2 * SLOTS * count_numbers_per_row(parts))
    assert np.allclose(
        vectors(sent(GradientStep(**public(parts)), X, y), USERS), whole, atol=1e-5 * np.abs(whole).max()
    )


def test_vectors_are_held_of_convolutions_alone():
    assert GradientStep(**public(small("mlp"))).spec.floats_per_user == 0
    assert GradientStep(**public(small("lenet"))).spec.floats_per_user == 25 * 64 + 64 + 1600 * 64 + 64
    assert LocalSgdStep(**public(small("mlp"))).spec.floats_per_user == small("mlp").representation.size


class Twice(Residual):
    def forward(self, rows):
        return self.mix(self.mix(rows[:, :6])) + self.up(rows[:, :6])


class Around(Residual):
    def forward(self, rows):
        return self.mix(rows[:, :6]) @ self.mix.weight + self.up(rows[:, :6])


class Unused(Residual):
    def forward(self, rows):
        return self.mix(rows[:, :6])


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(18, 18), nn.Linear(18, 18))
        self[1].weight = self[0].weight


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Linear(18, 18), nn.LayerNorm(18)), "'1' is a LayerNorm"),
        (nn.Sequential(nn.Unflatten(1, (2, 3, 3)), nn.Conv2d(2, 4, 2, groups=2), nn.Flatten()), "'1' is a Conv2d"),
        (Twice(), "'mix' is called 2 times"),
        (Unused(), "'up' is called 0 times"),
        (Around(), "act on more"),
        (Tied(), "in common"),
    ],
)
def test_what_one_pass_cannot_differentiate_is_said(module, words):
    rank = module(torch.zeros(1, 18)).shape[1]
    assert words in find_obstacle(split(module, nn.Linear(rank, CLASSES), 18))


# Nobody's depends on the others


@pytest.mark.parametrize("kind", ["one", "many", "many batches"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_user_in_anothers_place_changes_nobody_else(name, kind):
    parts = small(name)
    step = {
        "one": GradientStep(**public(parts)),
        "many": LocalSgdStep(**public(parts)),
        "many batches": LocalSgdStep(**public(parts), batch=3, epochs=2),
    }[kind]
    strange = strangers(*crowd(parts.features, 9))
    assert_nobody_else_moves(partial(sent, step), crowd(parts.features), strange, (0, 3), equal_nan=True)


class Mixed(nn.Sequential):
    """Rows less their mean: what would break the promise."""

    def forward(self, rows):
        return super().forward(rows - rows.mean(dim=0))


def test_a_step_that_looks_at_the_others_is_noticed():
    parts = small("mlp")
    mixed = Split(FlatModule(Mixed(*parts.representation.module)), parts.head, 18, parts.rank, CLASSES)
    X, y = crowd(18)
    other = X.copy()
    other[0] += 1e-6
    before, after = (sent(GradientStep(**public(mixed)), rows, y) for rows in (X, other))
    assert not np.array_equal(numbers(before, 3), numbers(after, 3))


@pytest.mark.parametrize("kind", [GradientStep, LocalSgdStep])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_the_clipped_sum_moves_by_the_sensitivity_at_most(name, kind):
    parts = small(name)
    bound, strange = Bound(0.05, parts.representation.size), strangers(*crowd(parts.features, 9))
    step, users = kind(**public(parts)), crowd(parts.features, users=20)
    assert_sum_stays_within_bound(step, "update", bound, users, strange, 0.02)


@pytest.mark.parametrize("kind", [GradientStep, LocalSgdStep])
@pytest.mark.parametrize("name", ["mlp", "lenet", "other head"])
def test_threads_do_not_matter(name, kind):
    """Neither how many PyTorch has, nor whether another call of the same step is under way."""
    parts = small(name)
    step = kind(**public(parts))
    several = [crowd(parts.features, seed) for seed in range(12)]
    alone = [sent(step, X, y) for X, y in several]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda both: step(UserBatch(*both, np.arange(USERS)))["update"], several))
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)
    for one, other in zip(alone, together, strict=True):
        for user in range(USERS):
            assert np.array_equal(numbers(one, user), numbers(other, user))


def test_one_thread_within_one_thread_stays_one():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_step_leaves_its_modules_as_they_were():
    parts = small("lenet")
    weights, heads = parts.representation.weights(), parts.head.weights()
    X, y = crowd(parts.features)
    for kind in (GradientStep, LocalSgdStep):
        sent(kind(**public(parts, weights=weights + 1, head_start=heads + 1)), X, y)
    assert np.array_equal(parts.representation.weights(), weights)
    assert np.array_equal(parts.head.weights(), heads)
    assert not any(layer._forward_hooks for layer in parts.representation.module.modules())
