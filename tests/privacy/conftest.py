"""A population ledger for every test that asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from populations import WHOLE

from privrep.privacy.population import PopulationLedger


@pytest.fixture
def people(tmp_path: Path) -> PopulationLedger:
    return PopulationLedger.create(tmp_path / "people.db", epsilon=WHOLE.epsilon, delta=WHOLE.delta)
