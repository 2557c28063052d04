"""Margin selection spends a pure epsilon, draws what it says, survives being stopped, and finds what is there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from experiments.theory import theorem_17
from scipy import sparse
from scipy.stats import chi2
from sklearn.base import clone

import runs
from privrep.data.readers import TableSource
from privrep.data.synthetic_margin import make_margin_population
from privrep.data.table import UserTable
from privrep.errors import InputError, ResumeError
from privrep.estimators.margin import PrivateMarginSelector
from privrep.heads.margin import fit_zero_one_heads
from privrep.linear.methods.margin_selection import MarginLosses, choose_dimension, margin_selection
from privrep.linear.nets import RandomNet, Zooming, make_sign_matrix
from privrep.local.transform import Projection
from privrep.privacy.bounds import LEVELS, LossBound
from privrep.privacy.events import Pure
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.projected import project
from privrep.users.streaming import StreamingUsers

USERS, ROWS = 1500, 10
QUICK = {"candidates": 256, "rounds": 8}


@pytest.fixture(scope="module")
def truth():
    return make_margin_population(np.random.default_rng(0), USERS, 60, 2, ROWS, margin=0.35)


@pytest.fixture(scope="module")
def table(truth):
    return truth.sample(np.random.default_rng(1))


@pytest.fixture(scope="module")
def groups():
    return np.repeat(np.arange(USERS), ROWS)


@pytest.fixture(scope="module")
def fitted(table, groups):
    return PrivateMarginSelector(epsilon=4.0, random_state=3, **QUICK).fit(table.X, table.y, groups)


run_on = partial(runs.run_on, delta=0.0, workers=1)


def test_it_finds_the_directions_that_decide(fitted, truth, table):
    P = (table.X @ truth.U).reshape(USERS, ROWS, 2) * table.y.reshape(USERS, ROWS, 1)
    models = [(fitted.representation_, fitted.heads_), (truth.U, fit_zero_one_heads(P))]
    ours, true = truth.errors(np.random.default_rng(2), models)
    assert true < 0.01
    assert ours < true + 0.05
    nothing = RandomNet("nothing", 1, 60, 2).member(0)
    images = (table.X @ nothing).reshape(USERS, ROWS, 2) * table.y.reshape(USERS, ROWS, 1)
    assert truth.errors(np.random.default_rng(2), [(nothing, fit_zero_one_heads(images))])[0] > 0.15


def test_all_of_a_pure_epsilon_is_charged_and_every_choice_is_on_the_billboard(table):
    run = run_on(table, 0.7, seed=1)
    representation = margin_selection(run, 2, margin=0.4, zooming=Zooming(50, 4))
    report = run.ledger.report()
    assert report.delta == 0
    assert report.epsilon == pytest.approx(0.7)
    assert [name for name, _ in report.events] == [f"margin-{t}/choice" for t in range(1, 5)]
    assert all(isinstance(event, Pure) for _, event in report.events)
    assert [page.name for page in run.billboard] == [*(f"margin-{t}" for t in range(1, 5)), "representation"]
    assert np.array_equal(run.billboard["representation"].arrays["basis"], representation.basis)
    assert representation.matrix.shape == (60, 2)
    assert np.array_equal(representation.matrix, representation.basis)


def test_what_is_chosen_follows_from_the_choices_alone(table):
    """U can be computed from the indices on the billboard, with no look at the users."""
    run = run_on(table, 0.7, seed=1)
    zooming = Zooming(50, 3)
    representation = margin_selection(run, 2, margin=0.4, projected=12, zooming=zooming)
    centre = None
    for t in range(1, 4):
        angle = 0.0 if centre is None else zooming.angle(t)
        net = RandomNet(f"margin-{t}", 50, 12, 2, centre, angle)
        centre = net.member(run.billboard.read_choice(f"margin-{t}").index)
    assert np.array_equal(make_sign_matrix(12, 60).T @ centre, representation.basis)


def test_choices_have_the_probabilities_of_the_exponential_mechanism():
    """Chi-square of 1,000 selections from 5 candidates; false alarms 1e-6 each, and a wrong epsilon is noticed."""
    truth = make_margin_population(np.random.default_rng(5), 60, 12, 2, 6)
    table = truth.sample(np.random.default_rng(6))
    epsilon, draws = 0.25, 1_000
    net = RandomNet("margin-1", 5, 12, 2)
    users = project(InMemoryUsers(table, Performance(1)), Projection(None, 1.0))
    step = MarginLosses(net, 0.4, 1.0, True)
    totals = users.sums(step, {"losses": LossBound(5)})["losses"].total / LEVELS
    members, found = [net.member(i) for i in range(5)], np.zeros(5)
    for seed in range(draws):
        chosen = margin_selection(run_on(table, epsilon, seed=seed), 2, margin=0.4, zooming=Zooming(5, 1)).basis
        found[next(i for i in range(5) if np.array_equal(members[i], chosen))] += 1

    def chi_square(epsilon):
        weights = np.exp(-(totals - totals.min()) * epsilon / 2)
        expected = draws * weights / weights.sum()
        return ((found - expected) ** 2 / expected).sum()

    assert chi_square(epsilon) < chi2.isf(1e-6, 4)
    assert chi_square(3 * epsilon) > chi2.isf(1e-6, 4)


def test_one_user_moves_every_score_by_one_at_most(table):
    rng = np.random.default_rng(9)
    X, y = table.X.copy(), table.y.copy()
    X[30:40], y[30:40] = 1e30 * rng.standard_normal((10, 60)), rng.choice([-1, 1], 10)  # user 3
    other = UserTable(X, y, table.offsets, table.ids)
    step = MarginLosses(RandomNet("test", 200, 20, 2), 0.4, 1.0, True)
    projection = Projection(make_sign_matrix(20, 60), 1.0)
    totals = [
        project(InMemoryUsers(t), projection).sums(step, {"losses": LossBound(200)})["losses"].total
        for t in (table, other)
    ]
    moved = np.abs(totals[0] - totals[1])
    assert 0 < moved.max() <= LEVELS


def test_a_run_that_was_stopped_goes_on_and_ends_alike(table, tmp_path):
    def stop(page, step):
        if page == "margin-3":
            raise KeyboardInterrupt

    zooming = Zooming(64, 5)
    whole = margin_selection(run_on(table, 1.0, seed=4), 2, margin=0.4, zooming=zooming)
    (tmp_path / "run").mkdir()
    stopped = run_on(table, 1.0, seed=4, folder=tmp_path / "run", on_release=stop)
    with pytest.raises(KeyboardInterrupt):
        margin_selection(stopped, 2, margin=0.4, zooming=zooming)
    stopped.ledger.close()
    seen: list[str] = []
    resumed = run_on(table, 1.0, seed=4, folder=tmp_path / "run", on_release=lambda page, step: seen.append(page))
    assert "margin-3" in resumed.billboard
    assert "margin-4" not in resumed.billboard
    again = margin_selection(resumed, 2, margin=0.4, zooming=zooming)
    assert np.array_equal(again.basis, whole.basis)
    assert resumed.ledger.epsilon == pytest.approx(1.0)
    assert len(resumed.ledger.report().events) == 5
    resumed.ledger.close()


def test_the_estimator_predicts_scores_and_personalizes(fitted, table, truth, groups):
    assert fitted.privacy_.epsilon == pytest.approx(4.0)
    assert fitted.privacy_.delta == 0
    assert fitted.privacy_.seeded
    assert fitted.classes_.tolist() == [-1, 1]
    assert fitted.heads_.shape == (USERS, 2)
    outputs = fitted.decision_function(table.X, groups)
    assert np.array_equal(fitted.predict(table.X, groups), np.where(outputs > 0, 1, -1))
    assert fitted.score(table.X, table.y, groups) > 0.9
    head = fitted.personalize(table.X[:10], table.y[:10])
    assert head.decision_function(table.X[:10]) == pytest.approx(outputs[:10], abs=1e-5)
    assert np.array_equal(head.predict(table.X[:10]), fitted.predict(table.X[:10], groups[:10]))
    with pytest.raises(InputError, match="shape"):
        head.predict(table.X[:10, :5])


def test_fits_are_reproducible_by_seed_and_take_named_classes_and_sparse_rows(fitted, table, groups):
    names = np.where(table.y > 0, "yes", "no")
    again = clone(fitted).set_params(classes=("no", "yes"))
    again.fit(sparse.csr_matrix(table.X), names, groups)
    assert np.allclose(again.representation_, fitted.representation_)
    X, g = table.X[:500], groups[:500]
    assert np.array_equal(again.predict(X, g), np.where(fitted.predict(X, g) > 0, "yes", "no"))
    assert PrivateMarginSelector(**fitted.get_params()).get_params() == fitted.get_params()


def test_heads_of_the_paper_are_made_of_the_second_half(fitted, table, groups):
    paper = clone(fitted).set_params(configuration="paper").fit(table.X, table.y, groups)
    assert np.array_equal(paper.representation_, fitted.representation_)
    P = (table.X @ paper.representation_.astype(np.float32)).reshape(USERS, ROWS, 2)
    signed = (P * table.y.reshape(USERS, ROWS, 1))[:, 5:].astype(np.float64)
    assert np.allclose(paper.heads_, fit_zero_one_heads(signed), atol=1e-6)


def test_a_folder_is_continued_with_the_same_settings_only(table, groups, tmp_path, monkeypatch):
    model = PrivateMarginSelector(random_state=1, candidates=32, rounds=2, run_folder=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "choose", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clone(model).fit(table.X, table.y, groups)
    for other in ({"margin": 0.35}, {"rank": 1}, {"candidates": 33}, {"classes": (1, -1)}, {"projected": 7}):
        with pytest.raises(ResumeError):
            clone(model).set_params(**other).fit(table.X, table.y, groups)
    clone(model).fit(table.X, table.y, groups)
    with pytest.raises(InputError, match="finished model"):
        clone(model).fit(table.X, table.y, groups)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rank": "auto"}, "give a rank"),
        ({"rank": 0}, "rank"),
        ({"rank": 40, "projected": 20}, "projected dimension"),
        ({"margin": 0.0}, "margin"),
        ({"margin": 1.5}, "smaller"),
        ({"radius": math.inf}, "radius"),
        ({"norm": -1.0}, "norm"),
        ({"loss": "square"}, "loss"),
        ({"configuration": "authors"}, "configuration"),
        ({"projected": 0}, "projected"),
        ({"projected": "few"}, "projected"),
        ({"candidates": 0}, "candidate"),
        ({"rounds": 0}, "round"),
        ({"classes": (1, 1)}, "classes"),
        ({"classes": (0, 1, 2)}, "classes"),
        ({"classes": (0, 1)}, "labels"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"random_state": -1}, "random_state"),
        ({"random_state": 1, "relation": "other"}, "relation"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(parameters, words, table, groups):
    with pytest.raises(InputError, match=words):
        PrivateMarginSelector(**parameters).fit(table.X, table.y, groups)


def test_rows_of_unknown_users_and_missing_groups_are_errors(fitted, table, groups):
    with pytest.raises(InputError, match="groups"):
        PrivateMarginSelector().fit(table.X, table.y)
    with pytest.raises(InputError, match="groups"):
        fitted.predict(table.X)
    with pytest.raises(InputError, match="groups"):
        fitted.predict(table.X, groups[:-1])
    with pytest.raises(InputError, match="personalize"):
        fitted.predict(table.X[:1], [USERS])
    with pytest.raises(InputError, match="labels"):
        fitted.personalize(table.X[:2], [1, 2])


def test_the_projection_is_as_large_as_the_margin_is_small():
    assert choose_dimension(0.3, 1.0, 1.0) == 31
    assert choose_dimension(0.6, 2.0, 1.0) == 31
    assert choose_dimension(0.01, 1.0, 1.0) == 60
    assert choose_dimension(0.9, 1.0, 1.0) == 10


def test_theorem_17():
    terms = theorem_17(5_000, 10, 2, 1.0, 1 / 0.3)
    assert terms.privacy == pytest.approx(2 / (5_000 * 0.09))
    assert terms.sampling == pytest.approx(1 / (0.3 * math.sqrt(10)))
    assert theorem_17(5_000, 10, 2, 0.5, 1 / 0.3).privacy == pytest.approx(2 * terms.privacy)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
def test_budgets_with_a_delta_and_of_either_relation_are_kept(delta, relation, table, groups):
    model = PrivateMarginSelector(epsilon=0.5, delta=delta, relation=relation, candidates=16, rounds=3)
    model.fit(table.X, table.y, groups)
    assert model.privacy_.epsilon <= 0.5 * (1 + 1e-9)
    assert (model.privacy_.delta, model.privacy_.relation, model.privacy_.seeded) == (delta, relation, False)
    assert sum(event.epsilon for _, event in model.privacy_.events) == pytest.approx(0.5)


def test_users_on_disk_are_asked_the_same_and_choose_the_same(tmp_path):
    truth = make_margin_population(np.random.default_rng(7), 200, 30, 2, 6)
    table = truth.sample(np.random.default_rng(8))
    columns = {f"x{j}": table.X[:, j] for j in range(30)}
    names = np.repeat(np.arange(200), 6)
    pq.write_table(pa.table({"user": names, "y": table.y, **columns}), tmp_path / "rows.parquet")
    settings = {"margin": 0.4, "projected": 12, "zooming": Zooming(300, 3)}
    memory = margin_selection(run_on(table, 2.0, seed=5), 2, **settings)
    with StreamingUsers.open(TableSource(tmp_path / "rows.parquet", "user", "y")) as users:
        disk = margin_selection(replace(run_on(table, 2.0, seed=5), users=users), 2, **settings)
    assert np.array_equal(memory.basis, disk.basis)
