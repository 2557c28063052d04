"""Docstrings a stranger understands: how they begin, and how long their first sentence is, read off the syntax trees.

Packages stand in COMPLIANT once all of their docstrings keep the rules. The last tests feed the rules docstrings that
break them.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPLIANT = (
    "privacy/",
    "users/",
    "data/",
    "local/",
    "schema/",
    "nn/",
    "heads/",
    "linear/",
    "neural/",
    "multimodal/",
    "models/",
    "estimators/",
    "federated/",
    "audit/",
    "cli/",
    "boundary.py",
    "typing.py",
    "errors.py",
    "__init__.py",
)
"""Files and folders (ending in a slash) under src/privrep whose docstrings keep the rules."""
NEVER = ("Of", "What", "With which", "Who", "Whose", "Whether")
NO_VERBS = ("A", "All", "An", "As", "By", "For", "How", "If", "In", "It", "The", "These", "This", "Those", "Where")
"""Words with which a function's docstring does not begin, either: it begins with what the function does."""
MOST_WORDS = 25

_spec = importlib.util.find_spec("privrep")
assert _spec is not None
assert _spec.origin is not None
SOURCE = Path(_spec.origin).parent
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether it is a function's) of docstrings, also of those below assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, line in enumerate(body):
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                documented = place > 0 or isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                if documented:
                    is_function = isinstance(node, ast.FunctionDef) and place == 0
                    yield line.lineno, line.value.value.strip(), is_function


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, or the end of its first paragraph."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0]


def problems(name: str, tree: ast.AST) -> list[str]:
    """Return a line for every docstring of a file that breaks a rule."""
    found = []
    for line, text, is_function in docstrings(tree):
        never = NEVER + NO_VERBS if is_function else NEVER
        begins = next((word for word in never if re.match(rf"{word}\b", text)), None)
        if begins:
            found.append(f"{name}:{line}: begins with {begins!r}")
        if is_function and not re.match(r"[A-Z][a-z]+\b", text):
            found.append(f"{name}:{line}: begins with no verb: {text[:30]!r}")
        if (words := len(first_sentence(text).split())) > MOST_WORDS:
            found.append(f"{name}:{line}: {words} words in its first sentence")
    return found


@pytest.mark.parametrize("place", COMPLIANT)
def test_docstrings_keep_the_rules(place: str) -> None:
    names = [name for name in FILES if name == place or (place.endswith("/") and name.startswith(place))]
    assert names, f"there is nothing at {place}"
    broken = [line for name in names for line in problems(name, ast.parse((SOURCE / name).read_text()))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Of each user, the sum."""',
        'def f():\n    """Whether it fits."""',
        'def f():\n    """The sum."""',
        'def f():\n    """(users,): the sum."""',
        'def f():\n    """32 bytes."""',
        'class C:\n    """What users send."""',
        'class C:\n    def f(self):\n        """Who is asked."""',
        '"""With which rows it goes on."""',
        'x = 1\n"""Whose rows they are."""',
        f'def f():\n    """Return {"word " * MOST_WORDS}."""',
        f'class C:\n    """Word{" word" * MOST_WORDS}.\n\n    More."""',
    ],
)
def test_the_rules_see_what_they_forbid(code: str) -> None:
    assert problems("elsewhere.py", ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the sum. Whether it fits is no question."""',
        'class C:\n    """The sums of users."""',
        f'def f():\n    """Return {"word " * (MOST_WORDS - 2)}more. {"word " * 30}"""',
        "x = 'What is no docstring'",
    ],
)
def test_the_rules_let_the_rest_pass(code: str) -> None:
    assert not problems("elsewhere.py", ast.parse(code))
