"""Reading the configuration of `privrep federate`: the task that travels to the nodes, and the settings of the run.

The settings are public numbers that decide when a round goes on, and who adds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from privrep.data.categories import Categories, check_classes, check_lists
from privrep.errors import InputError, missing_package
from privrep.models.description import Columns, Config
from privrep.privacy.grid import MAX_INT64_USERS
from privrep.schema.commands import FederateFile, Federation, SharedNetwork, SharedTable
from privrep.schema.sections import RelationBudget, Training

if TYPE_CHECKING:
    from privrep.federated.task import Task


NoiseBy = Literal["server", "nodes"]


@dataclass(frozen=True)
class FederationSettings:
    """Settings of a run over nodes.

    A round ends when all nodes have answered. After `round_timeout` it also ends if at least `min_users` users are
    behind the answers. With fewer it waits on, `wait` in all, and then nothing is released.

    With noise = "nodes", `noise_nodes` of them are taken to add theirs: at least as many must answer in every round.
    """

    min_users: int = 1  # users behind the answers of a round
    min_nodes: int = 1  # nodes that must have joined before the run begins; later ones are left out
    wait: float = 600.0  # seconds: for nodes at the start, and for a round in all
    round_timeout: float = 60.0
    resend: float = 10.0  # seconds after which a node that is silent is asked again
    poll: float = 0.05  # seconds between two looks for answers
    noise: NoiseBy = "server"
    noise_nodes: int = 1
    server_epsilon: float | None = None  # the most that a node lets the server learn; None: what the run needs
    most_users: int = MAX_INT64_USERS  # users of one node: a node that says it has more is left out

    def __post_init__(self) -> None:
        for name in ("min_users", "most_users", "min_nodes", "noise_nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INT64_USERS:
                raise InputError(f"{name} must be a whole number from 1 to {MAX_INT64_USERS:,}. Got {value!r} instead.")
        for name in ("wait", "round_timeout", "resend", "poll"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"{name} must be a positive number of seconds. Got {value!r} instead.")
        if self.noise not in get_args(NoiseBy):
            raise InputError(f"noise is added by the server or by the nodes. Got {self.noise!r} instead.")
        if self.server_epsilon is not None and not (self.noise == "nodes" and 0 < self.server_epsilon < math.inf):
            raise InputError('server_epsilon is a positive number, and goes with noise = "nodes" alone.')
        if self.noise == "server" and self.noise_nodes != 1:
            raise InputError('noise_nodes goes with noise = "nodes" alone.')


@dataclass(frozen=True)
class FederateConfig:
    """The contents of a configuration file: task, settings, address and the folder of keys."""

    task: Task
    settings: FederationSettings
    host: str
    port: int
    keys: Path | None
    population: Path | None = None


def read_config(path: Path) -> FederateConfig:
    """Return the settings in a TOML file; every mistake is one sentence that names the key."""
    asked = FederateFile.read(path)
    if isinstance(asked.model, SharedTable):
        task = _make_table_task(asked.privacy, asked.model)
    else:
        task = _make_neural_task(asked.privacy, asked.model, asked.training)
    server, settings = asked.server, _read_settings(asked.federation)
    return FederateConfig(task, settings, server.host, server.port, server.keys, asked.privacy.population)


def _read_settings(federation: Federation) -> FederationSettings:
    """Return the settings of the section [federation]."""
    try:
        return FederationSettings(**federation.given())
    except InputError as error:
        raise InputError(f"federation: {error}") from None


# Tables


def _make_table_task(privacy: RelationBudget, model: SharedTable) -> Task:
    """Return the task of a table from the sections [privacy] and [model]."""
    from privrep.federated.task import TableTask

    lists = model.categories or {}
    columns = Columns(
        user=model.user,
        targets=(model.target,) if isinstance(model.target, str) else tuple(model.target),
        features=tuple(model.features or ()),
        categorical=tuple(lists),
        categories=_check_categories(lists),
        classes=_check_classes(model),
        missing=model.missing,
        indicators=_find_indicators(model),
        weight=model.weight or "",
    )
    config = Config(
        rank=model.rank,
        epsilon=float(privacy.epsilon),
        delta=float(privacy.delta),
        relation=privacy.relation or "replace-one-user",
        intercept=model.intercept,
        safety_net=model.safety_net,
        scale=_check_scale(model.scale, columns),
        seed=privacy.seed,
        method=model.method,
        configuration=model.configuration,
        start=model.start,
        loss=(model.loss or "log") if model.task == "classification" else None,
    )
    return TableTask(config, columns)


def _find_indicators(model: SharedTable) -> tuple[int, ...]:
    """Return the places of the features whose missing values get an indicator column, in order."""
    numbers = list(model.features or ())
    for name in model.missing_indicator or ():
        if name not in numbers:
            raise InputError(f"model.missing_indicator names {name!r}, which is no feature of numbers.")
    return tuple(sorted({numbers.index(name) for name in model.missing_indicator or ()}))


def _check_categories(given: Mapping[str, Any]) -> tuple[Categories, ...]:
    """Return the declared list of values of each categorical column; raise InputError if a list is wrong."""
    try:
        return tuple(check_lists(given).values())
    except InputError as error:
        raise InputError(f"model.{error}") from None


def _check_classes(model: SharedTable) -> Categories:
    """Return the declared classes of a classification, none of a regression; raise InputError if they are wrong."""
    if model.task == "regression":
        for name in ("classes", "loss"):
            if name in model.model_fields_set:
                raise InputError(f'model.{name} goes with model.task = "classification".')
        return ()
    if "classes" not in model.model_fields_set:
        raise InputError("the config must list model.classes: nodes cannot select them together, so they are declared.")
    try:
        return check_classes(model.classes)
    except InputError as error:
        raise InputError(f"model.{error}") from None


def _check_scale(given: Mapping[str, Any] | None, columns: Columns) -> tuple[float, ...] | None:
    """Return the public size of each feature, in the order of the features; None if no sizes were declared."""
    if given is None:
        return None
    if columns.categorical:
        raise InputError("model.scale is for tables of numbers; leave it or model.categories out.")
    for name in columns.features:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"model.scale gives no positive number for feature {name!r}.")
    stray = next((name for name in given if name not in columns.features), None)
    if stray is not None:
        raise InputError(f"model.scale gives a size for {stray!r}, which is no feature.")
    return tuple(float(given[name]) for name in columns.features)


# Networks


def _make_neural_task(privacy: RelationBudget, model: SharedNetwork, training: Training) -> Task:
    """Return the task of a network from the sections [privacy], [model] and [training]."""
    try:
        from privrep.federated.neural_task import NeuralTask
    except ImportError:
        raise missing_package("neural models need PyTorch", "torch") from None
    if privacy.relation not in (None, "replace-one-user"):
        raise InputError("neural models take the number of users as public: privacy.relation is replace-one-user.")
    told = model.columns
    return NeuralTask(
        classes=model.classes if isinstance(model.classes, int) else tuple(model.classes),
        epsilon=float(privacy.epsilon),
        delta=float(privacy.delta),
        seed=privacy.seed,
        representation=None if model.network == "none" else model.network,
        image=None if model.image is None else (model.image[0], model.image[1], model.image[2]),
        feature_map=_make_feature_map(model),
        columns=None if told is None else Columns(told.user, (told.target,), tuple(told.features)),
        rounds=training.rounds,
        training=training.given("rounds"),
        **{name: value for name, value in model.given().items() if name in ("share", "rows", "width")},
    )


def _make_feature_map(model: SharedNetwork) -> Any:
    """Return the public map of images that the section [model] names: a map, "auto", or None for none."""
    from privrep.neural.features import Dct, Edges

    name, kept = model.features or "auto", {} if model.keep is None else {"keep": model.keep}
    if name in ("auto", "none"):
        if kept:
            raise InputError('model.keep goes with model.features = "edges" or "dct"; leave it out.')
        return "auto" if name == "auto" else None
    if model.image is None:
        raise InputError(f'model.features = "{name}" is of images: say model.image = [height, width, channels].')
    return (Edges if name == "edges" else Dct)(*model.image, **kept)
