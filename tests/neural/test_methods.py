"""What CENTAUR is compared with: each does what its paper says, keeps what is a user's own, and pays for the rest."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from privrep.privacy.protocol import UserBatch
from privrep.users.performance import Performance
from runs import Silence, run_on

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from experiments import network_references  # noqa: E402
from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import BudgetExceeded, InputError  # noqa: E402
from privrep.heads.gradient import HeadFit  # noqa: E402
from privrep.neural import user_state  # noqa: E402
from privrep.neural.methods import centaur, fedavg, pmtl, ppsgd  # noqa: E402
from privrep.neural.models import mlp  # noqa: E402
from privrep.neural.rounds import TrainingSettings  # noqa: E402
from privrep.neural.user_state import fit_last_heads, keep_heads  # noqa: E402
from privrep.nn.flat_module import split  # noqa: E402
from privrep.privacy.bounds import Bound  # noqa: E402
from privrep.privacy.noise import simulated_noise  # noqa: E402
from privrep.users.memory import InMemoryUsers  # noqa: E402

FEATURES, CLASSES, SLOTS, USERS = 9, 3, 5, 23
FIT = HeadFit(steps=3, rate=0.3, momentum=0.5)
PLAIN = TrainingSettings(rounds=4, clip=8.0, step_size=0.2, head_fit=FIT)
KEEPING = ("centaur", "ppsgd", "pmtl")
FILES = {"centaur": centaur, "fedavg": fedavg, "pmtl": pmtl, "ppsgd": ppsgd}


def network():
    return split(*mlp(FEATURES, (7, 4), CLASSES), FEATURES)


def population(seed=0):
    rng = np.random.default_rng([71, seed])
    shared = rng.normal(size=(FEATURES, CLASSES))
    sizes = rng.integers(0, SLOTS + 1, USERS)
    X = rng.normal(size=(sizes.sum(), FEATURES)).astype(np.float32)
    y = ((X @ shared).argmax(axis=1) + np.repeat(np.arange(USERS), sizes)) % CLASSES
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return UserTable(X, y.astype(np.float32), offsets, np.arange(USERS))


def new_run(table, noise=None):
    return run_on(table, 1.0, 1e-5, workers=2, noise=noise or Silence())


def rows_of(table, user):
    some = slice(table.offsets[user], table.offsets[user + 1])
    return torch.from_numpy(table.X[some]), torch.from_numpy(table.y[some].astype(np.int64))


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def load(module, weights):
    torch.nn.utils.vector_to_parameters(weights.clone(), module.parameters())


def descend(loss, parameters, rate, momentum=0.0, steps=1):
    parameters = list(parameters)
    velocity = [torch.zeros_like(p) for p in parameters]
    for _ in range(steps):
        slopes = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, slopes, strict=True):
                v.mul_(momentum).add_(g)
                p.sub_(rate * v)


def in_batches(rows, labels, batch):
    size = batch or max(len(rows), 1)
    return [(rows[i : i + size], labels[i : i + size]) for i in range(0, len(rows), size)]


def plain_fedrep(table, settings):
    """Representation, and the heads that users kept, by the book."""
    parts = network()
    shared, start = parts.representation.module, parts.head.module
    heads = [copy.deepcopy(start) for _ in range(table.n_users)]
    for _ in range(settings.rounds):
        total = torch.zeros_like(flat(shared))
        for user, head in enumerate(heads):
            rows, labels = rows_of(table, user)
            if not len(rows):
                continue
            Z, mine = shared(rows).detach(), copy.deepcopy(shared)
            descend(lambda Z=Z, head=head, labels=labels: functional.cross_entropy(head(Z), labels),
                    head.parameters(), FIT.rate, FIT.momentum, FIT.steps)  # fmt: skip
            for X, y in in_batches(rows, labels, settings.batch):
                descend(lambda X=X, y=y, mine=mine, head=head: functional.cross_entropy(head(mine(X)), y),
                        mine.parameters(), settings.step_size)  # fmt: skip
            total += flat(mine) - flat(shared)
        load(shared, flat(shared) + total / table.n_users)
    return flat(shared), torch.stack([flat(head) for head in heads])


def plain_whole(table, settings, pull=None):
    """FedAvg, or PMTL where there is a pull: the mean, and everyone's own network."""
    parts = network()
    mean = torch.nn.Sequential(parts.representation.module, parts.head.module)
    own = [copy.deepcopy(mean) for _ in range(table.n_users)]
    for _ in range(settings.rounds):
        total, middle = torch.zeros_like(flat(mean)), flat(mean)
        for user in range(table.n_users):
            mine = own[user] if pull is not None else copy.deepcopy(mean)
            before = flat(mine)
            for X, y in in_batches(*rows_of(table, user), settings.batch):

                def loss(X=X, y=y, mine=mine, middle=middle):
                    away = torch.cat([p.reshape(-1) for p in mine.parameters()]) - middle
                    return functional.cross_entropy(mine(X), y) + (pull or 0.0) / 2 * (away @ away)

                descend(loss, mine.parameters(), settings.step_size)
            total += flat(mine) - before
        load(mean, flat(mean) + total / table.n_users)
    return flat(mean), torch.stack([flat(mine) for mine in own])


def plain_ppsgd(table, settings, eta, alpha):
    parts = network()
    shared, head = parts.representation.module, parts.head.module
    both = torch.nn.ModuleList([shared, head])
    own = [torch.nn.Linear(4, CLASSES) for _ in range(table.n_users)]
    for mine in own:
        load(mine, torch.zeros(parts.head.size))
    for _ in range(settings.rounds):
        total = torch.zeros_like(flat(both))
        for user, mine in enumerate(own):
            rows, labels = rows_of(table, user)
            if not len(rows):
                continue
            there = copy.deepcopy(both)

            def loss(there=there, mine=mine, rows=rows, labels=labels):
                Z = there[0](rows)
                return functional.cross_entropy(there[1](Z) + mine(Z), labels)

            descend(loss, mine.parameters(), eta)
            descend(loss, there.parameters(), alpha * eta)
            total += flat(there) - flat(both)
        load(both, flat(both) + total / table.n_users)
    return flat(both), torch.stack([flat(mine) for mine in own])


def method(name, run, settings, mu_squared=1e-6):
    function = getattr(FILES[name], name)
    return function(run, network(), settings, mu_squared, SLOTS)


def assert_close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("batch", [None, 2])
def test_kept_heads_do_what_plain_fedrep_does(batch) -> None:
    table, settings = population(), replace(PLAIN, batch=batch)
    weights, heads = plain_fedrep(table, settings)
    assert float((weights - flat(network().representation.module)).norm()) > 0.05  # it moved
    trained, kept = method("centaur", new_run(table), settings)
    assert_close(trained.weights, weights)
    assert_close(kept.own, heads)
    exact, kept = network_references.fedrep(InMemoryUsers(table), network(), settings, SLOTS)
    assert_close(exact, weights)
    assert_close(kept.own, heads)


@pytest.mark.parametrize("batch", [None, 2])
def test_fedavg_is_fedavg(batch) -> None:
    table, settings = population(), replace(PLAIN, batch=batch)
    weights, _ = plain_whole(table, settings)
    assert_close(method("fedavg", new_run(table), settings).weights, weights)


@pytest.mark.parametrize("batch", [None, 2])
def test_pmtl_keeps_networks_that_are_pulled_to_the_mean(batch) -> None:
    table, settings = population(), replace(PLAIN, batch=batch)
    weights, own = plain_whole(table, settings, pull=1.0)
    trained, kept = method("pmtl", new_run(table), settings)
    assert_close(trained.weights, weights)
    assert_close(kept.own, own)
    loose, _ = plain_whole(table, settings, pull=0.0)
    assert float((loose - weights).norm()) > 1e-3  # the pull matters


def test_ppsgd_adds_own_heads_to_a_shared_one() -> None:
    table = population()
    weights, own = plain_ppsgd(table, PLAIN, eta=0.5, alpha=0.4)
    trained, kept = ppsgd.ppsgd(new_run(table), network(), PLAIN, 1e-6, SLOTS, eta=0.5, alpha=0.4)
    assert_close(trained.weights, weights)
    assert_close(kept.own, own)
    personal = ppsgd.end_ppsgd(network(), trained.weights, kept.own)
    assert_close(personal.heads, weights[-len(own[0]) :] + own)


@pytest.mark.parametrize("name", [*KEEPING, "fedavg"])
def test_a_run_that_is_continued_ends_the_same_and_pays_once(name) -> None:
    """Pages that stand are read; what users keep is computed again from them."""
    table, settings = population(), replace(PLAIN, rounds=5, clip=0.5)
    straight = method(name, new_run(table, simulated_noise(4)), settings, mu_squared=1e-3)
    run = new_run(table, simulated_noise(4))
    method(name, run, replace(settings, rounds=3), mu_squared=1e-3)
    continued = method(name, run, settings, mu_squared=1e-3)
    assert len(run.ledger.report().events) == 5
    if name in KEEPING:
        (straight, kept), (continued, again) = straight, continued
        assert torch.equal(kept.own, again.own)
        assert not len(again.past) or min(again.past) == 5  # weights that everyone has met are not held
    np.testing.assert_array_equal(straight.weights, continued.weights)


@pytest.mark.parametrize("name", [*KEEPING, "fedavg"])
def test_every_round_is_charged_and_a_round_too_many_is_refused(name) -> None:
    table = population()
    run = new_run(table, simulated_noise(1))
    share = run.ledger.capacity / 3
    with pytest.raises(BudgetExceeded):
        method(name, run, replace(PLAIN, rounds=4, clip=0.5), mu_squared=share)
    assert len(run.ledger.report().events) == 3
    assert run.ledger.report().epsilon == pytest.approx(1.0, abs=1e-6)


def swapped(table, user, kind):
    X, y = table.X.copy(), table.y.copy()
    some = slice(table.offsets[user], table.offsets[user + 1])
    if kind == "huge":
        X[some] = 1e30
    elif kind == "nan":
        X[some] = np.nan
    elif kind == "labels":
        y[some] = (y[some] + 1) % CLASSES
    else:
        y[some] = 77
    return UserTable(X, y, table.offsets, table.ids)


def kept_of(name, settings, users):
    """What users keep and do in the rounds of a method, without the server."""
    seen = []

    class Caught(Exception):
        pass

    def caught(run, start, make_step, settings, mu_squared, name):
        seen.append((start, make_step))
        raise Caught

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FILES[name], "train", caught)
        with pytest.raises(Caught):
            method(name, new_run(users), settings)
    ((start, make_step),) = seen
    return start, make_step


@pytest.mark.parametrize("kind", ["huge", "nan", "labels", "unknown"])
@pytest.mark.parametrize("name", [*KEEPING, "fedavg"])
def test_a_user_moves_a_sum_by_no_more_than_its_bound_and_nobody_elses_own(name, kind) -> None:
    table = population()
    user = int(np.argmax(table.sizes))
    settings = replace(PLAIN, clip=0.01)
    for others in (table, swapped(table, user, kind)):
        start, make_step = kept_of(name, settings, others)
        bounds = {"update": Bound(settings.clip, len(start))}
        users, totals = InMemoryUsers(others, Performance(2)), []
        for t in range(3):  # the same public weights, whatever the sums were
            weights = start + np.float32(0.01 * t) * np.sin(np.arange(len(start), dtype=np.float32))
            totals.append(users.sums(make_step(weights), bounds)["update"].exact_numbers)
        own = make_step.__self__.own if name in KEEPING else None
        if others is table:
            before, kept = totals, own
    for a, b in zip(before, totals, strict=True):
        assert np.linalg.norm(a - b) <= bounds["update"].sensitivity("replace-one-user")
    assert np.linalg.norm(before[0]) > settings.clip  # the bound is not met by all being nothing
    if own is not None:
        apart = np.delete(np.arange(USERS), user)
        assert torch.equal(kept[apart], own[apart])
        assert kind == "nan" or not torch.equal(kept[user], own[user])


def test_those_who_keep_something_are_all_asked_once_a_round() -> None:
    table, (parts, settings) = population(), (network(), replace(PLAIN, rate=0.5))
    for name in KEEPING:
        with pytest.raises(InputError, match="rate of 1"):
            method(name, new_run(table), settings)
    kept = keep_heads(parts, parts.head.weights(), PLAIN, USERS, SLOTS)
    step = kept.step(parts.representation.weights())
    X, y = np.zeros((2, SLOTS, FEATURES), np.float32), np.full((2, SLOTS), -1.0)
    step(UserBatch(X, y, np.array([3, 4])))
    with pytest.raises(InputError, match="asked once"):
        step(UserBatch(X, y, np.array([3, 4])))


def test_ppsgd_wants_a_linear_head() -> None:
    body, head = mlp(FEATURES, (7, 4), CLASSES)
    parts = split(body, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), head), FEATURES)
    with pytest.raises(InputError, match=r"one nn\.Linear"):
        ppsgd.ppsgd(new_run(population()), parts, PLAIN, 1e-6, SLOTS)


def test_alone_everyone_learns_their_own_rows_and_who_has_none_keeps_the_start() -> None:
    table, parts = population(), network()
    personal = network_references.alone(parts, table, SLOTS, rate=0.05, batch=2, epochs=400)
    found = personal.accuracy(table)
    assert np.isnan(found[table.sizes == 0]).all()
    assert (table.sizes == 0).any()
    assert np.nanmean(found) > 0.9
    nobody = int(np.flatnonzero(table.sizes == 0)[0])
    assert torch.equal(personal.heads[nobody], torch.from_numpy(parts.head.weights()))
    one = table.users(4, 5)
    lonely = network_references.alone(parts, one, SLOTS, rate=0.05, batch=2, epochs=400)
    np.testing.assert_allclose(lonely.heads[0], personal.heads[4], atol=1e-4)


def test_accuracy_counts_each_users_rows_by_its_own_head() -> None:
    table, parts = population(), network()
    settings = replace(PLAIN, rounds=2)
    weights = method("fedavg", new_run(table), settings).weights
    personal = fit_last_heads(parts, weights, None, FIT, table, SLOTS)
    found = personal.accuracy(table)
    body, head = copy.deepcopy(parts.representation), copy.deepcopy(parts.head)
    body.load(weights[: body.size])
    for user in np.flatnonzero(table.sizes):
        rows, labels = rows_of(table, user)
        head.load(weights[body.size :])
        Z = body.module(rows).detach()
        mine = copy.deepcopy(head.module)
        descend(lambda Z=Z, mine=mine, labels=labels: functional.cross_entropy(mine(Z), labels),
                mine.parameters(), FIT.rate, FIT.momentum, FIT.steps)  # fmt: skip
        expected = (mine(Z).argmax(dim=1) == labels).float().mean()
        assert found[user] == pytest.approx(float(expected))
    with pytest.raises(InputError, match="users with heads"):
        personal.accuracy(table.users(0, 3))


def test_fine_tuned_networks_of_pmtl_are_each_ones_own() -> None:
    table, parts = population(), network()
    _, kept = method("pmtl", new_run(table), PLAIN)
    personal = pmtl.end_pmtl(parts, kept.own, HeadFit(steps=0), table, SLOTS)
    whole = torch.cat([personal.representation, personal.heads], dim=1)
    assert torch.equal(whole, kept.own)
    found = personal.accuracy(table)
    user = int(np.argmax(table.sizes))
    mine = torch.nn.Sequential(parts.representation.module, parts.head.module)
    load(mine, kept.own[user])
    rows, labels = rows_of(table, user)
    assert found[user] == pytest.approx(float((mine(rows).argmax(dim=1) == labels).float().mean()))


@pytest.mark.parametrize("batch", [None, 2])
def test_networks_of_any_kind_descend_as_stacks_of_layers_do(batch, monkeypatch) -> None:
    """One user at a time by automatic differentiation, as convolutions need it, or many by formulas."""
    table, settings = population(), replace(PLAIN, batch=batch)
    trained, kept = method("pmtl", new_run(table), settings)
    own = network_references.alone(network(), table, SLOTS, rate=0.1, batch=batch, epochs=3)
    monkeypatch.setattr(user_state, "is_stack", lambda part: False)
    slowly, again = method("pmtl", new_run(table), settings)
    assert_close(slowly.weights, trained.weights)
    assert_close(again.own, kept.own)
    assert_close(network_references.alone(network(), table, SLOTS, rate=0.1, batch=batch, epochs=3).heads, own.heads)


def test_one_linear_layer_is_a_network_without_a_representation() -> None:
    table = population()
    parts = split(torch.nn.Identity(), torch.nn.Linear(FEATURES, CLASSES), FEATURES)
    weights = fedavg.fedavg(new_run(table), parts, PLAIN, 1e-6, SLOTS).weights
    assert weights.shape == (parts.head.size,)
    found = fit_last_heads(parts, weights, None, HeadFit(steps=200, rate=0.5), table, SLOTS).accuracy(table)
    assert np.nanmean(found) > 0.9
    for name in ("ppsgd", "pmtl"):
        trained, kept = getattr(FILES[name], name)(new_run(table), parts, PLAIN, 1e-6, SLOTS)
        assert trained.weights.shape == kept.own[0].shape == weights.shape
