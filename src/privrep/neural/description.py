"""A neural model in public facts: what a run must agree in to be continued, and what a model is made of again.

Modules are not written: code that a folder brings along could do anything. Of those that were passed, a hash of their
weights is kept, so that a run goes on, and a model is loaded, with the very module it was made with.

Functions that read a description raise ValueError, LookupError or TypeError where it is not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from privrep.errors import InputError
from privrep.heads.gradient import HeadFit
from privrep.heads.neural import ALONE, CANDIDATES, NEVER, OwnHeads, losses_of_nobody
from privrep.neural.checks import check_classes
from privrep.neural.features import FeatureMap, Frozen, from_json
from privrep.neural.layers import Leading, Shape, directions_split, linear_split
from privrep.neural.plan import SharingPlan
from privrep.neural.pretrained import EFFICIENTNET, load_named_map
from privrep.neural.rounds import TrainingSettings
from privrep.neural.training import PriorHeads, SharedPart
from privrep.nn.flat_module import fingerprints, split
from privrep.privacy.billboard import Post
from privrep.schema.sent import read_some_fields
from privrep.typing import Array

Described = dict[str, Any]
PULL_BEFORE = 30.0  # rows that the centre of a model of before counts as
BEFORE = 9  # kinds of heads with the shared part that models of before knew; four without it came after them
FIRST_KINDS = 19  # of heads, when folders began to hold what users lose by each


class Parameters(Protocol):
    """The parameters of `Centaur`: a fit was asked for these."""

    representation: Any
    head: Any
    classes: Any
    epsilon: Any
    delta: Any
    share: Any
    pretrained: Any
    image: Any
    features: Any
    rows: Any
    rounds: Any
    settings: Any
    random_state: Any


def describe(model: Parameters, plan: SharingPlan, users: int, features: int) -> Described:
    """Return all public facts of a fit.

    Args:
        model: the parameters of the fit.
        plan: what is shared.
        users: how many there are.
        features: numbers of a row.
    """
    module: Any = model.representation
    if isinstance(module, nn.Module):
        module = {"class": type(module).__name__, **fingerprints(module)}
    map_: Any = model.features
    if map_ is not None and map_ != "auto":
        map_ = map_.to_json() | (fingerprints(map_.module) if isinstance(map_, Frozen) else {})
    config = {
        "representation": module,
        "head": None if model.head is None else fingerprints(model.head),
        "classes": check_classes(model.classes, model.head),
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


def check_names(described: Described) -> None:
    """Raise InputError if classes have names that JSON cannot hold."""
    classes = described["config"]["classes"]
    if isinstance(classes, list) and not all(isinstance(name, str | int | float) for name in classes):
        raise InputError("a model can be saved only if its classes are named by texts or numbers; rename them.")


def restore(
    plan: SharingPlan, page: Post, given: tuple[nn.Module, nn.Module] | None, shape: Shape, own: int
) -> SharedPart:
    """Return the shared part of a model: its weights from the billboard, and the modules they belong to.

    Args:
        plan: of the model.
        page: "network" of the billboard.
        given: representation and head, where the plan shares one.
        shape: of rows and classes.
        own: numbers of a row's public features.
    """
    facts, centre = page.facts["derived"], np.asarray(page.arrays["centre"])
    weights = np.asarray(page.arrays["weights"], dtype=np.float32)
    losses, pull = losses_from_json(facts), PULL_BEFORE if is_before(page) else float(facts["pull"])
    shares = next((each for each in _plans(plan) if each.share == facts["share"]), None)
    if shares is None or centre.shape != (own,) or not (np.isfinite(weights).all() and np.isfinite(centre).all()):
        raise ValueError("its page 'network' is of another model")
    if given is not None:
        both = split(Leading(given[0], shape.raw), given[1], shape.raw + own)
    elif shares.share == "directions":
        both = directions_split(centre, weights.reshape(-1, own).T.astype(np.float64), shape)
    elif is_before(page):
        both = linear_split(centre, shape, shares.features)
    else:
        both = linear_split(np.zeros(own), shape)
    if weights.shape != (both.representation.size,):
        raise ValueError("its weights are of another network")
    basis = np.zeros((0, 0))
    if shares.share == "both":
        basis = np.asarray(page.arrays["basis"])
        if basis.shape != (own, shares.rank) or not np.isfinite(basis).all():
            raise ValueError("its directions are of another model")
    return SharedPart(shares, both, weights, centre, pull, shape.raw, losses, basis=basis)


def is_before(page: Post) -> bool:
    """Return whether a model was fitted when rows had one public size, and heads did not divide by their own."""
    return "size" in page.facts["derived"]


def moved_heads(heads: OwnHeads, page: Post) -> OwnHeads:
    """Return the heads of a model; those of before took rows less the centre and over the public size.

    Args:
        heads: as the folder has them.
        page: "network" of the billboard.
    """
    if not is_before(page):
        return heads
    facts, centre = page.facts["derived"], np.asarray(page.arrays["centre"], dtype=np.float32)
    size, linear = np.float32(facts["size"]), facts["share"] == "linear"
    prior, own, shared = heads.prior.copy(), heads.own / size, heads.shared / size if linear else heads.shared
    prior[heads.alone] -= np.einsum("d,udc->uc", centre, own)
    if linear:
        prior[~heads.alone] -= np.einsum("d,udc->uc", centre, shared)
    return replace(heads, scale=heads.scale / size, prior=prior, own=own, shared=shared)


def losses_from_json(facts: Mapping[str, Any]) -> Array:
    """Return what users lose by each kind of heads.

    Models of before name two of thirteen kinds, with the shared part and without, and by how much these differ. The
    kinds nearest to them stand for them. Kinds that were added since are never chosen.
    """
    if "losses" in facts:
        given = np.array([float(loss) for loss in facts["losses"]])
        if len(given) not in (FIRST_KINDS, len(CANDIDATES)) or not np.isfinite(given).all():
            raise ValueError("its page 'network' has other kinds of heads")
        return np.append(given, np.full(len(CANDIDATES) - len(given), NEVER))
    losses, shared, alone = losses_of_nobody(), int(facts["shared"]), int(facts["alone"])
    if not (0 <= shared < BEFORE <= alone < BEFORE + 4 or (shared, alone) == (BEFORE + 1,) * 2):
        raise ValueError("its page 'network' has other kinds of heads")
    if facts["share"] != "nothing":
        losses[2 if facts["share"] == "linear" else 3] = min(-float(facts["advantage"]), 0.0)
        losses[list(ALONE)] += max(-float(facts["advantage"]), 0.0)
    return losses


def plan_from_json(fields: Mapping[str, Any]) -> SharingPlan:
    """Return the plan that a description holds."""
    other, plain = fields["otherwise"], {name: value for name, value in fields.items() if name != "otherwise"}
    given = read_some_fields(SharingPlan, plain, "plan", ("otherwise",))
    return SharingPlan(**given, otherwise=None if other is None else plan_from_json(other))


def _plans(plan: SharingPlan) -> list[SharingPlan]:
    """Return the plan and what it comes to otherwise."""
    return [plan] if plan.otherwise is None else [plan, plan.with_directions(), *_plans(plan.otherwise)]


def arguments(
    described: Described,
    folder: Path,
    representation: nn.Module | None,
    head: nn.Module | None,
    features: FeatureMap | None,
) -> dict[str, Any]:
    """Return the parameters of the `Centaur` of a folder; modules that it needs must be given, as they were.

    Args:
        described: what model.json holds.
        folder: named by refusals.
        representation: the module of the fit, where one was passed.
        head: for another fit.
        features: the frozen map of the fit, where one was passed.
    """
    config, share = dict(described["config"]), plan_from_json(described["plan"]).share
    image, kept = config["image"], ("epsilon", "delta", "share", "pretrained", "rows", "rounds", "classes")
    same = {name: config[name] for name in kept}
    public = _public_map(folder, config["features"], features)
    module = _representation(folder, config, share, representation)
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


def own_module(described: Described) -> str | None:
    """Return the name of the module of the user's own that a folder needs to be loaded; None if it needs none."""
    config, share = described["config"], plan_from_json(described["plan"]).share
    named, map_ = config["representation"], config["features"]
    if isinstance(map_, dict) and map_["map"] == "frozen":
        return None if map_["name"] == EFFICIENTNET else str(map_["name"])
    if isinstance(named, dict) and (share in ("all", "adapters") or _is_mapped(config, share)):
        return str(named["class"])
    return None


def _is_mapped(config: Mapping[str, Any], share: str) -> bool:
    """Return whether the features are what a pretrained module makes of rows."""
    return bool(config["pretrained"] and config["features"] == "auto" and share not in ("all", "adapters"))


def _representation(
    folder: Path, config: Mapping[str, Any], share: str, given: nn.Module | None
) -> nn.Module | str | None:
    """Return the network that was named, or the module that was passed, where it is part of what is shared."""
    named = config["representation"]
    if named is None or isinstance(named, str):
        if given is not None:
            raise InputError(f"{folder} needs no representation to be loaded; leave it out.")
        return named
    if share in ("all", "adapters") or _is_mapped(config, share):
        what = f"the representation of {folder} is a module of yours, {named['class']}"
        _check_same(what, given, named, "frozen" if share == "all" else "all", "representation")
    return given


def _public_map(folder: Path, known: Any, given: FeatureMap | None) -> FeatureMap | str | None:
    if known is None or known == "auto":
        return known
    if not isinstance(known, dict):
        raise ValueError("its features are of no map that is known")
    settings = {name: value for name, value in known.items() if name not in ("all", "frozen")}
    if settings["map"] != "frozen":
        return from_json(settings)
    given = load_named_map(settings) if given is None else given
    what = f"the features of {folder} are those of {settings['name']}, a module of yours"
    _check_same(what, given.module if isinstance(given, Frozen) else None, known, "all", "features")
    return given


def _check_same(what: str, module: nn.Module | None, prints: Mapping[str, Any], part: str, option: str) -> None:
    if module is None:
        raise InputError(f"{what}; pass it again: Centaur.load(folder, {option}=...).")
    if fingerprints(module)[part] != prints[part]:
        raise InputError(f"{what}, and the one given has other layers or weights; pass the one of the fit.")


def settings_to_json(settings: TrainingSettings | None) -> dict[str, Any] | None:
    """Return settings in JSON; heads of a kind that privrep does not know are named by their class and values."""
    if settings is None:
        return None
    fit: Any = settings.head_fit
    values = asdict(fit) if is_dataclass(fit) and not isinstance(fit, type) else {"is": repr(fit)}
    own = {name: value for name, value in vars(settings).items() if name != "head_fit"}
    return {**own, "head_fit": {"kind": type(fit).__name__, **values}}


def settings_from_json(fields: Mapping[str, Any] | None) -> TrainingSettings | None:
    """Return the settings of a description; None if their kind of head must be passed again."""
    if fields is None:
        return None
    values = dict(fields["head_fit"])
    kinds: dict[str, Any] = {"HeadFit": HeadFit, "PriorHeads": PriorHeads}
    kind = values.pop("kind")
    if kind not in kinds:
        return None
    return TrainingSettings(**{**fields, "head_fit": kinds[kind](**values)})
