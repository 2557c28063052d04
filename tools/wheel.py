"""Build the wheel, check it, and try it in an empty environment: `make wheel`.

The trial runs what a new user runs, in a temporary folder: `privrep demo`, the commands that it names next, and the
first Python example of README.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_BYTES = 1_000_000  # more means that something slipped in: code alone is about 940,000


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command without this project's environment. Exit with a sentence if it fails."""
    print("$", *command, flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    code = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, check=False).returncode
    if code:
        raise SystemExit(f"make wheel: {' '.join(map(str, command))} failed with code {code}.")


def build() -> Path:
    """Return the wheel, made anew."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", DIST)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """Check metadata, contents and size."""
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size:,} bytes, of {MOST_BYTES:,} at most")
    if size > MOST_BYTES:
        raise SystemExit("make wheel: the wheel is too large; see what it holds by `unzip -lv`.")


def example() -> str:
    """Return the first Python example of README.md."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise SystemExit("make wheel: README.md has no Python example.")
    return found.group(1)


def try_out(wheel: Path) -> None:
    """Install the wheel into an empty environment and use it as README.md says."""
    with tempfile.TemporaryDirectory(prefix="privrep-wheel-") as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        constraints = ROOT / "constraints.txt"
        run(programs / "pip", "--disable-pip-version-check", "install", "-q", "-c", constraints, wheel, cwd=folder)
        run(programs / "privrep", "--version", cwd=folder)
        run(programs / "privrep", "demo", "--out", "demo", cwd=folder)
        run(programs / "privrep", "inspect", "demo/model", cwd=folder)
        run(programs / "privrep", "predict", "demo/model", "demo/new-rows.csv", "--out", "predictions.csv", cwd=folder)
        (folder / "example.py").write_text(example())
        run(programs / "python", "example.py", cwd=folder)


def main() -> None:
    wheel = build()
    check(wheel)
    try_out(wheel)
    print(f"{wheel} is as it should be")


if __name__ == "__main__":
    main()
