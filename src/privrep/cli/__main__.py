"""`python -m privrep.cli`."""

from __future__ import annotations

from privrep.cli.app import main

main()
