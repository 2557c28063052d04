"""A neural model in a folder, laid out as `privrep.models.model` lays out others.

folder/model.json        settings, sizes and plan; written last, so a folder without it is a run under way
folder/run.json          the same, while a run is under way
folder/ledger.jsonl      every charge
folder/billboard/        every release and what was computed from it, the shared weights among it
folder/private/          the heads, readable by the owner only; all the rest is safe to publish

Modules are not written: code that a folder brings along could do anything. Of those that were passed, a hash of their
weights is kept, so that a run goes on, and a model is loaded, with the very module it was made with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import nn

from privrep.errors import InputError
from privrep.heads.gradient import HeadFit
from privrep.heads.neural import CANDIDATES
from privrep.heads.own import OwnHeads
from privrep.models import model as models
from privrep.neural.checks import known_classes
from privrep.neural.features import FeatureMap, Frozen, from_json
from privrep.neural.folders import claim_folder, finish_folder, new_folder
from privrep.neural.inspection import FORMAT, read_described
from privrep.neural.plan import SharingPlan
from privrep.neural.rounds import TrainingSettings
from privrep.neural.training import Leading, PriorHeads, Shape, SharedPart, directions_split, linear_split
from privrep.nn.flat_module import split
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Ledger, read_ledger

if TYPE_CHECKING:
    from privrep.estimators.network import Centaur

Described = dict[str, Any]


def claim(folder: Path, described: Described) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run."""
    _check_names(described)
    claim_folder(folder, json.loads(json.dumps({"format": FORMAT, **described})), "settings, weights or users")


def finish(folder: Path, described: Described, heads: OwnHeads | None) -> None:
    """Write the heads and, last, model.json into the folder of a run: from then on it is a model."""
    if heads is not None:
        write_heads(heads, folder)
    finish_folder(folder, {"format": FORMAT, **described})


def save(
    folder: Path, described: Described, ledger: Ledger, billboard: Billboard, heads: OwnHeads | None, overwrite: bool
) -> None:
    """Write a model to a folder, all of it or nothing."""
    _check_names(described)
    with new_folder(folder, overwrite) as new:
        ledger.write(new / "ledger.jsonl")
        billboard.write(new / "billboard")
        finish(new, described, heads)


@dataclass(frozen=True)
class Saved:
    """A model folder as it was read; the shared part is on its billboard."""

    described: Described
    ledger: Ledger
    billboard: Billboard
    folder: Path

    @property
    def plan(self) -> SharingPlan:
        with models.damage_explained(self.folder, "model.json"):
            return _plan(self.described["plan"])


def read(folder: Path) -> Saved:
    """Read a model folder but for its heads. One that is damaged is an InputError."""
    path = folder / "model.json"
    if not path.is_file():
        raise InputError(
            f"{folder} holds a run that was not finished; call fit again with the same arguments to continue it."
            if (folder / "run.json").is_file()
            else f"{folder} is not a model folder: it has no model.json."
        )
    described = read_described(path)
    with models.damage_explained(folder, "ledger.jsonl"):
        ledger = read_ledger(folder / "ledger.jsonl")
    with models.damage_explained(folder, "billboard"):
        billboard = Billboard.read(folder / "billboard")
        if "network" not in billboard:
            raise ValueError("there is no page 'network' in it")
    return Saved(described, ledger, billboard, folder)


def restored(saved: Saved, given: tuple[nn.Module, nn.Module] | None, shape: Shape, own: int) -> SharedPart:
    """The shared part of a model: its weights from the billboard, and the modules they belong to."""
    with models.damage_explained(saved.folder, "billboard"):
        page = saved.billboard["network"]
        facts, centre = page.facts["derived"], np.asarray(page.arrays["centre"])
        weights = np.asarray(page.arrays["weights"], dtype=np.float32)
        size, advantage = float(facts["size"]), float(facts["advantage"])
        shared, alone = CANDIDATES[int(facts["shared"])], CANDIDATES[int(facts["alone"])]
        plan = next((plan for plan in _plans(saved.plan) if plan.share == facts["share"]), None)
        if plan is None or centre.shape != (own,) or not np.isfinite(weights).all():
            raise ValueError("its page 'network' is of another model")
        if given is not None:
            both = split(Leading(given[0], shape.raw), given[1], shape.raw + own)
        elif plan.share == "directions":
            both = directions_split(centre, weights.reshape(-1, own).T.astype(np.float64), shape)
        else:
            both = linear_split(centre, size, shape, plan.features)
        if weights.shape != (both.representation.size,):
            raise ValueError("its weights are of another network")
    return SharedPart(plan, both, weights, centre, size, shape.raw, shared, alone, advantage)


def _plan(fields: Mapping[str, Any]) -> SharingPlan:
    other = fields["otherwise"]
    return SharingPlan(**{**fields, "otherwise": None if other is None else _plan(other)})


def _plans(plan: SharingPlan) -> list[SharingPlan]:
    """The plan and what it comes to otherwise."""
    return [plan, *([] if plan.otherwise is None else _plans(plan.otherwise))]


def describe(model: Centaur, plan: SharingPlan, users: int, features: int) -> Described:
    """All public facts of a fit: what a run must agree in to be continued, and what a model is made of again."""
    module: Any = model.representation
    if isinstance(module, nn.Module):
        module = {"class": type(module).__name__, **_prints(module)}
    map_: Any = model.features
    if map_ is not None and map_ != "auto":
        map_ = map_.to_json() | (_prints(map_.module) if isinstance(map_, Frozen) else {})
    config = {
        "representation": module,
        "head": None if model.head is None else _prints(model.head),
        "classes": known_classes(model.classes, model.head),
        "epsilon": float(model.epsilon),
        "delta": float(model.delta),
        "share": model.share,
        "pretrained": bool(model.pretrained),
        "image": None if model.image is None else [int(size) for size in model.image],
        "features": map_,
        "rows": int(model.rows),
        "rounds": None if model.rounds is None else int(model.rounds),
        "settings": settings_to_json(model.settings),
        "seed": None if model.random_state is None else int(model.random_state),
    }
    return {"config": config, "user_count": users, "feature_count": features, "plan": asdict(plan)}


def arguments(
    saved: Saved, representation: nn.Module | None, head: nn.Module | None, features: FeatureMap | None
) -> dict[str, Any]:
    """With which the `Centaur` of a folder is made again; modules that it needs must be given, as they were."""
    with models.damage_explained(saved.folder, "model.json"):
        config = dict(saved.described["config"])
        image, kept = config["image"], ("epsilon", "delta", "share", "pretrained", "rows", "rounds", "classes")
        same = {name: config[name] for name in kept}
        public = _public_map(saved, config["features"], features)
        module = _representation(saved, config, representation)
        return {
            **same,
            "pretrained": config["pretrained"] and module is not None,
            "representation": module,
            "head": head,
            "image": None if image is None else tuple(image),
            "features": public,
            "settings": settings_from_json(config["settings"]),
            "random_state": config["seed"],
        }


def _representation(saved: Saved, config: Mapping[str, Any], given: nn.Module | None) -> nn.Module | str | None:
    """The network that was named, or the module that was passed, where it is part of what is shared."""
    named, share = config["representation"], saved.plan.share
    if named is None or isinstance(named, str):
        if given is not None:
            raise InputError(f"{saved.folder} needs no representation to be loaded; leave it out.")
        return named
    mapped = config["pretrained"] and config["features"] == "auto" and share not in ("all", "adapters")
    if share in ("all", "adapters") or mapped:
        what = f"the representation of {saved.folder} is a module of yours, {named['class']}"
        _check_same(what, given, named, "frozen" if share == "all" else "all", "representation")
    return given


def _public_map(saved: Saved, known: Any, given: FeatureMap | None) -> FeatureMap | str | None:
    if not isinstance(known, dict):
        return known
    settings = {name: value for name, value in known.items() if name not in ("all", "frozen")}
    if settings["map"] != "frozen":
        return from_json(settings)
    what = f"the features of {saved.folder} are those of {settings['name']}, a module of yours"
    _check_same(what, getattr(given, "module", None), known, "all", "features")
    return given


def _check_same(what: str, module: nn.Module | None, prints: Mapping[str, Any], part: str, option: str) -> None:
    if module is None:
        raise InputError(f"{what}; pass it again: Centaur.load(folder, {option}=...).")
    if _prints(module)[part] != prints[part]:
        raise InputError(f"{what}, and the one given has other layers or weights; pass the one of the fit.")


def _prints(module: nn.Module) -> dict[str, str]:
    return {"all": fingerprint(module, trainable=True), "frozen": fingerprint(module, trainable=False)}


def fingerprint(module: nn.Module, *, trainable: bool) -> str:
    """A hash of the module's names, sizes and numbers; without the numbers of what is trainable, if so asked."""
    found = hashlib.sha256()
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    frozen |= {name for name, _ in module.named_buffers()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in frozen}\n".encode())
        if trainable or name in frozen:
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def settings_to_json(settings: TrainingSettings | None) -> dict[str, Any] | None:
    """Settings in JSON; heads of a kind that privrep does not know are named by their class and values."""
    if settings is None:
        return None
    fit: Any = settings.head_fit
    values = asdict(fit) if is_dataclass(fit) and not isinstance(fit, type) else {"is": repr(fit)}
    own = {name: value for name, value in vars(settings).items() if name != "head_fit"}
    return {**own, "head_fit": {"kind": type(fit).__name__, **values}}


def settings_from_json(fields: Mapping[str, Any] | None) -> TrainingSettings | None:
    if fields is None:
        return None
    values = dict(fields["head_fit"])
    kinds: dict[str, Any] = {"HeadFit": HeadFit, "PriorHeads": PriorHeads}
    kind = values.pop("kind")
    if kind not in kinds:
        return None  # a kind of head that its user must pass again, to fit anew
    return TrainingSettings(**{**fields, "head_fit": kinds[kind](**values)})


def write_heads(heads: OwnHeads, folder: Path) -> None:
    """Heads as a Parquet file in folder/private, for the owner's eyes only."""
    private = folder / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    rows = list(zip(heads.alone.tolist(), heads.position.tolist(), strict=True))
    kind = pa.list_(pa.float32())
    table = pa.table(
        {
            "user": models.ids_to_arrow(heads.ids),
            "alone": pa.array(heads.alone),
            "prior": pa.array(list(heads.prior), type=kind),
            "shared": pa.array([None if alone else heads.shared[p].ravel() for alone, p in rows], type=kind),
            "own": pa.array([heads.own[p].ravel() if alone else None for alone, p in rows], type=kind),
        },
        metadata={"shared": str(heads.shared.shape[1]), "own": str(heads.own.shape[1])},
    )
    temporary = private / "heads.parquet.tmp"
    os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    pq.write_table(table, temporary)
    os.replace(temporary, private / "heads.parquet")


def read_heads(folder: Path, learned: SharedPart) -> OwnHeads | None:
    """The heads of a folder; None where there are none, as in a copy that was published."""
    path = folder / "private" / "heads.parquet"
    if not path.is_file():
        return None
    with models.damage_explained(folder, "private/heads.parquet"):
        table = pq.read_table(path)
        alone = table["alone"].to_numpy()
        share = learned.plan.share
        own = len(learned.centre)
        sizes = {"own": own, "shared": own if share in ("linear", "nothing") else learned.split.rank}
        if any(int(table.schema.metadata[name.encode()]) != size for name, size in sizes.items()):
            raise ValueError("its heads are of another shared part")
        return OwnHeads(
            table["user"].to_numpy(zero_copy_only=False),
            alone,
            _numbers(table, "prior").reshape(len(table), learned.classes),
            np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1,
            _numbers(table, "shared").reshape(int((~alone).sum()), sizes["shared"], learned.classes),
            _numbers(table, "own").reshape(int(alone.sum()), own, learned.classes),
        )


def _numbers(table: pa.Table, name: str) -> NDArray[np.float32]:
    return np.array(table[name].combine_chunks().flatten(), dtype=np.float32)


def _check_names(described: Described) -> None:
    classes = described["config"]["classes"]
    if isinstance(classes, list) and not all(isinstance(name, str | int | float) for name in classes):
        raise InputError("a model can be saved only if its classes are named by texts or numbers; rename them.")
