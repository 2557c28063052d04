"""Ledgers of populations, and runs that draw from them, as tests make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from privrep.privacy.account import Place
from privrep.privacy.billboard import Post
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.population import Account, PopulationLedger

WHOLE, ONE = Budget(2.0, 1e-6), Budget(1.0, 1e-6)
START = Place("", 0)


def price(share: float, budget: Budget = ONE) -> Gaussian:
    return Gaussian(noise_multiplier(share * budget.mu**2))


def status(people: PopulationLedger) -> list[str]:
    return [share.status for share in people.read().shares.values()]


def opened(people: PopulationLedger, path: Path | None = None, budget: Budget = ONE, **more: Any) -> Ledger:
    return Ledger(budget, path=path, account=Account(people, **more))


def page(name: str) -> Post:
    return Post(name, {"a": np.zeros(1)}, {"releases": {}})


def charge_of(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.charge({f"{name}/a": price(0.1)})
        ledger.record_posted(page(name))
