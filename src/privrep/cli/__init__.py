"""The command-line face of privrep. Heavy modules are imported by the commands that need them: --help stays quick."""

from __future__ import annotations

from privrep.cli.app import app, main

__all__ = ["app", "main"]
