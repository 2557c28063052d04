"""A method that learns a shared linear representation, as callers may know it.

Every method is one file in `linear/methods/` and one line in `linear/registry.py`. Its file holds the users' half (a
step), the server's half and the configuration of its paper. The file also has the sentence of `inspect` and the
purposes of its pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from privrep.errors import InputError
from privrep.linear.starts import Initialiser
from privrep.local.losses import Loss
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.run import Run


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The problem that a method is asked to solve, in public facts alone."""

    rank: (
        int | None
    )  # None: the method finds it by charged releases; 0: users' slopes are common, or differ in all features
    intercept: bool = True  # whether users have intercepts
    transform: FeatureTransform | None = None  # declared public coordinates; None: found by charged releases
    start: Initialiser | None = None  # None: the method's own
    loss: Loss | None = None  # of labels; None: targets are numbers
    configuration: str = "default"  # or "paper"


class Method(ABC):
    """A way to learn a representation privately.

    `accepts` has words that say what may be asked of the method: words of `registry.REFUSALS`, "numbers" or "ratings",
    and "rank 0" where there is a prior of heads. The words are checked in one place, `registry.check_accepted`.
    `purposes` says what the method's pages are for. A key is "page/statistic", a page, or a statistic; pages are named
    without their numbers. Modules that methods share have the purposes of their own pages.
    """

    name: ClassVar[str]  # in configurations, files and on the command line
    title: ClassVar[str]  # what `inspect` says of it
    accepts: ClassVar[frozenset[str]]
    purposes: ClassVar[Mapping[str, str]]
    own_start: ClassVar[str | None] = None  # by its name in `starts.INITIALISERS`; None: it has no start
    automatic_rank: ClassVar[str] = "read off a released spectrum"  # where a rank comes from if nobody gives one

    def check(self, problem: Problem, features: int) -> None:  # noqa: B027 (most have nothing to refuse)
        """Raise InputError if the method cannot learn this problem from this number of features.

        It looks at rank and configuration.
        """

    def learn(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation in the configuration that the problem asks for.

        Formal guarantee, for the epsilon and delta of the run's budget:
          - Everything returned or posted is a function of the releases charged to `run.ledger`.
          - Hence it is (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
        """
        if problem.configuration != "paper":
            return self.default(run, problem)
        if problem.rank is None:
            raise InputError(f"the configuration paper of {self.name} takes a rank.")
        return self.paper(run, problem.rank)

    @abstractmethod
    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation with the settings that this project recommends."""

    def paper(self, run: Run, rank: int) -> Representation:
        """Learn the representation as the method's paper does, with its constants."""
        raise InputError(f"{self.name} has no configuration of a paper; use the default.")
