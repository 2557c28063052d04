"""Makes small models whose releases, folders and words are stored in small/, a folder a case.

python tests/golden/golden_cases.py makes small/ anew, on purpose; with names of cases after it, those alone.
Afterwards, git diff says what changed.
Only public names are used, so that the inside of the library may move. Everything is seeded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open

import privrep
from privrep.cli import main

SMALL = Path(__file__).parent / "small"
TORCH = importlib.util.find_spec("torch") is not None
TERMINAL = {"COLUMNS": "120", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}
MOST = 24  # numbers of an array that are kept
Arrays = dict[str, Any]


class Case:
    """Makes, fits and loads one small model, and tells what it predicts. Its own class makes the rows."""

    estimator: str
    needs_torch = False

    def __init__(self, **options: Any) -> None:
        self.options = {"random_state": 7, **options}

    @property
    def kind(self) -> Any:
        return getattr(privrep, self.estimator)

    def made(self, **more: Any) -> Any:
        return self.kind(**self.options, **more)

    def fit(self, model: Any) -> Any:
        return model.fit(self.X, self.y, self.groups)

    def load(self, folder: Path) -> Any:
        return self.kind.load(folder)

    def told(self, model: Any) -> dict[str, Any]:
        """Tell what a model predicts and says it spent, as values of JSON."""
        found, facts = self.tell(model)  # arrays, and facts that stand with those of privacy
        report = model.privacy_
        names = ("epsilon", "epsilon_budget", "delta", "relation", "unit", "accountant", "seeded")
        privacy = {"words": str(report), **{name: getattr(report, name) for name in names}}
        privacy["events"] = [[name, repr(event)] for name, event in report.events]
        arrays = {name: np.asarray(values) for name, values in found.items()}
        kept = {name: [list(a.shape), a.ravel()[:MOST].tolist()] for name, a in arrays.items()}
        return dict(json.loads(json.dumps({"privacy": privacy | facts, "arrays": kept})))


class Table(Case):
    """Fits rows of users whose regressions share two directions, to one target or two."""

    def __init__(self, estimator: str, targets: int = 1) -> None:
        super().__init__(rank=2, epsilon=100.0)
        self.estimator, users, d = estimator, 60, 4
        rng = np.random.default_rng(0)
        sizes = rng.integers(5, 10, users)
        self.groups, place = np.repeat(np.arange(users) * 3 + 11, sizes), np.repeat(np.arange(users), sizes)
        U = np.linalg.qr(rng.normal(size=(d, 2)))[0]
        self.X = rng.normal(size=(len(place), d)) * np.linspace(0.5, 3, d)
        heads, intercepts = rng.normal(size=(2, users, 2)), rng.normal(size=(2, users))
        slopes = np.einsum("rd,trd->rt", self.X, (heads @ U.T)[:, place])
        y = slopes + intercepts[:, place].T + 0.1 * rng.normal(size=slopes.shape)
        self.y = y if targets == 2 else y[:, 0]

    def tell(self, model: Any) -> tuple[Arrays, dict[str, Any]]:
        head = model.personalize(self.X[:9], self.y[:9])
        found = {"representation": model.representation_, "prediction": model.predict(self.X, self.groups)}
        found |= {"personal": head.predict(self.X[:20]), "users": model.users_}
        return found | {"weights": head.weights, "intercept": head.intercept}, {"kind": head.kind}


class Classes(Case):
    """Fits rows of users with one of three classes each, which are not declared."""

    estimator = "PrivateFedRepClassifier"

    def __init__(self) -> None:
        super().__init__(rank=2, epsilon=20.0)
        rng = np.random.default_rng(1)
        self.groups = np.repeat(np.arange(60), 8)
        U = np.linalg.qr(rng.normal(size=(4, 2)))[0]
        self.X = rng.normal(size=(len(self.groups), 4))
        scores = np.einsum("rk,rkc->rc", self.X @ U, 3 * rng.normal(size=(60, 2, 3))[self.groups])
        self.y = np.array(["no", "yes", "maybe"])[(scores + rng.gumbel(size=scores.shape)).argmax(axis=1)]

    def tell(self, model: Any) -> tuple[Arrays, dict[str, Any]]:
        found = {"representation": model.representation_, "prediction": model.predict(self.X, self.groups)}
        found["personal"] = model.personalize(self.X[:9], self.y[:9]).predict(self.X[:20])
        found |= {"outputs": model.decision_function(self.X, self.groups), "classes": model.classes_}
        return found | {"probabilities": model.predict_proba(self.X, self.groups), "users": model.users_}, {}


class Ratings(Case):
    """Fits ratings of most items by every user."""

    estimator = "PrivateFactorization"

    def __init__(self) -> None:
        super().__init__(epsilon=20.0)
        rng = np.random.default_rng(2)
        self.users, what = np.nonzero(rng.random((80, 6)) < 0.7)
        factors, tastes = rng.normal(size=(6, 2)), rng.normal(size=(80, 2))
        value = 3 + rng.normal(size=80)[self.users] + np.einsum("rk,rk->r", factors[what], tastes[self.users])
        self.ratings = (value + 0.1 * rng.normal(size=len(what))).round(3)
        self.items = np.array([f"item {n}" for n in range(6)])[what]

    def fit(self, model: Any) -> Any:
        return model.fit(self.users, self.items, self.ratings)

    def tell(self, model: Any) -> tuple[Arrays, dict[str, Any]]:
        taste = model.personalize(self.items[:6], self.ratings[:6])
        personal = taste.predict([*self.items[:8], "other"])
        found = {"prediction": model.predict(self.users, self.items), "personal": personal}
        found |= {"offsets": model.item_offsets_, "factors": model.item_factors_, "users": model.users_}
        return found, {"items": list(model.items_)}


class Network(Case):
    """Fits images of four by four of three classes, eight of each user."""

    estimator = "Centaur"
    needs_torch = True

    def __init__(self) -> None:
        super().__init__(classes=3, epsilon=8.0, rows=8, share="linear", rounds=2)
        rng, across = np.random.default_rng(4), np.linspace(0, np.pi, 4)
        waves = [np.outer(np.cos(a * across), np.cos(b * across)).ravel() for a, b in ((0, 1), (1, 0), (1, 1))]
        self.groups = np.repeat(np.arange(20), 8)
        self.y = rng.integers(0, 3, len(self.groups))
        X = 0.5 + 0.3 * np.array(waves)[self.y] + 0.1 * rng.normal(size=(len(self.y), 16))
        self.X = X.clip(0, 1).astype(np.float32)

    def tell(self, model: Any) -> tuple[Arrays, dict[str, Any]]:
        rows, head = (self.X, self.groups), model.personalize(self.X[:8], self.y[:8])
        found = {"prediction": model.predict(*rows), "probabilities": model.predict_proba(*rows)}
        found |= {"personal": head.predict_proba(self.X[:20]), "weights": model.learned_.weights}
        return found, {"plan": model.plan_.words}


class Pair(Case):
    """Fits a projection of features of images to a fixed one of a bank of three texts."""

    estimator = "DPClip"
    needs_torch = True
    bank = np.eye(3, 6, dtype=np.float32)

    def __init__(self) -> None:
        super().__init__(epsilon=8.0, cosine=False)
        rng = np.random.default_rng(5)
        self.y = rng.integers(0, 3, 30)
        self.X = (0.3 * rng.normal(size=(30, 5)) + np.eye(3, 5)[self.y]).astype(np.float32)

    def towers(self) -> tuple[Any, Any]:
        from privrep.multimodal.encoders import Projection

        return Projection(5, 4, 1), Projection(6, 4, 2).requires_grad_(False)

    def made(self, **more: Any) -> Any:
        return self.kind(*self.towers(), **self.options, **more)

    def load(self, folder: Path) -> Any:
        return self.kind.load(folder, *self.towers())

    def fit(self, model: Any) -> Any:
        from privrep.multimodal.pairs import labelled

        pairs = labelled(self.X, self.y, self.bank, [0, 1, 2])
        few = {"steps": 5, "page": 2, "rate": 0.5, "optimiser": "sgd", "average": 0.5}
        model.settings = dataclasses.replace(model.settings_of(pairs), **few)
        return model.fit(pairs)

    def tell(self, model: Any) -> tuple[Arrays, dict[str, Any]]:
        found = {"images": model.images(self.X), "texts": model.texts(self.bank), "weights": model.weights_}
        return found, {"multiplier": model.noise_multiplier_}


CASES: dict[str, Case] = {
    "table": Table("PrivateFedRep"),
    "altmin": Table("PrivAltMin", targets=2),
    "classes": Classes(),
    "ratings": Ratings(),
    "network": Network(),
    "pair": Pair(),
}
KILLED, RENAME = "table", 8  # the case of which a run was killed, and at which rename of a file


@contextlib.contextmanager
def as_recorded() -> Iterator[None]:
    """Fix what a terminal is like; one thread, for tiny products are slower on several."""
    with mock.patch.dict(os.environ, TERMINAL):
        if not TORCH:
            yield
            return
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def said(*words: str) -> str:
    """Give what a command prints, in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(list(words))
    return printed.getvalue()


def described(folder: Path) -> dict[str, Any]:
    """Tell all that the files of a folder say, as values of JSON."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): values_of(path) for path in files}


def values_of(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(), object_hook=without_hashes)
    if path.suffix == ".jsonl":
        return [json.loads(line, object_hook=without_hashes) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return {"schema": str(table.schema.remove_metadata()), "columns": table.to_pydict()}
    with safe_open(path, "np") as page:
        facts = {name: json.loads(value) if value[:1] == "{" else value for name, value in page.metadata().items()}
        arrays = {name: page.get_tensor(name) for name in sorted(page.keys())}
    return {"facts": facts, "arrays": {name: [str(a.dtype), a.tolist()] for name, a in arrays.items()}}


def without_hashes(values: dict[str, Any]) -> dict[str, Any]:
    """Hide hashes of pages and lines: a number that is rounded otherwise on another machine changes them."""
    return {name: "a hash" if name in ("chain", "says") else value for name, value in values.items()}


def killed(work: Callable[[], Any]) -> None:
    """Run work in a forked process that ends, without any clean-up, after its RENAME-th rename of a file."""
    replace, seen = os.replace, []

    def counted(source: Any, target: Any, **more: Any) -> None:
        replace(source, target, **more)
        seen.append(target)
        if len(seen) == RENAME:
            os._exit(99)

    child = os.fork()
    if child == 0:
        try:
            with mock.patch("os.replace", counted):
                work()
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 99:
        raise RuntimeError(f"the run was to be killed at rename {RENAME}")


def make(names: list[str], root: Path = SMALL) -> None:
    """Make the golden files of some cases anew."""
    for name in names:
        case, place = CASES[name], root / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        model = case.fit(case.made())
        model.save(place / "model")
        (place / "told.json").write_text(json.dumps(case.told(model), indent=0) + "\n")
        with contextlib.chdir(place):
            (place / "inspect.txt").write_text(said("inspect", "model"))
            (place / "inspect.json").write_text(said("inspect", "model", "--json"))
    if KILLED not in names:
        return
    case, folder = CASES[KILLED], root / KILLED / "killed"
    killed(lambda: case.fit(case.made(run_folder=folder)))
    with tempfile.TemporaryDirectory() as place:
        run = shutil.copytree(folder, Path(place) / "run")
        case.fit(case.made(run_folder=run))
        shutil.copyfile(run / "ledger.jsonl", root / KILLED / "resumed.jsonl")


if __name__ == "__main__":
    if not TORCH:
        install = "pip install --constraint constraints.txt '.[torch]'"
        raise SystemExit(f"Networks and pairs need PyTorch: {install}. Nothing was changed.")
    with as_recorded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(sys.argv[1:] or list(CASES))
