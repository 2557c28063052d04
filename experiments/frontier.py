"""All methods and starts at equal (epsilon, delta): where each wins, and slopes against the rates the papers prove.

    python -m experiments.frontier [--seeds 2] [--sweep NAME] [--draw-only]

Around one base point (n 20,000, d 50, k 2, m 10, label noise 0.1, identity covariance, epsilon 1, delta 1e-6,
replace-one-user, unit heads, no intercepts) one quantity is changed at a time. Writes results/frontier.csv, one row a
run, and from it frontier_winners.csv, frontier_panels.csv, frontier_starts.csv, frontier_slopes.csv, frontier.png
(errors), frontier_distance.png and frontier_starts.png.
A row that stands is not run again, so a stopped run goes on where it was; after a change of the algorithms or the heads
delete frontier.csv. All of it takes about half an hour. Noise is simulated from seeds: reproducible, not private.

  distance          squared sine of the largest angle between true and learned representation, in coordinates in which
                    features are uncorrelated: what the theorems bound, up to the length of the heads
  mse_over_oracle   exact population MSE of the default heads of the first 5,000 users over that of the true U, whose
                    heads have no users' votes to go by: where labels are noisy the ratio may be below one
  seconds           of learning the representation, on whatever else the machine was doing

Sweeps "... at 0.2" have epsilon 0.2, where noise, not the number of rows, decides: slopes of the defaults are read
there. Sweeps "... at 64" are for the papers' configurations, of which Priv-AltMin's converges at no epsilon that
protects anybody. Sweeps "... floor" have epsilon 1,000: what a configuration reaches with next to no noise. The sweep
"panels" has populations like real tables: levels, common slopes, feature means of users' own, constant columns, heavy
tails, two rows a user. There the oracle is one who knows the population.
"""

from __future__ import annotations

import argparse

from experiments.figure1 import RESULTS
from experiments.frontier_picture import draw_all
from experiments.frontier_runs import SWEEPS, read_rows, run_all
from experiments.frontier_tables import write_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sweep", choices=list(SWEEPS), help="one of them")
    parser.add_argument("--draw-only", action="store_true", help="tables and pictures of what has been run")
    arguments = parser.parse_args()
    path = RESULTS / "frontier.csv"
    names = [arguments.sweep] if arguments.sweep else list(SWEEPS)
    rows = read_rows(path) if arguments.draw_only else run_all(path, names, arguments.seeds)
    write_tables(rows, RESULTS)
    draw_all(rows, RESULTS)


if __name__ == "__main__":
    main()
