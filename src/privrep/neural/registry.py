"""Private methods for networks by name: a line each. Every method is one file in `neural/methods/`.

All are private: whatever of one user reaches another goes through `Run.release`, clipped and charged, under
replace-one-user. What users end with, `Personal`, is each user's own and stays with it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadRule
from privrep.neural.methods.centaur import CentaurMethod
from privrep.neural.methods.fedavg import FedAvgMethod
from privrep.neural.methods.pmtl import PmtlMethod
from privrep.neural.methods.ppsgd import PpsgdMethod
from privrep.neural.rounds import TrainedWeights, TrainingSettings
from privrep.neural.user_state import Personal
from privrep.nn.flat_module import Split
from privrep.privacy.run import Run
from privrep.typing import Singles


class NetworkMethod(Protocol):
    """A way to train a network privately, and what users make of it in the end."""

    name: ClassVar[str]

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor | None]:
        """Return the shared weights, and what users kept of their own: (users, size), or None.

        Args:
            run: the run whose ledger is charged.
            split: the network, as a representation and a head.
            settings: rounds, clipping norm, steps and heads.
            mu_squared: what each round spends.
            rows_per_user: rows of a user that a round looks at.
        """
        ...

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        """Return what users have after the last round.

        Args:
            split: the network, as a representation and a head.
            weights: the shared weights, (size,).
            own: what users kept of their own, (users, size), or None.
            fit: how heads are fitted.
            table: the users' rows.
            rows_per_user: rows of a user that a fit looks at.
        """
        ...


_REGISTERED: tuple[NetworkMethod, ...] = (
    FedAvgMethod(),
    PpsgdMethod(),
    PmtlMethod(),
    CentaurMethod(),
)

METHODS = {method.name: method for method in _REGISTERED}
