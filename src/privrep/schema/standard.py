"""Standard input in place of a file: `-`."""

from __future__ import annotations

from pathlib import Path

STANDARD = Path("-")


def name_of(path: Path) -> str:
    """Return what sentences call a file that is read."""
    return "standard input" if path == STANDARD else str(path)
