"""The experiment on labels: what its references recover where the truth is known, its runs, its verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.label_data import (
    LABELS,
    LOGISTIC,
    TWO_ROWS,
    UNION,
    LabelTask,
    logistic,
    read_labels,
    two_rows,
    union,
)
from experiments.label_heads import fit_heads, newton, own_probabilities, spread_over_classes
from experiments.label_references import (
    CLIP,
    REFERENCES,
    USUAL,
    WORST,
    Probabilities,
    Quality,
    add_user_columns,
    count_labels,
    fit_dirichlet,
    noisy_choice,
    noisy_descent,
    noisy_logistic,
    oracle,
    set_last_aside,
    shrunk_frequency,
    standardise,
)
from experiments.label_runs import (
    ANALYST,
    ORACLE,
    LabelScore,
    meet_newcomers,
    run_classifier,
    run_label_panel,
    split_by_user,
)
from experiments.label_targets import BELOW_ORACLE, GOALS, OVER_POOLED, OVER_SIMPLE, LabelResults, judge_labels
from experiments.tables_data import SUPPORT, Panel, default_data, split
from experiments.tables_runs import DEFAULT, EPSILONS
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from experiments import label_references
from privrep import PrivateFedRepClassifier
from privrep.errors import InputError

USERS = 300


@pytest.fixture(scope="module")
def task() -> LabelTask:
    """Three classes: users have tastes of their own, and the first column says something to all."""
    rng = np.random.default_rng(171)
    sizes = rng.integers(1, 12, USERS)
    codes = np.repeat(np.arange(USERS), sizes)
    X = rng.standard_normal((len(codes), 3))
    outputs = 1.5 * rng.standard_normal((USERS, 3))[codes] + X[:, :1] * np.array([2.0, 0.0, -2.0])
    y = (outputs + rng.gumbel(size=outputs.shape)).argmax(axis=1).astype(np.float64)
    return LabelTask(**vars(split(Panel(X, y, codes), seed=0)), classes=3)


@pytest.fixture(scope="module")
def yes_or_no() -> LabelTask:
    return two_rows(0, 3_000, 200)


@pytest.fixture(scope="module")
def scores() -> list[LabelScore]:
    return list(run_label_panel(LOGISTIC, logistic(0, 150, 20), 0, (3.0,)))


def test_quality_of_known_probabilities() -> None:
    said = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    found = Quality.of(said, np.array([0.0, 1.0, 1.0, 0.0]))
    assert found.log_loss == pytest.approx(-np.log([0.9, 0.1, 0.8, 0.4]).mean())
    assert found.accuracy == 0.5
    assert found.ece == pytest.approx((abs(0.2 - 1) + abs(0.8 - 1) + abs(0.6 - 0)) / 4)
    several = Quality.of(np.array([[0.5, 0.3, 0.2], [0.5, 0.1, 0.4]]), np.array([0.0, 2.0]))
    assert several.ece == pytest.approx(0.0)  # one of two is right, and both said a half
    assert np.isfinite(Quality.of(np.array([[1.0, 0.0]]), np.array([1.0])).log_loss)


def test_calibrated_probabilities_have_next_to_no_calibration_error() -> None:
    """200,000 rows in 15 bins: noise is about 0.002, and a shift of 0.1 is seen."""
    rng = np.random.default_rng(1)
    p = rng.random(200_000)
    y = (rng.random(len(p)) < p).astype(np.float64)
    assert Quality.of(np.column_stack([1 - p, p]), y).ece < 0.01
    wrong = np.clip(p + 0.1, 0, 1)
    assert Quality.of(np.column_stack([1 - wrong, wrong]), y).ece == pytest.approx(0.095, abs=0.01)


def test_shrinkage_is_that_of_the_population() -> None:
    """30,000 users with four rows: alpha within a tenth, five standard errors."""
    rng, alpha = np.random.default_rng(2), np.array([0.5, 1.0, 2.0])
    counts = np.stack([rng.multinomial(4, p) for p in rng.dirichlet(alpha, 30_000)]).astype(np.float64)
    np.testing.assert_allclose(fit_dirichlet(counts), alpha, rtol=0.1)


def test_frequencies_are_users_own(task: LabelTask) -> None:
    said = shrunk_frequency(task)
    counts = count_labels(task, task.train)
    assert counts.sum() == task.train.sum()
    user = task.codes[task.test][0]
    rows = task.train & (task.codes == user)
    assert [counts[user, c] for c in range(3)] == [(task.y[rows] == c).sum() for c in range(3)]
    for each in (said.test, said.newcomers, said.strangers):
        np.testing.assert_allclose(each.sum(axis=1), 1.0)
    assert len(np.unique(said.strangers, axis=0)) == 1
    assert len(np.unique(said.newcomers, axis=0)) > 1


def test_a_row_is_left_out_of_its_own_frequency(task: LabelTask) -> None:
    """What is said of a training row must not change with its own label."""
    row = np.flatnonzero(task.train)[3]
    y = task.y.copy()
    y[row] = (y[row] + 1) % 3
    changed = replace(task, y=y)
    place = int(task.train[:row].sum())
    columns = [add_user_columns(each)(each.train)[place] for each in (task, changed)]
    alphas = [fit_dirichlet(count_labels(each, each.train)) for each in (task, changed)]
    others = task.train & (task.codes == task.codes[row])
    others[row] = False
    counts = np.array([(task.y[others] == c).sum() for c in range(3)])
    for found, alpha in zip(columns, alphas, strict=True):
        expected = np.log(counts[1:] + alpha[1:]) - np.log(counts[0] + alpha[0])
        np.testing.assert_allclose(found[3:5], expected)


def test_heads_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    rows, came = rng.standard_normal((2, 30, 3)), rng.random((2, 30)) < 0.6
    found = newton(rows, came, 2.0, np.zeros((2, 30)))
    for X, y, head in zip(rows, came, found, strict=True):
        expected = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10).fit(X, y).coef_[0]
        np.testing.assert_allclose(head, expected, rtol=1e-4, atol=1e-5)
    moved = newton(rows, came, 2.0, rows @ np.array([1.0, 0.0, -1.0]))
    assert np.abs(moved - found).max() > 0.1


def test_heads_in_the_span_of_rows_are_those_of_all_columns(task: LabelTask) -> None:
    """More columns than rows change nothing: a ridge leaves heads in the span."""
    rng = np.random.default_rng(4)
    wide = rng.standard_normal((len(task.X), 20))
    found = own_probabilities(task, wide, task.train, task.test, (1.0, 0.5))
    design = np.column_stack([wide, np.ones(len(wide))])
    heads = fit_heads(task, design, task.train, np.append(np.full(20, 1.0), 0.5), np.zeros((len(wide), 3)))
    users = task.codes[task.test]
    expected = spread_over_classes(np.einsum("rc,roc->ro", design[task.test], heads[users]))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_users_without_rows_have_no_head(task: LabelTask) -> None:
    heads = fit_heads(task, task.X, task.train, 1.0, np.zeros((len(task.X), 3)))
    has = np.isin(np.arange(task.n_users), task.codes[task.train])
    assert (heads[~has] == 0).all()
    assert (np.abs(heads[has]).max(axis=(1, 2)) > 0).all()


def test_the_last_row_of_each_user_is_set_aside(task: LabelTask) -> None:
    most, last = set_last_aside(task)
    assert ((most | last) == task.train).all()
    assert not (most & last).any()
    sizes = np.bincount(task.codes[task.train], minlength=task.n_users)
    np.testing.assert_array_equal(np.bincount(task.codes[last], minlength=task.n_users), (sizes > 1).astype(int))


def test_references_know_what_they_should(task: LabelTask) -> None:
    found = {name: fit(task).qualities(task) for name, fit in REFERENCES.items()}
    test = {name: qualities[0].log_loss for name, qualities in found.items()}
    assert test["with user columns"] < min(test["shrunk frequency"], test["pooled logistic"])
    assert test["pooled logistic"] < np.log(3)
    strangers = {name: qualities[2].log_loss for name, qualities in found.items()}
    assert strangers["pooled logistic"] == strangers["with user columns"]
    assert found["pooled logistic"][1] == found["pooled logistic"][2]


def test_true_heads_are_best() -> None:
    task = logistic(0, 300, 50)
    known = oracle(task)
    truth = known.qualities(task)[0]
    assert truth.accuracy > 0.75
    assert truth.log_loss < 0.8 * shrunk_frequency(task).qualities(task)[0].log_loss
    assert (known.strangers == 0.5).all()


def test_made_up_populations() -> None:
    task = two_rows(1, 500, 50)
    sizes = [np.bincount(task.codes[rows], minlength=550) for rows in (task.train, task.test, task.support)]
    assert (sizes[0][:500] == 2).all()
    assert (sizes[1][:500] == 2).all()
    assert (sizes[2][500:] == SUPPORT).all()
    assert not (task.train & task.newcomers).any()
    X = standardise(task)
    varies = np.array([np.ptp(X[task.codes == user], axis=0) for user in range(20)])
    assert (varies[:, :2] == 0).all()
    assert (varies[:, 2:] > 0).all()
    assert (two_rows(1, 500, 50).y == task.y).all()
    assert (two_rows(2, 500, 50).y != task.y).any()


class Still(np.random.Generator):
    """Noise that is always one standard deviation."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: int) -> np.ndarray:  # type: ignore[override]
        return np.ones(size)


def test_an_analyst_with_next_to_no_noise_does_well(yes_or_no: LabelTask) -> None:
    """But for strangers: clipping takes more of the rare label's gradients than of the usual one's."""
    said = noisy_logistic(yes_or_no, 100.0, np.random.default_rng(0)).qualities(yes_or_no)
    frequency, pooled = (REFERENCES[name](yes_or_no).qualities(yes_or_no) for name in list(REFERENCES)[:2])
    assert said[0].log_loss < 1.01 * frequency[0].log_loss
    assert said[2].log_loss < 1.05 * pooled[2].log_loss
    noisy = noisy_logistic(yes_or_no, 0.05, np.random.default_rng(0)).qualities(yes_or_no)
    assert noisy[0].log_loss > said[0].log_loss


def test_the_analyst_clips_what_one_user_can_do(yes_or_no: LabelTask) -> None:
    """One step of descent moves by twice the clipping norm of a user at most, however large its rows."""
    rows = np.column_stack([np.ones(len(yes_or_no.X)), standardise(yes_or_no)])
    loud = rows.copy()
    loud[yes_or_no.codes == 0] *= -1e6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_references, "GRADIENTS", 1)
        users = len(np.unique(yes_or_no.codes[yes_or_no.train]))
        first, second = (noisy_descent(yes_or_no, each, 1.0, Still()) for each in (rows, loud))
    assert 0 < np.linalg.norm(first - second) <= 2 * CLIP * label_references.STEP / users * 1.0001


def test_the_analyst_chooses_by_clipped_differences() -> None:
    losses = np.zeros((4, 100))
    losses[0], losses[1] = 0.1, -0.2
    losses[3, 0] = -1e9  # one user
    assert noisy_choice(losses, 1e9, np.random.default_rng(0)) == 1
    losses[1] = 0.3
    losses[3, 1:] = (WORST + 1) / 99
    assert noisy_choice(losses, 1e9, np.random.default_rng(0)) == USUAL


def test_everybody_is_run_on_the_same_split(scores: list[LabelScore]) -> None:
    assert [(s.method, s.epsilon) for s in scores] == [
        *((name, None) for name in (*REFERENCES, ORACLE)),
        (ANALYST, 3.0),
        (DEFAULT, 3.0),
    ]
    task = logistic(0, 150, 20)
    quality = shrunk_frequency(task).qualities(task)[0]
    assert (scores[0].test, scores[0].accuracy_test, scores[0].ece_test) == (
        quality.log_loss, quality.accuracy, quality.ece,
    )  # fmt: skip
    ours = scores[-1]
    assert ours.epsilon_spent is not None
    assert 0 < ours.epsilon_spent <= 3.0
    assert ours.users == 170


def test_a_seed_makes_the_numbers(yes_or_no: LabelTask) -> None:
    one, same, other = (run_classifier("small", yes_or_no, seed, 3.0) for seed in (0, 0, 1))
    assert replace(one, seconds=0.0) == replace(same, seconds=0.0)
    assert one != other


def test_newcomers_get_heads_of_their_own(yes_or_no: LabelTask) -> None:
    train = yes_or_no.train
    model = PrivateFedRepClassifier(epsilon=8.0, classes=[0, 1], random_state=0)
    labels = yes_or_no.y.astype(np.int64)
    model.fit(yes_or_no.X[train], labels[train], groups=yes_or_no.codes[train])
    said = meet_newcomers(yes_or_no, model)
    user = yes_or_no.codes[yes_or_no.newcomers][-1]
    own, asked = yes_or_no.support & (yes_or_no.codes == user), yes_or_no.newcomers & (yes_or_no.codes == user)
    head = model.personalize(yes_or_no.X[own], labels[own])
    np.testing.assert_array_equal(said[-2:], head.predict_proba(yes_or_no.X[asked]))


def test_rows_by_user() -> None:
    found = split_by_user(np.array([3, 1, 3, 1, 2]))
    assert {user: places.tolist() for user, places in found.items()} == {1: [1, 3], 2: [4], 3: [0, 2]}


def made_up(method: str, epsilon: float | None, test: float, accuracy: float, **more: float) -> LabelScore:
    return LabelScore(LOGISTIC, 10, 0, method, epsilon, test, accuracy, 0.1, 1.0, 0.5, 0.1, **more)


MADE_UP = [
    made_up("shrunk frequency", None, 0.5, 0.7),
    made_up("pooled logistic", None, 0.4, 0.7),
    made_up("alone", None, 0.6, 0.7),
    made_up(ORACLE, None, 0.2, 0.9),
    made_up(ANALYST, 1.0, 0.8, 0.6),
    made_up(DEFAULT, 1.0, 0.4, 0.896, prior=0.32),
]


def test_numbers_are_compared_with_what_they_should() -> None:
    verdicts = {v.figure: v for v in judge_labels(LabelResults(MADE_UP))}
    simple, below = (verdicts[f"test rows: {name}"] for name in (OVER_SIMPLE, BELOW_ORACLE))
    assert (simple.mean, simple.most, simple.met) == (pytest.approx(0.4 / 0.32), 1.005, "NO")
    assert (below.mean, below.most, below.met) == (pytest.approx(0.4), 0.5, "yes")
    assert verdicts["test rows: log-loss over the analyst's"].mean == pytest.approx(0.5)
    assert f"test rows: {OVER_POOLED}" not in verdicts  # asked of two rows alone
    assert "newcomers with none: log-loss over the analyst's" not in verdicts  # nobody has it
    without = [replace(score, prior=None) for score in MADE_UP]
    (simple,) = (v for v in judge_labels(LabelResults(without)) if v.figure == f"test rows: {OVER_SIMPLE}")
    assert simple.mean == pytest.approx(0.8)
    assert not any(v.met for v in judge_labels(LabelResults(MADE_UP), quick=True))


def test_targets_are_those_that_were_set() -> None:
    asked = {(goal.name, panel): most for goal in GOALS for panel, most in goal.asked.items() if any(most)}
    assert asked == {
        ("test rows: log-loss", UNION): (0.340, 0.333, 0.328),
        (f"test rows: {OVER_POOLED}", TWO_ROWS): (None, 1.0, None),
        (f"test rows: {BELOW_ORACLE}", LOGISTIC): (None, 0.5, None),
        **{(f"test rows: {OVER_SIMPLE}", panel): (1.005,) * 3 for panel in LABELS},
    }
    assert len(EPSILONS) == 3


def test_predictions_are_measured_where_they_belong(task: LabelTask) -> None:
    known, new = (np.eye(3)[task.y[rows].astype(np.int64)] for rows in (task.test, task.newcomers))
    right = Probabilities(known, new, np.full_like(new, 1 / 3)).qualities(task)
    assert [quality.log_loss for quality in right] == pytest.approx([0.0, 0.0, np.log(3)])


def test_union_membership() -> None:
    if not (default_data() / "nlswork.parquet").exists():
        pytest.skip(f"there is no nlswork.parquet in {default_data()}")
    task = LABELS[UNION](0, False)
    assert task.n_users == 4_110
    assert task.X.shape[1] == 14
    assert set(np.unique(task.y)) == {0.0, 1.0}
    assert 0.32 < shrunk_frequency(task).qualities(task)[0].log_loss < 0.37


def test_home_runs_are_two_and_four_classes() -> None:
    if not (default_data() / "batting.parquet").exists():
        pytest.skip(f"there is no batting.parquet in {default_data()}")
    two, four = (LABELS[name](0, False) for name in list(LABELS)[1:3])
    assert (two.classes, four.classes) == (2, 4)
    assert two.y.mean() == pytest.approx(0.5, abs=0.01)
    shares = np.bincount(four.y.astype(np.int64))[1:]
    assert shares.max() < 1.01 * shares.min()


def test_a_file_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no nlswork\.parquet in"):
        read_labels("nlswork.parquet", union, 0, tmp_path)


def test_outputs_become_probabilities() -> None:
    outputs = np.array([[0.3], [-2.0]])
    np.testing.assert_allclose(spread_over_classes(outputs)[:, 1], expit(outputs[:, 0]))
    several = spread_over_classes(np.array([[0.0, 1.0, -1.0]]))
    np.testing.assert_allclose(several, expit([[0.0, 1.0, -1.0]]) / expit([0.0, 1.0, -1.0]).sum())
