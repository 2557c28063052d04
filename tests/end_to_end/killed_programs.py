"""The programs that `test_kill` kills, one line each in PROGRAMS. As a script: NAME FOLDER, and the stories as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from killing import Death, Program, haunt, open_run, tell

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Losses, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

STEPS = 3  # of the walk


class Candidates:
    """Users' losses by three candidates."""

    spec = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        return {"losses": Losses(np.tile([0.5, 0.51, 0.52], (len(batch), 1)))}


def fit_table(folder: Path, seed: int | None, death: Death, epsilon: float = 40.0) -> dict[str, Any]:
    """Select keys, choose one of three candidates, then learn a small Private FedRep."""
    from privrep.linear.alternation import AlternationSettings
    from privrep.linear.methods.private_fedrep import private_fedrep
    from privrep.users.holders import KeyHolders

    rng = np.random.default_rng(0)
    X, heads = rng.normal(size=(300, 5, 3)), rng.normal(size=(300, 1, 1))
    y = (X[:, :, :1] * heads).sum(axis=2) + rng.normal(size=(300, 5))
    table = UserTable(X.reshape(-1, 3), y.ravel(), np.arange(0, 1505, 5), np.arange(300))
    with open_run(folder, seed, death, InMemoryUsers(table, Performance(1)), epsilon) as run:
        held = KeyHolders(("common", "rare"), (np.arange(300) < 3).astype(np.int64), np.arange(301))
        keys = run.select("keys-1", held, 0.05 * run.ledger.budget.mu**2, 5e-8)
        chosen = run.choose("choice-1", Candidates(), 3, 2.0)
        learned = private_fedrep(run, 1, settings=AlternationSettings(rounds=2))
    drawn = [learned.basis.tolist(), learned.scale.tolist(), learned.error]
    return {"keys": keys, "chosen": chosen, "drawn": drawn}


def fit_estimator(folder: Path, seed: int | None, death: Death) -> dict[str, Any]:
    """Fit a small `PrivateFedRep` in a run folder."""
    from privrep import PrivateFedRep

    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(240, 4)), np.repeat(np.arange(60), 4)
    y = X @ [1.0, 0.5, 0.0, 0.0] * (1 + rng.normal(size=60))[groups]
    if (folder / "model.json").exists():
        model = PrivateFedRep.load(folder)  # the last one died when all was done
    else:
        haunt(death, folder / "ledger.jsonl")
        options: dict[str, Any] = {"rank": 1, "random_state": seed, "run_folder": folder}
        model = PrivateFedRep(**options, epsilon=8.0, delta=1e-6, population=death.population).fit(X, y, groups=groups)
    return {"drawn": model.representation_.tolist(), "predicted": model.predict(X, groups=groups).tolist()}


def fit_network(folder: Path, seed: int | None, death: Death) -> dict[str, Any]:
    """Fit a small `Centaur` in a run folder."""
    from privrep import Centaur

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    X = rng.normal(size=(120, 5)) + y[:, None]
    if (folder / "model.json").exists():
        model = Centaur.load(folder)  # the last one died when all was done
    else:
        haunt(death, folder / "ledger.jsonl")
        options: dict[str, Any] = {"classes": 2, "share": "linear", "rounds": 2, "rows": 4}
        options |= {"random_state": seed, "run_folder": folder, "population": death.population}
        model = Centaur(**options, epsilon=40.0, delta=1e-6)
        model.fit(X, y, np.repeat(np.arange(30), 4))
    predicted = model.predict(X, np.repeat(np.arange(30), 4)).tolist()
    return {"drawn": model.learned_.weights.tolist(), "predicted": predicted}


def fit_pairs(folder: Path, seed: int | None, death: Death) -> dict[str, Any]:
    """Fit a small `DPClip` in a run folder."""
    from privrep.estimators.clip import DPClip
    from privrep.multimodal.encoders import Projection
    from privrep.multimodal.pairs import labelled
    from privrep.multimodal.training import ClipSettings

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 30)
    pairs = labelled(rng.normal(size=(30, 4)) + y[:, None], y, np.eye(2, 3), [0, 1])
    modules = Projection(4, 2, 1), Projection(3, 2, 2)
    if (folder / "model.json").exists():
        model = DPClip.load(folder, *modules)  # the last one died when all was done
    else:
        haunt(death, folder / "ledger.jsonl")
        settings = ClipSettings("bank", steps=5, page=2, rate=0.1, optimiser="adam", average=0.5)
        options: dict[str, Any] = {"settings": settings, "centre": 0.1, "random_state": seed, "run_folder": folder}
        options["population"] = death.population
        model = DPClip(*modules, epsilon=40.0, delta=1e-6, **options).fit(pairs)
    return {"drawn": model.weights_.tolist(), "images": model.images(pairs.table.X).tolist()}


@dataclass(frozen=True)
class FromHere:
    """From where a walk is to each user's row."""

    at: Any
    spec = StepSpec(layout="padded", rows_per_user=1)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        return {"sum": Vectors(batch.X[:, 0] - self.at)}


def take_walk(run: Any) -> dict[str, Any]:
    """Take a short walk over batches of a fixed size, then release a page that begins where it ended."""
    from privrep.privacy.sampling import Fixed

    queries = {"sum": Query(Bound(2.0, 2), 0.2)}
    end = run.iterate(
        "walk",
        STEPS,
        {"at": np.array([3.0, -3.0])},
        lambda state: FromHere(state["at"]),
        queries,
        lambda state, releases: {"at": state["at"] + releases["sum"].value / 40},
        Fixed(10, 40),
    )
    last = run.release("last", FromHere(end["at"]), queries)
    return {"drawn": [end["at"].tolist(), last["sum"].value.tolist()]}


def walkers() -> InMemoryUsers:
    X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    return InMemoryUsers(UserTable(X, np.zeros(40, np.float32), np.arange(41), np.arange(40)), Performance(1))


def walk(folder: Path, seed: int | None, death: Death) -> dict[str, Any]:
    with open_run(folder, seed, death, walkers(), 8.0) as run:
        return take_walk(run)


def price_walk() -> None:
    """Walk outside of all folders: the price of a walk takes a second to find, and is kept."""
    from privrep.privacy.ledger import Budget
    from privrep.privacy.run import Run

    with Run.open(walkers(), Budget(8.0, 1e-6), seed=0) as run:
        take_walk(run)


TABLE_PLACES = (
    "torn", "not synced: whole", "before charge", "after charge, before draw", "before draw of keys-1/keys",
    "after draw of keys-1/keys", "before draw of choice-1/choice", "after draw of choice-1/choice",
    "before draw of scales", "after draw of round-1/step", "before draw of round-1/sizes", "after draw, before post",
    "half written", "before rename", "after rename", "after post",
)  # fmt: skip
PLACES = ("torn", "before charge", "after charge, before draw", "after draw, before post", "half written")
TABLE = ("privrep.linear.methods.private_fedrep", "privrep.users.holders", "privrep.privacy.run")
NETWORK = ("privrep.estimators.network", "torch.fx.experimental.symbolic_shapes", "pandas")
PAIRS = ("privrep.estimators.clip", "torch._dynamo", "pandas")
WALK = ("privrep.privacy.run", "dp_accounting.pld.privacy_loss_distribution")
PROGRAMS = {
    "table": Program(
        fit_table, TABLE, 40.0, 1e-6, {"simulated": None, "secure": 13}, TABLE_PLACES, (50, 50),
        frozenset({"representation"}), adaptive=True, often=5,
    ),
    "network": Program(
        fit_network, NETWORK, 40.0, 1e-3, {"simulated": 5, "secure": 25}, PLACES, (40, 10), frozenset({"network"})
    ),
    "pairs": Program(fit_pairs, PAIRS, 40.0, 1e-3, {"simulated": 8, "secure": 25}, PLACES, (30, 7)),
    "walk": Program(
        walk, WALK, 8.0, None, {"simulated": None, "secure": 20}, PLACES, (20, 3), prepare=price_walk
    ),
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(tell(PROGRAMS[sys.argv[1]], Path(sys.argv[2]))))
