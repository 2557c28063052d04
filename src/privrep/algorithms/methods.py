"""The methods by name, each with the configuration that this project recommends and that of its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from privrep.algorithms.centaur_linear import centaur_linear, paper_centaur
from privrep.algorithms.paper import paper_fedrep
from privrep.algorithms.priv_altmin import paper_altmin, priv_altmin
from privrep.algorithms.private_fedrep import private_fedrep
from privrep.algorithms.representation import Representation


@dataclass(frozen=True)
class Method:
    """`default` takes (run, rank, intercept=, frame=, initialiser=), and loss= if it learns from labels, too; `paper`
    takes (run, rank)."""

    default: Callable[..., Representation]
    paper: Callable[..., Representation]
    labels: bool = False


METHODS = {
    "private-fedrep": Method(private_fedrep, paper_fedrep, labels=True),
    "priv-altmin": Method(priv_altmin, paper_altmin),
    "centaur": Method(centaur_linear, paper_centaur, labels=True),
}
