"""Names and marks that nobody guesses: of runs and population ledgers, and salts. They are no noise."""

from __future__ import annotations

import secrets


def draw_name(digits: int = 16) -> str:
    """Return a new name of hexadecimal digits."""
    return secrets.token_hex(digits // 2)
