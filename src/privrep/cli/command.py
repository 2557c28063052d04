"""The options that all commands have: --quiet, --json, and one way to be stopped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from privrep.cli.console import screen
from privrep.cli.ending import sigterm_interrupts, stoppable
from privrep.cli.options import flag

Quiet = Annotated[bool, flag("--quiet", help="Print nothing but errors and what was asked for.")]
AsJson = Annotated[bool, flag("--json", help="Print one JSON object in place of words.")]


def with_screen(run: Callable[..., None], *, json: bool = True) -> Callable[..., None]:
    """Return a command with the options --quiet and --json, which ends with a sentence when it is stopped.

    Args:
        run: the command.
        json: whether it takes --json. Commands that print a file as it is do not.
    """
    asked = inspect.signature(run, eval_str=True)
    more = {"quiet": Quiet, "as_json": AsJson} if json else {"quiet": Quiet}

    @functools.wraps(run)
    def command(**given: Any) -> None:
        quiet, as_json = given.pop("quiet"), given.pop("as_json", False)
        ending: typer.Exit | None = None
        with screen(quiet, as_json), sigterm_interrupts(), stoppable("run the same command again."):
            try:
                run(**given)
            except typer.Exit as end:  # what was told is printed first
                ending = end
        if ending is not None:
            raise ending

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in more.items()
    ]
    parameters = [*asked.parameters.values(), *added]
    command.__signature__ = asked.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    del command.__wrapped__
    return command
