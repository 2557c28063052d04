"""Run a command of `privrep` in this process, and hold a refusal to what every refusal must be."""

from __future__ import annotations

import pytest

from privrep import cli

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys: Capture, *arguments: object, remarks: bool = False) -> str:
    """Return the one sentence with which a command is refused.

    Args:
        capsys: of the test.
        arguments: of the command.
        remarks: whether something was said before that, such as that there are no keys.
    """
    code, out, err = run(capsys, *arguments)
    assert code == 2, err
    assert (remarks or out == "", err.count("\n")) == (True, 1), (out, err)
    assert err.startswith("privrep: ")
    return err


def done(*arguments: object) -> None:
    """Run a command that must go well, where nobody reads what it says."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert not end.value.code
