"""The default's own steps and choices: nobody's numbers depend on others' rows, and what is decided is right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import runs
from privrep.privacy.billboard import Billboard, Release
from privrep.privacy.bounds import DIRECTION_ONLY
from privrep.privacy.protocol import UserBatch
from strangers import assert_nobody_else_moves, assert_sum_stays_within_bound, strangers

torch = pytest.importorskip("torch")

from privrep.data.table import UserTable  # noqa: E402
from privrep.errors import InputError  # noqa: E402
from privrep.heads.neural import (  # noqa: E402
    ALONE,
    CANDIDATES,
    DOUBTED,
    EXPECTED,
    NEVER,
    HeadLosses,
    believed_losses,
    choices,
    fit_own_heads,
    losses_of_nobody,
    weigh,
)
from privrep.heads.softmax import Candidate, HeadInputs, Sight  # noqa: E402
from privrep.models import networks  # noqa: E402
from privrep.neural.class_moments import Scatter, classes_agree, directions  # noqa: E402
from privrep.neural.curvature import (  # noqa: E402
    FeaturePairs,
    FeatureSquares,
    Variation,
    coordinates,
    degrees,
    ridge_for,
)
from privrep.neural.description import losses_from_json  # noqa: E402
from privrep.neural.gradient_step import GradientStep  # noqa: E402
from privrep.neural.layers import Shape, linear_split  # noqa: E402
from privrep.neural.mixed import CLEARLY, WITH_SCORES, WITHOUT, BetterAlone, are_mixed  # noqa: E402
from privrep.neural.plan import (  # noqa: E402
    LEAST_SIGNAL,
    Options,
    count_deciding_rounds,
    most_parameters,
    plan_sharing,
    signal,
)
from privrep.neural.standard_step import Coordinates, Standards, StandardStep  # noqa: E402
from privrep.neural.training import (  # noqa: E402
    LINEAR,
    SCORE_NOISE,
    MeanRow,
    SharedPart,
    careful,
    learn,
)
from privrep.privacy.bounds import Bound  # noqa: E402

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
    both = linear_split(np.zeros(FEATURES), SHAPE)
    weights = rng.normal(size=both.representation.size).astype(np.float32)
    plan = plan_sharing(Options(CLASSES, FEATURES), 10_000, 0.3, "linear")
    return SharedPart(plan, both, weights, centre, 2.0, 0, np.zeros(len(CANDIDATES)))


def steps() -> dict[str, tuple[object, str, int, bool]]:
    """By name: a step, its statistic, how many numbers that has, and whether it is acute."""
    known = learned()
    update = GradientStep(known.split, known.weights, known.split.head.weights(), LINEAR.head_fit, 1.0, SLOTS)
    standards = Standards(CLASSES, 0, known.centre, 1.5)
    basis = np.linalg.qr(np.random.default_rng(3).normal(size=(FEATURES, 3)))[0]
    turned = replace(standards, coordinates=Coordinates(np.linspace(0.5, 2, FEATURES), basis, np.ones(3), 2.0, 4.0))
    some, sizes = np.array([0, 2, 5]), np.array([0.5, 1.0, 2.0])
    return {
        "update": (update, "update", FEATURES * CLASSES, False),
        "standardised update": (StandardStep(update, standards), "update", FEATURES * CLASSES, False),
        "turned update": (StandardStep(update, turned), "update", FEATURES * CLASSES, False),
        "squares": (FeatureSquares(SLOTS, standards), "squares", FEATURES, True),
        "pairs": (FeaturePairs(SLOTS, standards, some, sizes), "pairs", 3**2, True),
        "mean": (MeanRow(SLOTS, CLASSES, 0), "mean", FEATURES, False),
        "heads": (HeadLosses(known, SLOTS), "losses", len(CANDIDATES), False),
        "better alone": (BetterAlone(known, SLOTS), "better", 1, False),
        "within": (Scatter(SLOTS, CLASSES, 0), "within", FEATURES**2, True),
        "between": (Scatter(SLOTS, CLASSES, 0), "between", FEATURES**2, True),
    }


@pytest.mark.parametrize("name", list(steps()))
def test_a_user_in_anothers_place_changes_nobody_else(name: str) -> None:
    step, key, _, _ = steps()[name]

    def send(X: np.ndarray, y: np.ndarray) -> object:
        with np.errstate(all="ignore"):
            return step(UserBatch(X, y, np.arange(USERS)))[key]

    assert_nobody_else_moves(send, crowd(), strangers(*crowd(9)), (3,))


@pytest.mark.parametrize("name", list(steps()))
def test_the_clipped_sum_moves_by_the_sensitivity_at_most(name: str) -> None:
    step, key, size, acute = steps()[name]
    bound, strange = Bound(1e-3, size, acute=acute), strangers(*crowd(9))
    assert_sum_stays_within_bound(step, key, bound, crowd(users=20), strange, 5e-4)


def test_the_plan_carries_what_the_signal_says() -> None:
    assert signal(1_000, 0.268, 40, 235_000) == pytest.approx(0.0019, rel=0.02)
    most = most_parameters(2_000, 0.268, 16)
    assert signal(2_000, 0.268, 16, most) >= LEAST_SIGNAL > signal(2_000, 0.268, 16, most + 1)
    assert plan_sharing(Options(10, 256), 200, 0.03, "auto").share == "nothing"
    assert plan_sharing(Options(10, 256), 2_000, 0.268, "auto").rounds == 16
    assert plan_sharing(Options(10, 256), 500, 0.268, "auto").features == 256
    assert plan_sharing(Options(10, 256), 1_000, 40.0, "auto").rounds == 64  # noise hardly counts
    assert plan_sharing(Options(10, 256), 1_000, 40.0, "auto", rounds=5).rounds == 5
    assert plan_sharing(Options(10, 256, whole=235_000), 1_000, 0.268, "auto").share == "linear"
    assert plan_sharing(Options(10, 256, whole=235_000), 100_000, 0.268, "auto").share == "all"
    adapters = Options(10, 256, whole=235_000, adapters=((4, 9_000), (1, 1_500)))
    assert plan_sharing(adapters, 2_000, 0.268, "auto").rank == 1
    with pytest.raises(InputError, match="needs a representation"):
        plan_sharing(Options(10, 256), 1_000, 0.268, "all")


def population(users: int, agree: float, seed: int = 3) -> tuple[UserTable, UserTable]:
    """Four classes apart in two of twelve features; their names are everybody's, or by some users' own choice."""
    rng = np.random.default_rng(seed)
    means = np.zeros((CLASSES, FEATURES))
    means[:, :2] = [[1, 1], [1, -1], [-1, 1], [-1, -1]]
    tables = []
    own = np.arange(users) >= agree * users
    names = np.array([rng.permutation(CLASSES) if apart else np.arange(CLASSES) for apart in own])
    for rows in (6, 6):
        kinds = rng.integers(0, CLASSES, (users, rows))
        X = (1.5 * means[kinds] + rng.normal(size=(users, rows, FEATURES))).reshape(-1, FEATURES).astype(np.float32)
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        y = np.take_along_axis(names, kinds, axis=1).ravel().astype(np.float32)
        tables.append(UserTable.from_rows(X, y, np.repeat(np.arange(users), rows)))
    return tables[0], tables[1]


new_run = partial(runs.run_on, delta=1e-5, seed=7)


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("epsilon", [2.0, 4.0, 200.0])
def test_first_rounds_tell_whether_classes_mean_the_same(agree: bool, epsilon: float) -> None:
    table, _ = population(1_000, agree)
    run = new_run(table, epsilon)
    plan = plan_sharing(Options(CLASSES, FEATURES), 1_000, run.ledger.budget.mu, "auto")
    found = learn(run, plan, None, Shape(CLASSES, SLOTS))
    assert found.plan.share == ("linear" if agree else "directions")
    first = plan.rounds // 4
    assert f"round-{first}" in run.billboard
    assert (f"round-{first + 1}" in run.billboard) == agree
    assert ("scatter" in run.billboard) != agree
    assert run.ledger.epsilon == pytest.approx(epsilon, rel=1e-3)  # whatever is decided, nothing is left over
    assert run.billboard["agreement"].facts["derived"] == {"agree": agree}


@pytest.mark.parametrize("agree", [True, False])
def test_a_run_that_goes_on_keeps_the_verdict_of_before(agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine rounds in another way, and could decide otherwise: the billboard decides."""
    table, _ = population(1_000, agree)
    run = new_run(table, 4.0)
    plan, shape = plan_sharing(Options(CLASSES, FEATURES), 1_000, run.ledger.budget.mu, "auto"), Shape(CLASSES, SLOTS)
    found, spent = learn(run, plan, None, shape), run.ledger.epsilon
    monkeypatch.setattr("privrep.neural.training.classes_agree", lambda *asked: not agree)
    again = learn(run, plan, None, shape)
    assert again.plan.share == found.plan.share
    assert np.array_equal(again.weights, found.weights)
    assert run.ledger.epsilon == spent


def test_agreement_is_heard_along_the_directions_in_which_rows_vary() -> None:
    """A sum that noise hides in all of 2,000 numbers is clear in the 20 that rows' two directions have."""
    rng = np.random.default_rng(4)
    outputs, d, sigma = 10, 200, 30 * DIRECTION_ONLY
    basis = np.linalg.qr(rng.normal(size=(d, 2)))[0]
    variation = Variation(basis, np.ones(2), 1e-3)
    said = np.zeros((outputs, d))
    said[0] = 8 * sigma * basis[:, 0]

    def released(total: np.ndarray) -> list[Release]:
        return [Release(total.ravel() + rng.normal(scale=sigma, size=outputs * d), sigma, 1.0, sigma)]

    assert sum(classes_agree(released(said), 10, variation) for _ in range(200)) > 190
    assert sum(classes_agree(released(0 * said), 10, variation) for _ in range(200)) < 40  # 2 of a skewed tail
    assert not classes_agree(released(said), 10**9, variation)  # so many users add up to as much by chance
    weights = rng.normal(size=(outputs, d))
    along = np.append(variation.along, np.full(d - 2, variation.flat))
    whole = np.hstack([basis, np.linalg.svd(basis, full_matrices=True)[0][:, 2:]])
    assert variation.weighted_square(weights) == pytest.approx(float(((weights @ whole) ** 2 @ along).sum()))


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

    alone = accuracy(replace(found, plan=replace(found.plan, share="nothing"), losses=losses_of_nobody()))
    assert accuracy(found) > alone + 0.05


def test_coordinates_bring_directions_to_one_size() -> None:
    """Rows vary a hundred times as much in one direction as in another: in the coordinates they do not."""
    rng = np.random.default_rng(1)
    sizes = np.geomspace(1, 0.1, FEATURES)
    turn = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    X = (rng.normal(size=(3_000 * 6, FEATURES)) * sizes) @ turn.T
    table = UserTable.from_rows(X.astype(np.float32), np.zeros(len(X), np.float32), np.repeat(np.arange(3_000), 6))
    run = new_run(table, 50.0)
    standards = Standards(CLASSES, 0, np.zeros(FEATURES), 0.0)
    found, variation, spent = coordinates(run, SLOTS, standards, total=run.ledger.capacity, most=1e9)
    assert 0 < spent < run.ledger.capacity
    batch = UserBatch(X.reshape(3_000, 6, FEATURES).astype(np.float32), np.zeros((3_000, 6)), np.arange(3_000))
    rows = replace(standards, coordinates=found)(batch).reshape(-1, FEATURES)
    bends = np.linalg.eigvalsh(rows.T @ rows / len(rows)) / 2
    assert bends.max() < 2.0
    assert bends.max() / bends.min() < 4  # a hundred without them
    few, narrow, _ = coordinates(new_run(table, 50.0), SLOTS, standards, total=run.ledger.capacity, most=3.0)
    assert few.degrees == pytest.approx(3.0, rel=1e-3)
    assert found.degrees > 10
    assert narrow.each.sum() == pytest.approx(3.0, rel=0.05)
    narrowed = replace(standards, coordinates=few)(batch).reshape(-1, FEATURES)
    measured = 0.5 * float((narrowed**2).sum(axis=1).mean())  # softmax bends by half at most
    assert variation.each.max() <= 1
    assert measured == pytest.approx(few.degrees, rel=0.25)


def test_coordinates_of_users_without_rows_are_those_of_the_features() -> None:
    """Released pairs are noise alone: a trace of either sign must not stop a fit that has paid."""
    X = np.zeros((300, FEATURES), np.float32)
    table = UserTable.from_rows(X, np.full(300, -1.0, np.float32), np.arange(300))
    for seed in range(12):
        run = new_run(table, 2.0, seed=100 + seed)
        standards = Standards(CLASSES, 0, np.zeros(FEATURES), 0.0)
        found, *_ = coordinates(run, SLOTS, standards, total=run.ledger.capacity, most=5.0)
        assert np.isfinite(found.on_rows(np.eye(FEATURES))).all()
        assert found.degrees > 0.1


def test_noise_in_scores_is_held_by_the_rate() -> None:
    settings = replace(LINEAR, rounds=16)
    quiet, loud = careful(settings, 10.0, 10**6, 0.05), careful(settings, 70.0, 2_000, 0.05)
    assert quiet.server_rate == settings.server_rate
    length = np.sqrt(70.0 / 0.5)
    noise = loud.server_rate / (1 - loud.momentum) * 2 * loud.clip * 16 / (2_000 * np.sqrt(0.05)) * length
    assert noise == pytest.approx(SCORE_NOISE)
    assert loud.clip == pytest.approx(settings.clip * length)


def test_a_ridge_leaves_the_degrees_that_it_is_asked_for() -> None:
    parts, steepest = np.array([0.7, 0.2, 0.1]), np.array([0.7, 0.2, 0.15])
    assert degrees(parts, steepest, ridge_for(parts, steepest, 1.2)) == pytest.approx(1.2)
    assert ridge_for(parts, steepest, 5.0) < 1e-6


def test_users_choose_among_the_kinds_that_do_best() -> None:
    losses = np.linspace(1, 0, len(CANDIDATES))
    found = choices(losses)
    assert [CANDIDATES[place].kind for place in found] == ["shared"] * 2 + ["alone"] * 3
    assert set(found) == {len(CANDIDATES) - 2, len(CANDIDATES) - 1, *ALONE[-3:]}
    assert set(choices(losses_of_nobody())) <= set(ALONE)


def test_noisy_losses_of_heads_are_drawn_towards_what_is_likely() -> None:
    released = np.random.default_rng(2).normal(size=len(CANDIDATES))
    quiet, loud = believed_losses(released, 1e-9), believed_losses(released, 1e3)
    assert quiet == pytest.approx(released - released.min())
    assert loud == pytest.approx(EXPECTED - EXPECTED.min(), abs=1e-6)
    half = believed_losses(released + 7.0, DOUBTED)  # a constant tells nothing
    assert np.diff(half) == pytest.approx(np.diff((released + EXPECTED) / 2))


def test_kinds_of_heads_that_a_folder_does_not_know_are_never_chosen() -> None:
    losses = np.linspace(0, 1, 19)
    found = losses_from_json({"losses": losses.tolist()})
    assert found.tolist() == [*losses, *[NEVER] * (len(CANDIDATES) - 19)]
    assert max(choices(found)) < 19
    with pytest.raises(ValueError, match="other kinds"):
        losses_from_json({"losses": losses[:-1].tolist()})


def test_a_head_is_an_average_of_kinds_that_do_about_as_well() -> None:
    """Of two kinds that lose the same a head has half of each, one that loses far more has no part in it."""
    table, _ = population(30, agree=True)
    labels = torch.from_numpy(table.y.reshape(30, 6)).long()
    X = torch.from_numpy(table.X.reshape(30, 6, FEATURES))
    own = Sight(X, np.zeros(FEATURES), 0.0)
    seen = HeadInputs(torch.zeros(30, 6, CLASSES), torch.zeros(CLASSES), own, own)
    kinds = [Candidate("alone", 0.3, 0.03), Candidate("alone", 0.3, 0.03), Candidate("alone", 0.3, 0.1)]
    shares, alone = weigh(np.array([0.0, 0.0, 9.0]), kinds, seen, labels)
    assert alone.all()
    assert shares == pytest.approx(np.tile([0.5, 0.5, 0.0], (30, 1)))
    shares, alone = weigh(np.array([0.0, 0.0, 9.0]), [*kinds[:2], Candidate("shared", 0.3, 0.1)], seen, labels)
    assert alone.all()
    assert not shares[:, 2].any()


def test_many_users_with_classes_of_their_own_get_directions_too() -> None:
    """Both sorts do better by far than alone, and those who agree hardly worse than if all did."""
    table, fresh = population(2_000, 0.6)
    run = new_run(table, 200.0)
    plan = plan_sharing(Options(CLASSES, FEATURES), 2_000, run.ledger.budget.mu, "auto")
    found = learn(run, plan, None, SHAPE)
    assert found.plan.share == "both"
    assert len(found.rounds) == plan.rounds  # fewer would not go as far
    assert "alone" in run.billboard
    assert "scatter" in run.billboard
    assert run.ledger.epsilon == pytest.approx(200.0, rel=1e-3)
    users = np.repeat(np.arange(2_000), 6)
    agree = users < 1_200

    def right(part: SharedPart) -> tuple[float, float]:
        found = fit_own_heads(part, table).scores(part, fresh.X, users).argmax(axis=1) == fresh.y
        return float(found[agree].mean()), float(found[~agree].mean())

    alone = right(replace(found, plan=replace(found.plan, share="nothing"), losses=losses_of_nobody()))
    scores = right(replace(found, plan=plan))
    both = right(found)
    assert both[0] > alone[0] + 0.05
    assert both[0] > scores[0] - 0.01
    assert both[1] > max(alone[1], scores[1]) + 0.03


@pytest.mark.parametrize(("part", "mixed"), [(1.0, False), (0.95, False), (0.7, True)])
def test_few_users_are_no_reason_for_directions(part: float, mixed: bool) -> None:
    table, _ = population(1_000, part)
    run = new_run(table, 30.0)
    plan = plan_sharing(Options(CLASSES, FEATURES), 1_000, run.ledger.budget.mu, "auto")
    found = learn(run, plan, None, SHAPE)
    assert "alone" in run.billboard
    assert found.plan.share == ("both" if mixed else "linear")


@pytest.mark.parametrize("part", [1.0, 0.7])
def test_a_run_that_goes_on_keeps_what_it_found_of_users_alone(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict stands on the billboard: it is not made again, of numbers that may round in another way."""
    table, _ = population(1_000, part)
    run = new_run(table, 30.0)
    plan = plan_sharing(Options(CLASSES, FEATURES), 1_000, run.ledger.budget.mu, "auto")
    found, spent = learn(run, plan, None, SHAPE), run.ledger.epsilon
    assert run.billboard["mixed"].facts["derived"] == {"mixed": part < 1}
    for name in ("MANY", "FEW"):
        monkeypatch.setattr(f"privrep.neural.mixed.{name}", -10.0 if part == 1.0 else 10.0)
    again = learn(run, plan, None, SHAPE)
    assert (again.plan.share, run.ledger.epsilon) == (found.plan.share, spent)
    assert np.array_equal(again.weights, found.weights)


def test_nobody_is_asked_where_directions_could_not_be_carried() -> None:
    table, _ = population(1_000, 0.6)
    run = new_run(table, 0.3)
    plan = plan_sharing(Options(CLASSES, FEATURES), 1_000, run.ledger.budget.mu, "linear")
    assert learn(run, plan, None, SHAPE).plan.share == "linear"
    assert "alone" not in run.billboard


def test_users_say_whether_they_do_better_alone() -> None:
    """By losses on rows that heads have not seen."""
    from privrep.heads.gradient import labels_of
    from privrep.heads.softmax import left_out_losses

    X, y = crowd(users=40)
    view = learned()
    said = BetterAlone(view, SLOTS)(UserBatch(X, y, np.arange(40)))["better"].values
    losses = left_out_losses((*WITH_SCORES, *WITHOUT), view(torch.from_numpy(X)), labels_of(y, CLASSES)).numpy()
    few = len(WITH_SCORES)
    alone = losses[:, few:].min(axis=1) < losses[:, :few].min(axis=1) - CLEARLY
    assert 0 < alone.sum() < 40
    assert np.array_equal(said[:, 0] > 0, alone)
    assert set(np.abs(said[:, 0])) == {0.5}


def test_a_share_of_users_must_stand_out_of_noise() -> None:
    class Told:
        """A run whose page says one number."""

        def __init__(self, value: float, sigma: float) -> None:
            self.users = type("Users", (), {"facts": type("Facts", (), {"users": 100})})
            self.answer, self.billboard = Release(np.array([value]), sigma, 1.0, sigma), Billboard()

        def release(self, page: str, step: object, queries: object) -> dict[str, Release]:
            return {"better": self.answer}

        def derive(self, page: str, arrays: dict[str, np.ndarray], **facts: bool) -> None:
            self.billboard.post_derived(page, arrays, facts, simulation=True)

    def mixed(share: float, sigma: float, half: float) -> bool:
        return are_mixed(Told(100 * (share - 0.5), sigma), BetterAlone(learned(), SLOTS), 0.1, half)  # type: ignore[arg-type]

    assert mixed(0.3, 1.0, 4.0)
    assert not mixed(0.24, 1.0, 4.0)
    assert not mixed(0.3, 10.0, 4.0)
    assert mixed(0.15, 1.0, 100.0)
    assert not mixed(0.1, 1.0, 1e6)


def test_inspect_names_the_rounds_that_decide() -> None:
    assert count_deciding_rounds(16, True) == 4
    assert [count_deciding_rounds(rounds, True) for rounds in (1, 2, 3)] == [0, 1, 1]
    assert count_deciding_rounds(16, False) == 0
    said = {name: networks._find_purpose(name, 4) for name in ("round-4/update", "round-5/update", "round-4/short")}
    assert said["round-4/update"] == "step on the shared part, and whether a class means the same to all"
    assert said["round-5/update"] == "step on the shared part"
    assert said["round-4/short"] == "next clipping norm"
