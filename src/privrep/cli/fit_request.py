"""The request of `privrep fit`, by options or by a file. Mistakes are told in the words of either."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli.declared import Declared
from privrep.cli.options import check_relation, split_names
from privrep.data.dialects import Dialect
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.privacy.events import Relation
    from privrep.schema.commands import FitConfig

BESIDES = ("out", "workdir", "overwrite", "check", "quiet", "as_json")  # options that go with a file
KEYS = {  # of each option, what a file says in its place
    "--user": "columns.user",
    "--target": "columns.target",
    "--features": "columns.features",
    "--categorical": "columns.categorical",
    "--categories": "columns.categories",
    "--missing": "columns.missing",
    "--missing-indicator": "columns.missing_indicator",
    "--weight": "columns.weight",
    "--numeric": "columns.numeric",
    "--item": "columns.item",
    "--items": "columns.items",
    "--epsilon": "privacy.epsilon",
    "--delta": "privacy.delta",
    "--relation": "privacy.relation",
    "--simulate": "privacy.seed",
    "--population": "privacy.population",
    "--task": "model.task",
    "--classes": "model.classes",
    "--loss": "model.loss",
    "--rank": "model.rank",
    "--method": "model.method",
    "--paper": 'model.configuration = "paper"',
    "--start": "model.start",
    "--no-intercept": "model.intercept = false",
    "--no-safety-net": "model.safety_net = false",
    "--scale": "model.scale",
    "--covariance": "model.covariance",
    "--user-as-text": "data.user_as_text",
    "--encoding": "data.encoding",
    "--delimiter": "data.delimiter",
    "--decimal": "data.decimal",
}


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The request of one fit. What may be left out is None then."""

    table: Path
    user: str
    targets: tuple[str, ...]
    epsilon: float
    delta: float
    relation: Relation
    seed: int | None
    features: tuple[str, ...] | None
    categorical: tuple[str, ...] | None
    categories: Declared | None
    item: str | None
    items: Declared | None
    task: str
    classes: str | Declared | None
    loss: str | None
    rank: int | None
    method: str | None
    configuration: str
    start: str | None
    intercept: bool
    safety_net: bool
    scale: Declared | None
    covariance: Declared | None
    user_as_text: bool
    numeric: tuple[str, ...]
    dialect: Dialect
    missing: str = "impute"
    missing_indicator: tuple[str, ...] = ()
    weight: str | None = None
    population: Path | None = None

    @classmethod
    def of_options(cls, given: Mapping[str, Any]) -> FitRequest:
        """Return the request of options, given by their names; all that are needed and missing are named at once."""
        missing = [f"--{name}" for name in ("user", "target", "epsilon", "delta") if given[name] is None]
        if missing:
            listed = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
            raise InputError(f"a fit needs {listed}; or a file that says so: privrep fit CONFIG.toml.")
        as_they_are: tuple[str, ...] = (
            "user",
            "epsilon",
            "delta",
            "item",
            "task",
            "classes",
            "loss",
            "method",
            "start",
        )
        as_they_are += ("missing", "weight", "population")
        files = ("categories", "items", "scale", "covariance")
        told: dict[str, Any] = {name: given[name] for name in as_they_are}
        told |= {name: Declared.in_file(f"--{name}", given[name]) for name in files}
        return cls(
            **told,
            table=Path(given["table"]),
            targets=_names(given["target"]) or (),
            relation=check_relation(given["relation"]),
            seed=_seed(given["simulate"]),
            features=_names(given["features"]),
            categorical=_names(given["categorical"]),
            rank=_rank(given["rank"]),
            configuration="paper" if given["paper"] else "default",
            intercept=not given["no_intercept"],
            safety_net=not given["no_safety_net"],
            user_as_text=given["user_as_text"],
            missing_indicator=tuple(given["missing_indicator"] or ()),
            numeric=_names(given["numeric"]) or (),
            dialect=Dialect(given["encoding"], given["delimiter"], given["decimal"]),
        )

    @classmethod
    def of_file(cls, asked: FitConfig) -> FitRequest:
        """Return the request of a file."""
        columns, privacy, model = asked.columns, asked.privacy, asked.model
        lists = columns.categories
        categorical = columns.categorical if columns.categorical is not None else list(lists) if lists else None
        return cls(
            table=asked.data.table,
            user=columns.user,
            targets=(columns.target,) if isinstance(columns.target, str) else tuple(columns.target),
            epsilon=float(privacy.epsilon),
            delta=float(privacy.delta),
            relation=privacy.relation or "replace-one-user",
            seed=privacy.seed,
            population=privacy.population,
            features=None if columns.features is None else tuple(columns.features),
            categorical=None if categorical is None else tuple(categorical),
            categories=Declared.in_config("columns.categories", lists),
            item=columns.item,
            items=Declared.in_config("columns.items", columns.items),
            task=model.task,
            classes=Declared.in_config("model.classes", model.classes),
            loss=model.loss,
            rank=model.rank,
            method=model.given().get("method"),
            configuration=model.configuration,
            start=model.start,
            intercept=model.intercept,
            safety_net=model.safety_net,
            scale=Declared.in_config("model.scale", model.scale),
            covariance=Declared.in_config("model.covariance", model.covariance),
            user_as_text=asked.data.user_as_text,
            missing=columns.missing,
            missing_indicator=tuple(columns.missing_indicator or ()),
            weight=columns.weight,
            numeric=tuple(columns.numeric or ()),
            dialect=Dialect(asked.data.encoding, asked.data.delimiter, asked.data.decimal),
        )


def _names(text: str | None) -> tuple[str, ...] | None:
    names = split_names(text)
    return None if names is None else tuple(names)


def _rank(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--rank must be a whole number or auto. Got {text!r} instead.") from None


def _seed(number: int | None) -> int | None:
    if number is not None and number < 0:
        raise InputError(f"--simulate must be zero or a positive integer. Got {number} instead.")
    return number


def refuse_options(path: Path, options: Sequence[str]) -> None:
    """Refuse options beside a file that says the same: what a fit was asked to do stands in one place."""
    if not options:
        return
    keys, them = ", ".join(KEYS[option] for option in options), "it" if len(options) == 1 else "them"
    raise InputError(
        f"{path} says what to fit, and {', '.join(options)} would say it again; leave {them} out, and write {keys} "
        "there."
    )


@contextmanager
def in_keys(path: Path) -> Iterator[None]:
    """Make sentences about options be about the keys of the file."""
    try:
        yield
    except InputError as error:
        said = re.sub(r"--[a-z]+(?:-[a-z]+)*", lambda found: KEYS.get(found[0], found[0]), str(error))
        raise InputError(said if said == str(error) else f"{path}: {said}") from None
