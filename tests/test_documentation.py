"""What the documentation names is there: modules that its examples import, files, and classes of modules."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [ROOT, ROOT / "src", ROOT / "src" / "privrep", ROOT / "tests" / "properties"]


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for what examples import of this project."""
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if block.lstrip().startswith(("import ", "from ")):  # others are fragments
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("privrep", "experiments")):
                    yield from ((str(node.module), alias.name) for alias in node.names)


def files(text: str) -> list[str]:
    """Return the Python files that are named."""
    return [name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[\w/]+\.py\b", quoted)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_import_what_is_there(page: Path) -> None:
    for module, name in imported(page.read_text()):
        if module.startswith(("privrep.multimodal", "privrep.neural", "privrep.estimators.clip")) or name == "Centaur":
            pytest.importorskip("torch")
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    missing = [name for name in files(page.read_text()) if not any((place / name).is_file() for place in PLACES)]
    assert not missing


def test_stale_names_are_seen() -> None:
    assert list(imported("```python\nfrom privrep.gone import Gone\n```")) == [("privrep.gone", "Gone")]
    assert files("see `linear/gone.py` and `gone.py`") == ["linear/gone.py", "gone.py"]


def test_the_tree_is_the_one_that_layers_say() -> None:
    """The packages of the table, from the bottom up, are the layers from the top, turned around."""
    table = (ROOT / "docs" / "how-it-works.md").read_text().partition("## The tree")[2].partition("The types")[0]
    named = re.findall(r"^\| `(\w+)/` ", table, re.MULTILINE)
    listed = re.findall(
        r'^    "(\w+)",$', (ROOT / "pyproject.toml").read_text().partition("layers = [")[2], re.MULTILINE
    )
    assert named == listed[: listed.index("privacy") + 1][::-1]
