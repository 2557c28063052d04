"""Checks README and docs: what they show runs, what they name is there, lines and sentences are short.

Every document runs in a folder of its own, from the top, as a reader would type it: Python in one session, commands of
privrep, and files of TOML that begin with their name. A block that cannot run says why in a comment above it,
`<!--- skip: next "the reason" -->`, which readers do not see. Sybil finds the blocks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from markdown_it import MarkdownIt
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from privrep import FittedAgain, MissingValues, UnknownUsers, cli
from privrep.schema.clip import PairsConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [ROOT, ROOT / "src", ROOT / "src" / "privrep", *sorted(path for path in (ROOT / "tests").iterdir())]
LONGEST_LINE, LONGEST_SENTENCE = 120, 25
NEEDS = {"deploy.md": "flwr", "federated.md": "flwr", "multimodal.md": "transformers", "neural.md": "transformers"}
NOT_HERE = {  # commands that documents show and that do not run here, by how they begin
    "pip install": "it installs",
    "git show": "a copy of the sources need not have a history",
    "privrep federate serve": "it waits for nodes; tests/federated runs it",
    "privrep federate join": "it waits for a server; tests/federated runs it",
}


# What is shown runs


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `privrep demo` once, with a twentieth of its users. Documents that ask for it get copies."""
    import privrep.cli.demo

    whole, out = privrep.cli.demo.run_demo, tmp_path_factory.mktemp("documents") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(privrep.cli.demo, "run_demo", lambda folder, **more: whole(folder, users=1000, **more))
        run_privrep(["demo", "--out", str(out)])
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_document_shows_runs(page: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    blocks = [PythonCodeBlockParser(), SkipParser(), CodeBlockParser("toml", write_file)]
    document = Sybil([*blocks, CodeBlockParser("console", Shell(demo))], path=str(ROOT)).parse(page)
    with warnings.catch_warnings():
        for expected in (FittedAgain, MissingValues, UnknownUsers):
            warnings.simplefilter("ignore", expected)
        for example in document.examples():
            with contextlib.suppress(SkipTest):
                example.evaluate()
    check_results(page.name, document.namespace)


def check_results(page: str, known: dict[str, Any]) -> None:
    """Check that snippets did what the text around them says."""
    if page == "README.md":
        assert known["model"].rank_ > 0
    elif page == "neural.md":
        assert "a linear layer on 16 outputs of the frozen network" in known["own"].plan_.words
        assert known["model"].n_classes == 4
    elif page == "multimodal.md":
        assert known["found"].accuracy > 0.9  # 0.98, with a standard deviation of 0.002
        np.testing.assert_array_equal(known["again"].weights_, known["model"].weights_)
        assert PairsConfig.read(Path("squares.toml")).linear
    elif page == "deploy.md":
        assert "u7" not in known["parquet"].read_table("model/private/heads.parquet")["user"].to_pylist()


class Shell:
    """Runs the commands of a block, one after another: lines that begin with a prompt. Others are what they print."""

    def __init__(self, demo: Path) -> None:
        self.demo = demo

    def __call__(self, example: Example) -> None:
        for line in re.sub(r"\\\n\s*", "", str(example.parsed)).splitlines():
            if line.startswith("$ "):
                self.run(shlex.split(line[2:], comments=True))

    def run(self, words: list[str]) -> None:
        if words == ["privrep", "demo"]:
            shutil.copytree(self.demo, "demo")
        elif words == ["privrep", "federate", "demo"]:
            write_nodes(Path("federated-demo"))
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), f"the Makefile has no target {words[1]}"
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), f"there is no module {words[2]}"
        elif "--check" in words or not any(shlex.join(words).startswith(start) for start in NOT_HERE):
            assert words[0] == "privrep", f"{words[0]} is no program that documents show"
            run_privrep(words[1:])


def run_privrep(words: list[str]) -> None:
    """Run a command in this process. It must end well; `> FILE` at its end keeps what it prints."""
    *words, into = [*words[:-2], words[-1]] if words[-2:-1] == [">"] else [*words, ""]
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code
    assert not code, f"privrep {shlex.join(words)} ended with {code}"
    if into:
        Path(into).write_text(printed.getvalue())


def write_file(example: Example) -> None:
    """Write a TOML file, whose name is in its first line."""
    text = str(example.parsed)
    tomllib.loads(text)
    name = re.match(r"# (\S+\.toml)\n", text)
    assert name, "the first line of a TOML file in a document is # and its name"
    Path(name[1]).write_text(text)


def write_nodes(folder: Path) -> None:
    """Write the rows that `privrep federate demo` gives its nodes, and start none of its processes."""
    from privrep.cli import federated_demo as demo

    folder.mkdir()
    rng = np.random.default_rng(0)
    table = demo.make_population(rng, sum(demo.NODES.values()), len(demo.FEATURES), demo.RANK, demo.ROWS, 0.1).sample(
        rng
    )
    for name, part in demo._parts(table).items():
        demo._write(part, folder / f"{name}.parquet")


# What is named is there


def files(text: str) -> list[str]:
    """Return the Python files that are named."""
    return [name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[\w/]+\.py\b", quoted)]


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield links to files that are not there, and to headings that a document does not have."""
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        target = (page.parent / file) if file else page
        if not target.exists() or (heading and heading not in anchors(target.read_text())):
            yield link


def anchors(text: str) -> set[str]:
    """Return the names under which headings of a document are linked."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_document_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert not [name for name in files(text) if not any((place / name).is_file() for place in PLACES)]
    assert not list(broken_links(page, text))
    modules = re.findall(r"python -m ((?:experiments|benchmarks)[\w.]*)", text)
    assert not [module for module in modules if importlib.util.find_spec(module) is None]
    targets = re.findall(r"`make ([\w.-]+)`", text)
    assert not [target for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()]


def test_stale_names_are_seen() -> None:
    assert files("see `linear/gone.py` and `gone.py`") == ["linear/gone.py", "gone.py"]
    page = ROOT / "docs" / "index.md"
    stale = "[a](gone.md) [b](start.md#gone) [c](start.md#classes) [d](../README.md) [e](#gone) [f](https://a.b/c)"
    assert list(broken_links(page, stale)) == ["gone.md", "start.md#gone", "#gone"]


def test_documents_are_listed_for_their_readers() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name}" not in index]
    assert len(re.findall(r"^\| \*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)) <= 30
    assert len(PAGES[0].read_text().splitlines()) <= 150


def test_the_tree_is_the_one_that_layers_say() -> None:
    """The packages of the table, from the bottom up, are the layers from the top, turned around."""
    table = (ROOT / "docs" / "how-it-works.md").read_text().partition("## The tree")[2].partition("The types")[0]
    named = re.findall(r"^\| `(\w+)/` ", table, re.MULTILINE)
    listed = re.findall(
        r'^    "(\w+)",$', (ROOT / "pyproject.toml").read_text().partition("layers = [")[2], re.MULTILINE
    )
    assert named == listed[: listed.index("privacy") + 1][::-1]


# Lines and sentences are short


def long_lines(text: str) -> list[int]:
    """Return the numbers of lines that are too long; lines of tables may be."""
    return [
        i
        for i, line in enumerate(text.splitlines(), 1)
        if len(line) > LONGEST_LINE and line.lstrip()[:1] not in ("|", "│")
    ]


def long_sentences(text: str) -> Iterator[str]:
    """Yield sentences with too many words, outside tables and code. Code within a sentence is one word."""
    in_table = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        in_table = (in_table or token.type == "table_open") and token.type != "table_close"
        if token.type != "inline" or in_table:
            continue
        words = {"code_inline": "Code", "softbreak": " ", "hardbreak": " ", "image": ""}
        said = "".join(words.get(part.type, part.content) for part in token.children or [])
        for sentence in re.split(r"(?<!et al)[.!?][\"')\]]*\s+(?=[^a-z]|privrep)", said):
            if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > LONGEST_SENTENCE:
                yield sentence


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: page.name,
)
def test_lines_and_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    assert not long_lines(text)
    assert not list(long_sentences(text))


def test_long_lines_and_sentences_are_seen() -> None:
    assert long_lines("a" * 121 + "\n" + "| " + "a" * 121 + "\n" + "a" * 120) == [1]
    short, long = "This has words. " * 20, "Word" + " word" * 24
    assert not list(long_sentences(f"{short}{long}\n\n| {long} more |\n|---|\n\n    {long} more\n"))
    assert len(list(long_sentences(f"{short}\n\n- {long} more, `as an item`.\n"))) == 1
