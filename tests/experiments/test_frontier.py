"""The frontier experiment: slopes and what is left out of them, winners, and a tiny run that is continued."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.frontier_picture import draw_all
from experiments.frontier_runs import (
    ALONE,
    DEFAULTS,
    PANELS,
    PAPERS,
    REFERENCES,
    STARTS,
    SWEEPS,
    Contender,
    Point,
    Row,
    Sweep,
    covariance_root,
    draw,
    read_rows,
    run_all,
)
from experiments.frontier_tables import Results, best_of, fit_slope, proved, slope, write_tables

from experiments import frontier_runs
from privrep.data.synthetic import make_population

FEDREP, ALTMIN, CENTAUR = DEFAULTS
TINY = Point(users=200, features=6, epsilon=8.0)


def test_slope_of_a_power_law_is_its_exponent() -> None:
    values = [20.0, 50.0, 120.0]
    measured, error = fit_slope(values, [3e-7 * v**2.5 for v in values])
    assert measured == pytest.approx(2.5)
    assert error == pytest.approx(0.0, abs=1e-6)


def test_slope_of_noisy_measurements_is_within_its_error() -> None:
    """Five standard errors of 38 degrees of freedom: a false alarm once in 1e5 seeds, and the seed is fixed."""
    rng = np.random.default_rng(7)
    values = np.repeat(np.geomspace(1, 100, 10), 4)
    measured, error = fit_slope(values, values**-2 * np.exp(0.3 * rng.standard_normal(40)))
    assert abs(measured + 2) < 5 * error
    assert error == pytest.approx(0.3 / math.sqrt(40 * np.log(values).var()), rel=0.5)


def test_two_points_have_a_slope_and_no_error() -> None:
    measured, error = fit_slope([1.0, 10.0], [1.0, 0.01])
    assert measured == pytest.approx(-2)
    assert math.isnan(error)


@pytest.mark.parametrize(
    ("method", "field", "exponent"),
    [
        ("private-fedrep", "features", 2), ("priv-altmin", "features", 3), ("centaur", "features", 2),
        ("private-fedrep", "rank", 3), ("priv-altmin", "rank", 4), ("centaur", "rank", 3),
        *((who.method, field, -2) for who in DEFAULTS for field in ("users", "epsilon")),
        ("centaur", "noise", 0),
    ],
)  # fmt: skip
def test_rates_of_the_papers(method: str, field: str, exponent: float) -> None:
    ends = [replace(Point(), **{field: value}) for value in (2, 20)]
    assert fit_slope([2, 20], [proved(method, end) for end in ends])[0] == pytest.approx(exponent)


def rows_of(distances: dict[float, float], floor: float) -> list[Row]:
    measured = [Row("epsilon", e, "centaur", "own", "default", 1, distance=d) for e, d in distances.items()]
    return [*measured, Row("users at 0.2 floor", 20_000, "centaur", "own", "default", 1, distance=floor)]


def test_slope_leaves_out_what_has_not_converged_and_what_is_at_its_floor() -> None:
    law = {e: 1e-3 * e**-2 for e in (0.1, 0.2, 0.5, 1.0, 2.0)}
    found, left_out = slope(Results(rows_of({0.05: 0.9, **law, 4.0: 2e-4, 8.0: 2e-4}, 1e-4)), "epsilon", CENTAUR)
    assert found.values == (0.1, 0.2, 0.5, 1)  # 2.0 is 2.5 times the floor
    assert found.measured == pytest.approx(-2)
    assert found.verdict == "agrees"
    assert left_out == "not converged: 0.05; at its floor: 2, 4, 8"


def test_no_slope_of_fewer_than_three_values() -> None:
    found, left_out = slope(Results(rows_of({0.5: 0.04, 1.0: 0.01}, 1e-4)), "epsilon", CENTAUR)
    assert math.isnan(found.measured)
    assert found.verdict == ""
    assert left_out.startswith("not run: 0.05")


@pytest.mark.parametrize(("exponent", "verdict"), [(-3.0, "better"), (-1.0, "worse")])
def test_verdict_says_which_way_it_disagrees(exponent: float, verdict: str) -> None:
    law = {e: 1e-3 * e**exponent for e in (0.5, 1.0, 2.0)}
    said = slope(Results(rows_of(law, 1e-6)), "epsilon", CENTAUR)[0].verdict
    assert said == f"{verdict} than proved: eps^{exponent} where the proof has eps^-2.0"


def test_an_error_that_vanishes_with_the_label_noise_is_better_than_proved() -> None:
    """The bounds keep the length of the heads, so that they hardly fall with R."""
    rows = [
        Row(sweep, noise, "private-fedrep", "own", "default", 1, distance=size * noise**2)
        for noise in (0.01, 0.1, 0.5, 1.0)
        for sweep, size in (("noise at 0.2", 1e-2), ("noise at 0.2 floor", 1e-3))
    ]
    found, left_out = slope(Results(rows), "noise at 0.2", FEDREP)
    assert left_out == ""
    assert 0 < found.proved < 0.5
    assert found.verdict.startswith("better than proved as R falls: R^2.0 where")


def test_best_are_all_within_the_tie() -> None:
    values = {FEDREP: 1.005, ALTMIN: 1.0, CENTAUR: 1.02, PAPERS[0]: math.nan}
    assert best_of(list(values), values.__getitem__, 0.01) == [ALTMIN, FEDREP]


def test_covariance_has_its_condition_number() -> None:
    root = covariance_root(np.random.default_rng(1), 12, 100.0)
    values = np.linalg.eigvalsh(root @ root.T)
    assert values[-1] / values[0] == pytest.approx(100)
    assert values.mean() == pytest.approx(1)


def test_distance_of_the_truth_is_zero_and_of_its_complement_one() -> None:
    trial = draw(replace(TINY, condition=10.0), 1)
    assert trial.distance(trial.truth.U @ np.array([[2.0, 1.0], [0.0, 1.0]])) == pytest.approx(0, abs=1e-12)
    other = np.linalg.solve(trial.truth.covariance, np.linalg.svd(trial.truth.U)[0][:, 2:4])
    assert trial.distance(other) == pytest.approx(1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two sweeps that share a point."""
    who = (*DEFAULTS, *PAPERS, *REFERENCES, *STARTS)
    monkeypatch.setitem(SWEEPS, "tiny", Sweep("epsilon", (2.0, 8.0), who, TINY))
    monkeypatch.setitem(SWEEPS, "tiny users", Sweep("users", (200, 300), (FEDREP,), TINY))
    return ["tiny", "tiny users"]


def test_a_run_measures_everybody_within_the_budget(tiny: list[str], tmp_path: Path) -> None:
    rows = run_all(tmp_path / "frontier.csv", tiny, 1)
    assert len(rows) == 2 * len(SWEEPS["tiny"].contenders) + 2
    assert {row.skipped for row in rows} == {""}
    for row in rows:
        assert row.mse_over_oracle is not None
        assert row.mse_over_oracle > 0.5
        if row.configuration != "not private":
            assert row.epsilon_spent is not None
            assert 0 < row.epsilon_spent <= SWEEPS[row.sweep].point(row.value).epsilon * (1 + 1e-9)
    write_tables(rows, tmp_path)
    draw_all(rows, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "frontier.csv", "frontier_winners.csv", "frontier_panels.csv", "frontier_starts.csv", "frontier_slopes.csv",
        "frontier.png", "frontier_distance.png", "frontier_starts.png",
    }  # fmt: skip


def test_rows_that_stand_are_not_run_again(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "frontier.csv"
    whole = run_all(path, tiny, 1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))  # as if it had been stopped before the last sweep
    drawn: list[Point] = []
    monkeypatch.setattr(frontier_runs, "draw", lambda point, seed: drawn.append(point) or draw(point, seed))
    again = run_all(path, tiny, 1)
    assert drawn == [replace(TINY, users=300)]  # the shared point is known from the other sweep
    assert [replace(row, seconds=0.0) for row in read_rows(path)] == [
        replace(row, seconds=0.0) for row in _rounded(whole)
    ]
    assert len(again) == len(whole)


def _rounded(rows: list[Row]) -> list[Row]:
    def six(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.6g}")

    return [
        replace(row, **{n: six(getattr(row, n)) for n in ("mse_over_oracle", "distance", "epsilon_spent")})
        for row in rows
    ]


def test_what_takes_too_long_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Point(users=200, features=300)
    monkeypatch.setitem(SWEEPS, "large", Sweep("features", (300,), (ALTMIN, Contender("centaur")), large))
    altmin, centaur = run_all(tmp_path / "frontier.csv", ["large"], 1)
    assert "normal equations of 600 unknowns" in altmin.skipped
    assert altmin.distance is None
    assert centaur.distance is not None


def test_old_points_are_what_they_were() -> None:
    """Fields of panels are off by default, so that rows of the CSV keep their meaning."""
    rng = np.random.default_rng([frontier_runs.SEED, 1])
    old = make_population(rng, 200, 6, 2, frontier_runs.ROWS, 0.1)
    table = old.sample(rng, np.float32)
    trial = draw(TINY, 1)
    np.testing.assert_array_equal(trial.truth.weights, old.weights)
    np.testing.assert_array_equal(trial.table.X, table.X)
    np.testing.assert_array_equal(trial.table.y, table.y)
    assert not TINY.has_levels


def test_panels_are_measured_against_one_who_knows_the_population(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tuple(replace(point, users=300, features=14, epsilon=8.0) for point in PANELS.values())
    who = (FEDREP, *ALONE)
    monkeypatch.setitem(SWEEPS, "small panels", Sweep("panel", tuple(range(len(small))), who, points=small))
    rows = run_all(tmp_path / "frontier.csv", ["small panels"], 1)
    read = [replace(row, seconds=0.0) for row in read_rows(tmp_path / "frontier.csv")]
    assert read == [replace(row, seconds=0.0) for row in _rounded(rows)]
    assert len(rows) == len(small) * len(who)
    for row in rows:
        assert row.mse_over_oracle is not None
        assert row.mse_over_oracle > 1
        assert (row.distance is None) == (row.contender in ALONE or not small[int(row.value)].rank)


def test_panels_have_what_they_are_named_after() -> None:
    assert SWEEPS["panels"].values == tuple(range(len(PANELS)))
    assert len({SWEEPS["panels"].point(value) for value in SWEEPS["panels"].values}) == len(PANELS)
    trial = draw(replace(PANELS["all of it"], users=500), 1)
    assert trial.table.sizes.min() == 2
    assert trial.truth.noise_kind == "student"
    assert (trial.truth.feature_scale == 0).sum() == 8
    assert np.linalg.norm(trial.truth.common) == pytest.approx(3)
    assert trial.truth.intercepts.mean() == pytest.approx(10, abs=1)
    assert trial.truth.means is not None
    assert draw(replace(PANELS["the same, no slopes of their own"], users=50), 1).truth.U.shape == (20, 0)
