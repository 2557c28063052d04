"""The exponential mechanism (McSherry and Talwar 2007): one of many candidates is chosen, small losses are likelier.

Let T(c) be the total loss of candidate c, an integer of levels, LEVELS to a loss of 1 (`bounds.LossBound`). Then c is
chosen with probability p(c) = e^(-T(c) / scale) / Z, where Z is the sum of e^(-T / scale) over all candidates.

Formal guarantee. Let T', p' and Z' be those of a neighbour, d(c) = T'(c) - T(c) the difference, and R the range of d:
its largest value less its smallest. Then
    p(c) / p'(c) = e^(d(c) / scale) * Z'/Z,    and    Z'/Z = sum over c of p(c) e^(-d(c) / scale) <= e^(-min d / scale),
so p(c) / p'(c) <= e^((d(c) - min d) / scale) <= e^(R / scale), for every candidate. With scale >= R / epsilon the
choice is epsilon-DP, with no delta, however the candidates depend on earlier releases.
* Replacing the rows of one user moves each total by at most LEVELS either way: R <= 2 LEVELS.
* A user who comes or goes moves all totals the same way by at most LEVELS. So d lies in [0, LEVELS] or in [-LEVELS, 0],
  and R <= LEVELS. Z moves against e^(-T / scale), and so takes off the second half of the cost.
* Totals are exact integers, and the draw is exact (`privacy.noise`). The scale is an integer of levels, rounded up and
  one part in 10^9 larger than it needs to be. That pays for adding up epsilons in floating point.
"""

from __future__ import annotations

import math

from privrep.errors import InputError
from privrep.privacy.bounds import LossBound
from privrep.privacy.events import Pure, Relation


def compute_scale(bound: LossBound, epsilon: float, relation: Relation) -> int:
    """Return the scale, in levels, that makes a choice epsilon-DP.

    Args:
        bound: of the losses.
        epsilon: of the choice, 1e-9 to 1e9.
        relation: neighbours of the guarantee.
    """
    if not 1e-9 <= epsilon <= 1e9:  # beyond, the scale is no integer that float64 holds, or of hardly a level
        raise InputError(f"the epsilon of a choice must lie between 1e-9 and 1e9. Got {epsilon} instead.")
    return math.ceil(bound.sensitivity(relation) / epsilon * (1 + 1e-9))


def price_choice(page: str, epsilon: float) -> dict[str, Pure]:
    """Return the price of a choice."""
    return {f"{page}/choice": Pure(epsilon)}
