"""Break the code on purpose, one line at a time, and see that the tests notice: `make mutations`.

`mutations.toml` lists the mutations: a file, a text that occurs in it exactly once, what to write in its place, and the
tests that must notice: files, or single functions where files are slow. Each mutation is tried in a copy of the tree,
in a temporary folder. It is caught if a test fails that passes on the code as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "experiments", "benchmarks", "docs", "README.md", "pyproject.toml", "Makefile")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".pytest_cache", "results", "*.egg-info")
FAILED = 1  # pytest's exit status if tests failed; other ones say that tests could not be run
WAIT = 900  # seconds for one mutation


@dataclass(frozen=True)
class Mutation:
    """One change that makes the code wrong, and the tests that must notice: FILE, or FILE::FUNCTION."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def fault(self, root: Path) -> str | None:
        """Return why the mutation cannot be tried on this tree, or None if it can."""
        path = root / self.file
        if not path.is_file():
            return f"there is no file {self.file}"
        if (count := path.read_text(encoding="utf-8").count(self.old)) != 1:
            return f"its old text occurs {count} times in {self.file}"
        if self.old == self.new or not self.tests:
            return "it changes nothing, or names no tests"
        missing = [test for test in self.tests if not _has_test(root, test)]
        return f"there is no test {missing[0]}" if missing else None


def _has_test(root: Path, test: str) -> bool:
    """Return whether a test file, or one function of it, named FILE::FUNCTION, is there."""
    file, _, function = test.partition("::")
    path = root / file
    return path.is_file() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Outcome:
    """What the tests said of one mutation."""

    mutation: Mutation
    failed: list[str]  # the tests that failed
    seconds: float
    trouble: str  # why the tests could not be run; empty if they could

    def __str__(self) -> str:
        said = f"by {self.failed[0]}" if self.failed else self.trouble
        state = "caught" if self.failed else "SURVIVED"
        return f"{state:8} {self.seconds:5.1f} s  {self.mutation.name} {said}"


def read_mutations(path: Path = Path(__file__).parent / "mutations.toml") -> list[Mutation]:
    """Return the mutations of a file."""
    return [Mutation(**given) for given in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]]


def copy_tree(place: Path) -> Path:
    """Copy what tests need to a new folder, and return it."""
    place.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=LEFT_OUT)
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, place / name)
    return place


def run_tests(root: Path, tests: Sequence[str], *options: str) -> tuple[int, list[str], str]:
    """Return pytest's exit status, the tests that failed, and what it printed."""
    cache = root / ".mutation-cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-n0", "-o", f"cache_dir={cache}"]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [*command, *options, *tests], cwd=root, env=environment, capture_output=True, text=True, timeout=WAIT
    )
    known = cache / "v" / "cache" / "lastfailed"
    failed = sorted(json.loads(known.read_text())) if known.is_file() else []
    return ran.returncode, failed, ran.stdout + ran.stderr


def try_mutation(mutation: Mutation, place: Path) -> Outcome:
    """Apply a mutation to a copy of the tree and run the tests that must notice, up to the first that does."""
    began, root = time.monotonic(), copy_tree(place)
    try:
        if fault := mutation.fault(root):
            return Outcome(mutation, [], 0.0, fault)
        path = root / mutation.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        status, failed, printed = run_tests(root, mutation.tests, "-x")
        if status == FAILED:
            return Outcome(mutation, failed, time.monotonic() - began, "")
        trouble = "no test failed" if status == 0 else f"pytest ended with {status}: {printed[-1000:]}"
        return Outcome(mutation, [], time.monotonic() - began, trouble)
    except subprocess.TimeoutExpired:
        return Outcome(mutation, [], time.monotonic() - began, f"tests took longer than {WAIT} seconds")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def check_tests(outcomes: Iterable[Outcome], place: Path) -> list[str]:
    """Return the tests that caught a mutation and fail without it, too: they caught nothing."""
    tests = sorted({test for outcome in outcomes for test in outcome.failed})
    return run_tests(copy_tree(place), tests)[1] if tests else []


def main() -> int:
    """Try all mutations, or those whose names contain a word. Return 0 if all are caught."""
    parser = argparse.ArgumentParser(description="Break the code on purpose and see that the tests notice.")
    parser.add_argument("words", nargs="*", help="try only mutations whose names contain one of these")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    asked = parser.parse_args()
    mutations = [one for one in read_mutations() if not asked.words or any(word in one.name for word in asked.words)]
    with tempfile.TemporaryDirectory(prefix="privrep-mutations-") as folder:
        places = [Path(folder) / f"{number}" for number in range(len(mutations))]
        outcomes = []
        with ThreadPoolExecutor(asked.workers) as pool:
            for outcome in pool.map(try_mutation, mutations, places):
                print(outcome, flush=True)
                outcomes.append(outcome)
        broken = check_tests(outcomes, Path(folder) / "unchanged")
    for test in broken:
        print(f"FAILS ON THE CODE AS IT IS: {test}")
    caught = sum(bool(set(outcome.failed) - set(broken)) for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutations caught")
    return 0 if outcomes and caught == len(outcomes) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
