"""One folder of each kind of model, made when the first test asks for them. Tests leave them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import KINDS


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("folders") / "model" for name in KINDS}
    for name, path in made.items():
        KINDS[name].fit(path)
    return made
