"""The exponential mechanism for Lipschitz losses: pure, and it finds what is there by each loss."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import runs
from privrep.data.synthetic_margin import make_margin_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.estimators.margin import PrivateMarginSelector
from privrep.heads.margin import LOSSES
from privrep.linear.methods.lipschitz_selection import LipschitzLosses, lipschitz_selection
from privrep.linear.nets import RandomNet, Zooming
from privrep.privacy.bounds import LEVELS, LossBound
from privrep.privacy.events import Pure
from privrep.users.memory import InMemoryUsers

USERS, ROWS = 1000, 8


@pytest.fixture(scope="module")
def truth():
    return make_margin_population(np.random.default_rng(0), USERS, 12, 1, ROWS)


@pytest.fixture(scope="module")
def table(truth):
    return truth.sample(np.random.default_rng(1))


run_on = partial(runs.run_on, delta=0.0, workers=1)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_direction_that_decides_is_found_within_a_pure_budget(loss, truth, table):
    run = run_on(table, 5.0)
    representation = lipschitz_selection(run, 1, loss=loss, norm=2.0, zooming=Zooming(64, 6))
    report = run.ledger.report()
    assert report.epsilon == pytest.approx(5.0)
    assert report.delta == 0
    assert all(isinstance(event, Pure) for _, event in report.events)
    assert [name for name, _ in report.events] == [f"lipschitz-{loss}-{t}/choice" for t in range(1, 7)]
    assert np.linalg.norm(representation.basis) == pytest.approx(1)
    assert abs(float(representation.basis[:, 0] @ truth.U[:, 0])) > 0.8


@pytest.mark.parametrize("loss", LOSSES)
def test_one_user_moves_every_score_by_one_at_most(loss, table):
    X, y = table.X.copy(), table.y.copy()
    X[:ROWS] = 1e3 * np.random.default_rng(2).standard_normal((ROWS, 12))
    y[:ROWS] = 50.0 if loss == "absolute" else -y[:ROWS]
    step = LipschitzLosses(RandomNet("test", 100, 12, 2), loss, 1.0, 2.0, True)
    totals = [
        InMemoryUsers(UserTable(rows, labels, table.offsets, table.ids))
        .sums(step, {"losses": LossBound(100)})["losses"]
        .total
        for rows, labels in ((table.X, table.y), (X, y))
    ]
    moved = np.abs(totals[0] - totals[1])
    assert 0 < moved.max() <= LEVELS


def test_it_can_choose_within_a_projection(table):
    run = run_on(table, 1.0)
    representation = lipschitz_selection(run, 2, loss="hinge", projected=6, zooming=Zooming(20, 2))
    assert representation.matrix.shape == (12, 2)
    assert run.ledger.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_estimator_takes_the_losses(loss, truth, table):
    groups = np.repeat(np.arange(USERS), ROWS)
    model = PrivateMarginSelector(
        1, epsilon=5.0, loss=loss, norm=2.0, projected=None, candidates=64, rounds=6, random_state=0
    )
    model.fit(table.X, table.y, groups)
    assert np.linalg.norm(model.heads_, axis=1).max() <= 2.0 + 1e-9
    assert truth.errors(np.random.default_rng(3), [(model.representation_, model.heads_)])[0] < 0.2


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"loss": "square"}, "loss"), ({"radius": 0.0}, "radius"), ({"norm": np.inf}, "norm"), ({"rank": 13}, "rank")],
)
def test_what_cannot_work_is_refused(parameters, words, table):
    run = run_on(table, 1.0)
    with pytest.raises(InputError, match=words):
        lipschitz_selection(run, **{"rank": 1, **parameters})
    assert not run.ledger.report().events
