"""`python -m privrep`: the command `privrep`."""

from __future__ import annotations

from privrep.cli.app import main

if __name__ == "__main__":
    main()
