"""Tables of `experiments.frontier`: who wins where, and slopes of the squared distance against the papers' rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments.figure1 import write_csv
from experiments.frontier_runs import (
    ALONE,
    DEFAULTS,
    NO_NOISE,
    OWN_START,
    PANELS,
    PAPERS,
    REFERENCES,
    ROWS,
    STARTS,
    SWEEPS,
    Contender,
    Point,
    Row,
)
from experiments.theory import Problem, lemma_9

TIE = 0.01  # methods whose MSE is within one percent of the best are as good as it
TIE_DISTANCE = 0.25  # the same of distances, which vary more from seed to seed
CONVERGED = 0.1  # largest squared distance of a point in a slope
OFF_THE_FLOOR = 3.0  # least ratio to the distance without noise of a point in a slope
TOLERANCE = 0.35  # of an exponent, or two standard errors if they are more
SOURCES = {"private-fedrep": "000, Lemma 9", "priv-altmin": "003, Lemma 4.4", "centaur": "004, Theorem 5.1"}
SYMBOLS = {"epsilon": "eps", "users": "n", "features": "d", "rank": "k", "noise": "R"}


class Results:
    """Every run by point and contender, whichever sweep it was made for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._runs: dict[tuple[Point, Contender], dict[int, Row]] = {}
        for row in rows:
            if not row.skipped:
                point, who, seed = row.key
                known = self._runs.setdefault((point, who), {})
                if seed not in known or known[seed].mse_over_oracle is None:
                    known[seed] = row

    def at(self, point: Point, who: Contender) -> list[Row]:
        where = point.population if who.configuration == "not private" else point
        return list(self._runs.get((where, who), {}).values())

    def mse(self, point: Point, who: Contender) -> float:
        """Mean over seeds of MSE over the oracle's; nan where nothing was measured."""
        return _mean([row.mse_over_oracle for row in self.at(point, who) if row.mse_over_oracle is not None])

    def distances(self, point: Point, who: Contender) -> list[float]:
        return [row.distance for row in self.at(point, who) if row.distance is not None]

    def distance(self, point: Point, who: Contender) -> float:
        """Geometric mean over seeds of the squared distance."""
        return math.exp(_mean([math.log(max(value, 1e-12)) for value in self.distances(point, who)]))

    def without_noise(self, measure: Callable[[Point, Contender], float], point: Point) -> float:
        """The better of FedRep and AltMin without noise: FedRep fails where features are correlated."""
        return float(np.nanmin([*(measure(point, who) for who in REFERENCES[:2]), math.inf]))


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def name(who: Contender) -> str:
    start = "" if who.start == "own" else f" from {who.start}"
    return f"{who.method}{start}{'' if who.configuration == 'default' else f' ({who.configuration})'}"


@dataclass(frozen=True)
class Slope:
    """Exponent of the squared distance in one quantity, and what the method's paper proves for its privacy term."""

    who: Contender
    sweep: str
    values: tuple[float, ...]
    measured: float
    standard_error: float
    proved: float

    @property
    def verdict(self) -> str:
        if math.isnan(self.measured):
            return ""
        error = self.measured - self.proved
        if abs(error) <= max(TOLERANCE, 2 * self.standard_error):
            return "agrees"
        symbol = SYMBOLS[SWEEPS[self.sweep].field]
        powers = f"{symbol}^{self.measured:.1f} where the proof has {symbol}^{self.proved:.1f}"
        if symbol == "R":  # what counts is how the error falls on the way to labels without noise
            return f"{'better' if error > 0 else 'worse'} than proved as R falls: {powers}"
        return f"{'better' if error < 0 else 'worse'} than proved: {powers}"


def fit_slope(values: Sequence[float], results: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope of log results in log values, and its standard error (nan with fewer than three points)."""
    x, y = np.log(values), np.log(results)
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    left = y - y.mean() - slope * x
    return slope, math.sqrt(float(left @ left) / (len(x) - 2) / float(x @ x)) if len(x) > 2 else math.nan


def proved(method: str, point: Point) -> float:
    """The privacy term of a paper's bound on the squared distance, constants, logarithms and rounds left out.

    000: (R + 1)^2 d^2 k^3 / (n eps)^2 with unit heads, for which sigma_min^2 = 1/k. 003: d k times that, as 000
    and 004 quote it. 004: the same as 000, for labels without noise.
    """
    noise = 0.0 if method == "centaur" else point.noise
    sigma = point.rank**-0.5
    problem = Problem(point.users, point.features, point.rank, ROWS, noise, 1.0, sigma, sigma)
    more = point.features * point.rank if method == "priv-altmin" else 1
    return more * lemma_9(problem, point.epsilon, rounds=1).privacy ** 2


def usable(results: Results, point: Point, who: Contender) -> str:
    """Why a point says nothing about the slope, or nothing."""
    found, floor = results.distances(point, who), results.distances(replace(point, epsilon=NO_NOISE.epsilon), who)
    if found and max(found) > CONVERGED:
        return "not converged"
    if not found or not floor:
        return "not run"
    return "at its floor" if results.distance(point, who) < OFF_THE_FLOOR * floor[0] else ""


def slope(results: Results, sweep_name: str, who: Contender) -> tuple[Slope, str]:
    """The slope over the values that can tell, and what became of the others. Three values at least, or none."""
    sweep = SWEEPS[sweep_name]
    said = {value: usable(results, sweep.point(value), who) for value in sweep.values}
    values = tuple(value for value in sweep.values if not said[value])
    left_out = "; ".join(
        f"{why}: {', '.join(f'{v:,g}' for v in sweep.values if said[v] == why)}"
        for why in ("not converged", "at its floor", "not run")
        if why in said.values()
    )
    if len(values) < 3:
        return Slope(who, sweep_name, values, math.nan, math.nan, math.nan), left_out
    pairs = [(value, d) for value in values for d in results.distances(sweep.point(value), who)]
    measured, error = fit_slope(*zip(*pairs, strict=True))
    theory, _ = fit_slope(values, [proved(who.method, sweep.point(value)) for value in values])
    return Slope(who, sweep_name, values, measured, error, round(theory, 6) + 0.0), left_out


def all_slopes(results: Results) -> list[tuple[Slope, str]]:
    """The defaults at epsilon 0.2, where noise decides; the papers' configurations, which need more, at 1 and at 64."""
    low, high = ([n for n in SWEEPS if n.endswith(f"at {epsilon}")] for epsilon in ("0.2", "64"))
    return [
        *(slope(results, n, who) for n in ("epsilon", *low) for who in DEFAULTS),
        *(slope(results, n, who) for n in ("epsilon", "users", "features", *high) for who in PAPERS),
    ]


def write_slopes(results: Results, folder: Path) -> None:
    header = [
        "method",
        "configuration",
        "quantity",
        "sweep",
        "values",
        "measured",
        "standard_error",
        "proved",
        "source",
    ]
    lines = []
    print("\nexponents of the squared distance (measured, standard error; proved)")
    for s, left_out in all_slopes(results):
        symbol, fitted = SYMBOLS[SWEEPS[s.sweep].field], not math.isnan(s.measured)
        values = " ".join(f"{v:g}" for v in s.values) if fitted else ""
        numbers = [s.measured, s.standard_error, s.proved] if fitted else ["", "", ""]
        verdict = s.verdict if fitted else "no slope: fewer than three values tell"
        source = SOURCES[s.who.method]
        lines.append([s.who.method, s.who.configuration, symbol, s.sweep, values, *numbers, source, verdict, left_out])
        shown = f"{s.measured:6.2f} +- {s.standard_error:.2f}; {s.proved:5.2f}  {verdict}" if fitted else verdict
        print(f"{name(s.who):38} {symbol:4} {shown}" + (f"  [left out: {left_out}]" if left_out else ""))
    write_csv(folder / "frontier_slopes.csv", [*header, "verdict", "values_left_out"], lines)


def best_of(contenders: Sequence[Contender], value_of: Callable[[Contender], float], tie: float) -> list[Contender]:
    """Those within a factor 1 + tie of the least, the least first; those without a value are left out."""
    measured = sorted((value, i) for i, who in enumerate(contenders) if not math.isnan(value := value_of(who)))
    return [contenders[i] for value, i in measured if value <= (1 + tie) * measured[0][0]]


def winners_line(results: Results, point: Point) -> list[object]:
    """Nobody wins by MSE where nobody does better than each user alone, nor by distance where all are far off."""
    private = [*DEFAULTS, *PAPERS]
    alone, exact = results.mse(point, REFERENCES[2]), results.without_noise(results.mse, point)
    best = best_of(private, partial(results.mse, point), TIE)
    gained = bool(best) and results.mse(point, best[0]) < (1 - TIE) * alone
    nearest = best_of(private, partial(results.distance, point), TIE_DISTANCE)
    near = bool(nearest) and results.distance(point, nearest[0]) < 0.5
    paper = best_of(PAPERS, partial(results.mse, point), 0.0)[:1]
    return [
        " = ".join(map(name, best)) if gained else "nobody",
        *(results.mse(point, who) for who in DEFAULTS),
        *(name(who) for who in paper),
        *(results.mse(point, who) for who in paper),
        alone,
        exact,
        " = ".join(map(name, nearest)) if near else "nobody",
        *(results.distance(point, who) for who in DEFAULTS),
    ]


def write_winners(results: Results, folder: Path) -> None:
    """For every point the best by MSE and by distance."""
    header = ["sweep", "value", "winner_by_mse", *(f"mse_{who.method}" for who in DEFAULTS), "best_paper", "mse_paper"]
    header += ["mse_alone", "mse_not_private", "winner_by_distance", *(f"distance_{who.method}" for who in DEFAULTS)]
    lines = []
    print("who wins by MSE (all within one percent of the best) and by distance (all within a quarter)")
    for sweep_name in ("epsilon", "users", "features", "rank", "noise", "condition"):
        sweep = SWEEPS[sweep_name]
        for value in sweep.values:
            line = winners_line(results, sweep.point(value))
            lines.append([sweep_name, value, *line])
            numbers = "  ".join(f"{cell:8.4g}" if isinstance(cell, float) else f"{cell:34}" for cell in line[1:7])
            print(f"{sweep_name:10} {value:<7g} {numbers}  {line[0]}  |  {line[-4]}")
    write_csv(folder / "frontier_winners.csv", header, lines)


def write_panels(results: Results, folder: Path) -> None:
    """Of populations like real panels: every default, and users alone, over one who knows the population."""
    lines = [
        [panel, *(results.mse(point, who) for who in (*DEFAULTS, *ALONE))]
        for panel, point in PANELS.items()
        if results.at(point, DEFAULTS[0])
    ]
    write_csv(folder / "frontier_panels.csv", ["panel", *(f"mse_{who.method}" for who in (*DEFAULTS, *ALONE))], lines)


def results_of_starts(rows: Sequence[Row]) -> dict[int, Results]:
    """By number of users, of the seeds with which all starts were run."""
    sweeps = {users: SWEEPS[f"starts at {users:,} users"] for users in (2_000, 20_000)}
    return {users: Results([row for row in rows if row.seed <= sweep.seeds]) for users, sweep in sweeps.items()}


def write_starts(rows: Sequence[Row], folder: Path) -> None:
    """MSE over the oracle's of every method from every start."""
    starts = [*dict.fromkeys(who.start for who in STARTS)]
    lines = []
    for users, results in results_of_starts(rows).items():
        for method, own in OWN_START.items():
            for epsilon in SWEEPS["epsilon"].values:
                point = Point(users=users, epsilon=float(epsilon))
                mses = [results.mse(point, Contender(method, "own" if start == own else start)) for start in starts]
                lines.append([users, method, epsilon, own, *mses])
    header = [
        "users",
        "method",
        "epsilon",
        "own_start",
        *(s if s != "given" else "given (not private)" for s in starts),
    ]
    write_csv(folder / "frontier_starts.csv", header, lines)


def write_tables(rows: Sequence[Row], folder: Path) -> None:
    results = Results(rows)
    write_winners(results, folder)
    write_panels(results, folder)
    write_starts(rows, folder)
    write_slopes(results, folder)
