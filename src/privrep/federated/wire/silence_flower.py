"""Flower without its telemetry, its update checks and its installations at run time. Import this before Flower."""

from __future__ import annotations

import logging
import os

for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}.items():
    os.environ[_name] = _value  # read when Flower is imported, and by processes it starts

os.environ.pop("FLWR_DATABASE", None)  # messages are kept in memory, and go with the process
logging.getLogger("httpx").setLevel(logging.WARNING)  # names every request


def hush(level: int = logging.CRITICAL) -> None:
    """Silence Flower's own log below this level; what happens to nodes is said in privrep's own words."""
    logging.getLogger("flwr").setLevel(level)
