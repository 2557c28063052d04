"""How a federation is run: public numbers that decide when a round goes on, and who adds the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_USERS

NoiseBy = Literal["server", "nodes"]


@dataclass(frozen=True)
class FederationSettings:
    """Of a run over nodes. A round ends when all nodes have answered, or `round_timeout` after it began if at least
    `min_users` are behind the answers; with fewer it waits on, `wait` in all, and then nothing is released.

    With noise of the "nodes", `noise_nodes` of them are taken to add theirs: as many must answer in every round.
    """

    min_users: int = 1  # behind the answers of a round
    min_nodes: int = 1  # that must have joined before the run begins; all that join later are left out
    wait: float = 600.0  # seconds: for nodes at the start, and for a round in all
    round_timeout: float = 60.0
    resend: float = 10.0  # seconds after which a node that is silent is asked again
    poll: float = 0.05  # seconds between two looks for answers
    noise: NoiseBy = "server"
    noise_nodes: int = 1
    server_epsilon: float | None = None  # the most that a node lets the server learn; None: what the run needs
    most_users: int = MAX_USERS  # of one node: who says it has more is left out

    def __post_init__(self) -> None:
        for name in ("min_users", "most_users", "min_nodes", "noise_nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_USERS:
                raise InputError(f"{name} must be a whole number from 1 to {MAX_USERS:,}. Got {value!r} instead.")
        for name in ("wait", "round_timeout", "resend", "poll"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"{name} must be a positive number of seconds. Got {value!r} instead.")
        if self.noise not in get_args(NoiseBy):
            raise InputError(f"noise is added by the server or by the nodes. Got {self.noise!r} instead.")
        if self.server_epsilon is not None and not (self.noise == "nodes" and 0 < self.server_epsilon < math.inf):
            raise InputError('server_epsilon is a positive number, and goes with noise = "nodes" alone.')
        if self.noise == "server" and self.noise_nodes != 1:
            raise InputError('noise_nodes goes with noise = "nodes" alone.')
