"""The API: what `privrep.__all__` names, how it is loaded, and what is said where a package is missing."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from sklearn.base import BaseEstimator

import privrep
from privrep import cli, errors
from privrep.errors import MissingPackage, PrivrepError, missing_package
from privrep.heads import personal
from privrep.linear.registry import ESTIMATORS

SOURCE = Path(privrep.__file__).parent
TORCH = "Centaur" in privrep.__all__
WITHOUT_TORCH = (  # as where it is not installed; None in sys.modules would trip SciPy
    "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
    "PathFinder.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
)


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )


def imported_for_type_checkers() -> dict[str, str]:
    """Return by name the module that the block for type checkers takes it from."""
    blocks = [node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    (block,) = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"write {alias.name} as {alias.name}: type checkers see it then"
            found[alias.name] = str(node.module)
    return found


def defined_estimators() -> set[str]:
    """Return the public classes in estimators/ that are estimators, but for the bases that they share."""
    bases = {"Personal", "Regressor"}
    found: set[str] = set()
    for path in (SOURCE / "estimators").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(each, ast.FunctionDef) and each.name in ("fit", "_learn") for each in ast.walk(node)
            ):
                found.add(node.name)
    return (found | set(ESTIMATORS)) - bases


def test_the_table_is_what_type_checkers_see() -> None:
    assert imported_for_type_checkers() == privrep._MODULES


@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
def test_every_name_is_there_and_is_what_the_rule_allows() -> None:
    kinds: dict[str, list[str]] = {"estimator": [], "head": [], "report": [], "population": [], "error": []}
    for name in privrep.__all__:
        found = getattr(privrep, name)
        assert found.__name__ == name
        if inspect.isclass(found) and issubclass(found, BaseEstimator):
            kinds["estimator"].append(name)
        elif inspect.isclass(found) and issubclass(found, PrivrepError | UserWarning):
            kinds["error"].append(name)
        elif found.__module__ == "privrep.data.synthetic":
            kinds["population"].append(name)
        elif name in ("PrivacyReport", "PopulationLedger", "WithinUserSplit"):
            kinds["report"].append(name)
        else:
            assert {"predict"} <= set(dir(found)), name
            kinds["head"].append(name)
    assert set(kinds["estimator"]) == defined_estimators()
    raised = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert set(kinds["error"]) == raised
    made = {name for name, kind in vars(personal).items() if getattr(kind, "__module__", "") == personal.__name__}
    heads = {name for name in made if inspect.isclass(getattr(personal, name))} | {"PersonalNetwork"}
    assert set(kinds["head"]) == heads
    assert set(kinds["population"]) >= {"make_population", "make_class_population"}


def test_dir_names_the_api_and_other_names_are_refused() -> None:
    assert set(privrep.__all__) <= set(dir(privrep))
    with pytest.raises(AttributeError, match="no attribute 'Centaurus'"):
        privrep.Centaurus  # noqa: B018


def test_a_star_import_needs_no_torch() -> None:
    code = WITHOUT_TORCH + (
        "import privrep\nfrom privrep import *\n"
        "assert PrivateFedRep and CentaurRegressor and DPFedAvg and PrivacyReport\n"
        "assert sorted(set(dir(privrep)) - set(privrep.__all__)) == "
        "['Centaur', 'DPClip', 'PersonalNetwork', '__version__'], privrep.__all__\n"
    )
    run = ended(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
def test_a_star_import_has_all_names_where_torch_is() -> None:
    run = ended("from privrep import *; print(Centaur, DPClip, PersonalNetwork)")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from privrep import Centaur", "Centaur"),
        ("from privrep.estimators.network import Centaur", "Centaur"),
        ("from privrep import DPClip", "DPClip"),
        ("from privrep.estimators.clip import DPClip", "DPClip"),
        ("from privrep import PersonalNetwork", "PersonalNetwork"),
        ("import privrep; privrep.DPClip", "DPClip"),
    ],
)
def test_without_torch_one_sentence_says_what_to_install(statement: str, name: str) -> None:
    code = (
        WITHOUT_TORCH + f"try:\n    {statement}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    )
    run = ended(code)
    assert run.stdout == (
        f"MissingPackage {name} needs PyTorch; in a clone of privrep run: pip install --constraint constraints.txt "
        "'.[torch]'\n"
    ), run.stderr


def test_a_missing_package_is_an_error_of_both_kinds_and_other_packages_are_not_blamed() -> None:
    assert isinstance(missing_package("it needs Flower", "federated"), ImportError | errors.InputError)
    with pytest.raises(MissingPackage, match="it needs Flower"), errors.needed("flwr", "it needs Flower", "federated"):
        raise ModuleNotFoundError("No module named 'flwr'", name="flwr")
    with pytest.raises(ModuleNotFoundError, match="other"), errors.needed("flwr", "it needs Flower", "federated"):
        raise ModuleNotFoundError("No module named 'other'", name="other")


def test_nobody_is_told_to_install_the_project_from_an_index() -> None:
    wrong = re.compile(r"privrep\[\w+\]")
    assert wrong.search("pip install 'privrep[torch]'")
    assert not [path for path in SOURCE.rglob("*.py") if wrong.search(path.read_text())]


def test_every_extra_that_is_named_is_there() -> None:
    named = set(re.findall(r'(?:missing_package\(.*|needed\(.*), "(\w+)"\)', "\n".join(_sources())))
    assert {"torch", "multimodal", "federated"} <= named
    text = (SOURCE.parents[1] / "pyproject.toml").read_text()
    assert named <= set(re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE))


def _sources() -> list[str]:
    return [path.read_text() for path in SOURCE.rglob("*.py")]


def test_types_are_declared() -> None:
    assert (SOURCE / "py.typed").read_text() == ""


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "privrep", "--version"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert run.stdout == capsys.readouterr().out
    scripts = distribution("privrep").entry_points.select(group="console_scripts", name="privrep")
    assert [script.value for script in scripts] == ["privrep.cli:main"]


def test_the_library_is_silent_unless_it_is_listened_to() -> None:
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("privrep").handlers)
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert any(each.arg == "file" for each in node.keywords), f"{path}:{node.lineno} prints"
