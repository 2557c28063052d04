"""The methods by name, each with the configuration that this project recommends and that of its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from privrep.linear.methods.centaur import centaur_linear, paper_centaur
from privrep.linear.methods.priv_altmin import paper_altmin, priv_altmin
from privrep.linear.methods.private_fedrep import paper_fedrep, private_fedrep
from privrep.local.representation import Representation


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
