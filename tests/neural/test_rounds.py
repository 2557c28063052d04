"""Server rounds: what plain FedRep would do, what is charged, how a bound follows a quantile, and resuming."""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest

import runs
from clipping import add_up
from privrep.privacy.protocol import StepSpec, UserBatch
from runs import Silence

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import BudgetExceeded, InputError  # noqa: E402
from privrep.heads.gradient import HeadFit  # noqa: E402
from privrep.neural.gradient_step import GradientStep  # noqa: E402
from privrep.neural.local_sgd import LocalSgdStep  # noqa: E402
from privrep.neural.models import mlp  # noqa: E402
from privrep.neural.rounds import TrainedWeights, TrainingSettings, local_step, train  # noqa: E402
from privrep.nn.flat_module import split  # noqa: E402
from privrep.privacy.contributions import Vectors  # noqa: E402
from privrep.privacy.grid import grid_step  # noqa: E402
from privrep.privacy.sampling import Poisson, plan_noise_multiplier  # noqa: E402

FEATURES, CLASSES, SLOTS, USERS = 12, 3, 6, 40
FIT = HeadFit(steps=5, rate=0.3)
SMALL = 1e-6  # of mu^2, for runs without noise


def population(seed=0):
    """Users whose labels are a function of two directions that all share, in an order of their own."""
    rng = np.random.default_rng([70, seed])
    shared = rng.normal(size=(FEATURES, CLASSES))
    sizes = rng.integers(0, SLOTS + 1, USERS)
    X = rng.normal(size=(sizes.sum(), FEATURES)).astype(np.float32)
    owner = np.repeat(np.arange(USERS), sizes)
    y = ((X @ shared).argmax(axis=1) + owner) % CLASSES
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return UserTable(X, y.astype(np.float32), offsets, np.arange(USERS))


def network():
    return split(*mlp(FEATURES, (8, 4), CLASSES), FEATURES)


run_on = partial(runs.run_on, epsilon=5.0, seed=9, workers=2)


def silent(table, **options):
    return run_on(table, noise=Silence(), **options)


def learn(run, settings, mu_squared=SMALL) -> TrainedWeights:
    parts = network()
    heads = parts.head.weights()
    start = parts.representation.weights()
    return train(run, start, lambda b: local_step(parts, b, heads, settings, SLOTS), settings, mu_squared)


def plain_fedrep(table, settings):
    """Every user by itself, with PyTorch's own optimisers; the server averages."""
    parts = network()
    body, first = parts.representation.module, parts.head.module
    for _ in range(settings.rounds):
        updates = []
        for user in range(table.n_users):
            rows = slice(table.offsets[user], table.offsets[user + 1])
            X, y = torch.tensor(table.X[rows]), torch.tensor(table.y[rows], dtype=torch.int64)
            mine, head = copy.deepcopy(body), copy.deepcopy(first)
            if len(X):
                descend(head, settings.head_fit.rate, [(mine(X).detach(), y)] * settings.head_fit.steps)
                head.requires_grad_(False)
                size = settings.batch or SLOTS
                parts_of = [(X[a : a + size], y[a : a + size]) for a in range(0, len(X), size)]
                descend(torch.nn.Sequential(mine, head), settings.step_size, parts_of * settings.epochs)
            updates.append([p - q for p, q in zip(mine.parameters(), body.parameters(), strict=True)])
        with torch.no_grad():
            for place, parameter in enumerate(body.parameters()):
                mean = sum(update[place] for update in updates) / len(updates)
                parameter.add_(mean, alpha=settings.server_rate)
    return parts.representation.weights()


def descend(module, rate, batches):
    descent = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], rate)
    for X, y in batches:
        descent.zero_grad()
        functional.cross_entropy(module(X), y).backward()
        descent.step()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GradientStep, TrainingSettings(rounds=3, clip=4.0, step_size=0.5, head_fit=FIT, server_rate=0.9)),
        (LocalSgdStep, TrainingSettings(rounds=3, clip=4.0, step_size=0.3, batch=2, epochs=2, head_fit=FIT)),
    ],
)
def test_without_clipping_and_noise_it_is_plain_fedrep(kind, settings):
    parts = network()
    assert type(local_step(parts, parts.representation.weights(), parts.head.weights(), settings, SLOTS)) is kind
    found, expected = learn(silent(population()), settings).weights, plain_fedrep(population(), settings)
    moved = np.linalg.norm(expected - parts.representation.weights())
    assert moved > 0.05
    assert np.linalg.norm(found - expected) < 1e-3 * moved


def test_the_number_of_workers_does_not_matter():
    settings = TrainingSettings(rounds=2, clip=0.1, batch=2, head_fit=FIT)
    one, two = (learn(run_on(population(), workers=workers), settings).weights for workers in (1, 2))
    assert np.array_equal(one, two)


def test_rounds_are_charged_and_posted():
    run = run_on(population(), epsilon=3.0)
    share = run.ledger.capacity / 4
    learn(run, TrainingSettings(rounds=3, head_fit=FIT), share)
    assert run.ledger.remaining == pytest.approx(share, rel=1e-6)
    assert all(f"round-{t}" in run.billboard for t in (1, 2, 3))
    learn(run, TrainingSettings(rounds=4, head_fit=FIT), share)
    with pytest.raises(BudgetExceeded):
        learn(run, TrainingSettings(rounds=5, head_fit=FIT), share)


@pytest.mark.parametrize("server", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_a_run_that_is_continued_ends_with_the_same_weights(server, quantile):
    settings = TrainingSettings(rounds=4, server=server, quantile=quantile, head_fit=FIT, server_rate=0.3)
    whole = run_on(population(), epsilon=5.0)
    share = whole.ledger.capacity / 4
    expected = learn(whole, settings, share)
    broken = run_on(population(), epsilon=5.0)
    learn(broken, TrainingSettings(**(vars(settings) | {"rounds": 2})), share)
    again = run_on(population(), billboard=broken.billboard, ledger=broken.ledger)
    found = learn(again, settings, share)
    assert np.array_equal(found.weights, expected.weights)
    assert found.rounds == expected.rounds


@pytest.mark.parametrize("server", ["momentum", "adam"])
def test_the_servers_optimisers_are_pytorchs(server):
    """Of releases as they stand on the billboard: nothing but post-processing."""
    settings = TrainingSettings(rounds=5, server=server, server_rate=0.1, clip=0.2, head_fit=FIT)
    run = run_on(population())
    found = learn(run, settings, run.ledger.capacity / 5).weights
    weights = torch.tensor(network().representation.weights(), dtype=torch.float64, requires_grad=True)
    if server == "adam":
        descent = torch.optim.Adam([weights], 0.1, (settings.momentum, settings.second_momentum), settings.floor)
    else:
        descent = torch.optim.SGD([weights], 0.1, settings.momentum)
    for t in range(1, 6):
        weights.grad = torch.tensor(-run.billboard.releases(f"round-{t}")["update"].value / USERS)
        descent.step()
    assert np.allclose(found, weights.detach().numpy(), atol=1e-6)


def test_signal_to_noise_is_read_off_the_releases():
    wide = {"rounds": 2, "head_fit": FIT}
    loud = learn(run_on(population(), epsilon=1e13), TrainingSettings(**wide), 1e9)
    quiet = learn(run_on(population()), TrainingSettings(**wide), 1e-4)
    assert all(r.signal_to_noise > 100 for r in loud.rounds)
    assert all(r.signal_to_noise < 1 for r in quiet.rounds)
    size, multiplier = network().representation.size, 1e2
    for r in quiet.rounds:
        assert r.noise == pytest.approx(2 * 0.25 * multiplier * math.sqrt(size) / USERS, rel=0.01)


def updates(settings):
    """What each user sends in the first round."""
    parts, table = network(), population()
    step = local_step(parts, parts.representation.weights(), parts.head.weights(), settings, SLOTS)
    X, y = np.zeros((USERS, SLOTS, FEATURES), np.float32), np.full((USERS, SLOTS), -1, np.float32)
    for user in range(USERS):
        first, last = table.offsets[user : user + 2]
        X[user, : last - first], y[user, : last - first] = table.X[first:last], table.y[first:last]
    return step(UserBatch(X, y, np.arange(USERS)))["update"]


def test_the_bound_follows_the_quantile():
    """From far above and from far below it comes to the same place, where that part of the updates is shorter."""
    settings = {"rounds": 60, "quantile": 0.7, "quantile_rate": 0.5, "head_fit": FIT, "server_rate": 1e-6}
    ends = [
        learn(silent(population()), TrainingSettings(clip=clip, **settings)).rounds[-1].clip for clip in (1e-3, 0.3)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
    lengths = np.sort(updates(TrainingSettings(**settings)).norms())
    assert lengths[int(0.7 * USERS) - 3] <= ends[0] <= lengths[int(0.7 * USERS) + 3]


class Slope:
    """Everybody's update is minus the weights: a server's rate above two goes further and further."""

    spec = StepSpec(layout="padded", rows_per_user=1)

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, batch: UserBatch):
        X = batch.X
        return {"update": Vectors(np.tile(-self.weights, (len(X), 1)))}


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_a_server_that_went_too_far_goes_slower(rate):
    common = {"rounds": 30, "clip": 2.0, "quantile": 0.5, "quantile_rate": 1.0, "server_rate": rate}
    start = np.ones(3, np.float32)
    ends = [
        train(silent(population()), start, Slope, TrainingSettings(settle=s, **common), 0.02).weights
        for s in (1.0, 0.3)
    ]
    if rate < 2:
        assert np.array_equal(*ends)  # nothing grew
    else:
        assert np.abs(ends[0]).max() > 1
        assert np.abs(ends[1]).max() < 0.1


def test_normalised_updates_all_have_the_length_of_the_bound():
    """Short ones count as much as long ones, users without rows not at all, and the rounds say how loud noise is."""
    settings = TrainingSettings(rounds=1, clip=0.25, head_fit=FIT, step_size=1e-3, normalise=True)
    found = learn(silent(population()), settings)
    each = updates(settings)
    lengths = each.norms()
    weights = np.where(lengths > 0, 0.25 / np.maximum(lengths, 1e-300), 0.0)
    assert lengths.max() > 2 * lengths[lengths > 0].min()
    assert lengths.max() < 0.25  # the bound would have left them as they are
    moved = found.weights - network().representation.weights()
    assert np.allclose(moved, add_up(each, weights) / USERS, rtol=1e-3, atol=1e-6)
    loud = learn(run_on(population()), settings, 0.01).rounds[0]
    assert loud.noise == pytest.approx(2 * 0.25 / 0.1 * np.sqrt(len(moved)) / USERS, rel=0.01)


def test_rounds_can_be_abandoned():
    """After that round nothing more is asked or charged."""
    heard = []

    def go_on(released, weights):
        heard.append((len(released), weights.shape))
        return 0.0 if len(released) == 2 else 0.005

    run = run_on(population())
    step = network()
    settings = TrainingSettings(rounds=5, head_fit=FIT)
    start = step.representation.weights()
    found = train(
        run,
        start,
        lambda weights: local_step(step, weights, step.head.weights(), settings, SLOTS),
        settings,
        0.01,
        go_on=go_on,
    )
    assert heard == [(1, start.shape), (2, start.shape)]
    assert len(found.rounds) == 2
    assert "round-2" in run.billboard
    assert "round-3" not in run.billboard
    first, second = (run.billboard.releases(f"round-{t}")["update"].sigma for t in (1, 2))
    assert second == pytest.approx(first * np.sqrt(2))  # half of what the first spent


def test_a_sample_is_averaged_by_its_expected_size():
    """Not by its own size, which is a secret: then the average is that of all users, but for chance."""
    settings = TrainingSettings(rounds=1, clip=0.25, head_fit=FIT, step_size=0.1, rate=0.5)
    each = updates(settings)
    assert each.norms().max() < 0.24  # nobody is clipped
    found = learn(silent(population()), settings).weights - network().representation.weights()
    members = Poisson(0.5).sample(Silence().draw_key("round-1")).members(USERS)
    assert 10 < members.sum() < 30
    assert members.sum() != 20
    expected = add_up(each, members, grid_step(settings.clip)) / (0.5 * USERS)
    assert np.allclose(found, expected, rtol=0, atol=2.0**-24)  # the weights are float32, and at most two
    assert np.abs(expected).max() > 1e-3


def test_samples_are_planned_and_fit_the_budget():
    settings = TrainingSettings(rounds=6, rate=0.3, quantile=0.5, head_fit=FIT)
    run = run_on(population(), epsilon=2.0)
    multiplier = plan_noise_multiplier(run.ledger.budget, settings.rate, settings.rounds)
    learn(run, settings, multiplier**-2)
    with pytest.raises(BudgetExceeded):
        learn(run, TrainingSettings(**(vars(settings) | {"rounds": 7})), multiplier**-2)


def test_the_other_relation_is_refused():
    with pytest.raises(InputError, match="replace-one-user"):
        learn(run_on(population(), relation="add-or-remove-one-user"), TrainingSettings(rounds=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"epochs": 0},
        {"batch": 0},
        {"server": "lion"},
        {"server_rate": 0.0},
        {"momentum": 1.0},
        {"quantile": 1.0},
        {"quantile_share": 0.0},
        {"normalise": True, "quantile": 0.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError):
        TrainingSettings(**wrong)
