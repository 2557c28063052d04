"""`privrep fit-neural`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.accounts import open_account
from privrep.cli.config import files_are_missing, note_weakness
from privrep.cli.console import note, progress, say, shout, show, tell, tell_privacy
from privrep.cli.ending import stoppable
from privrep.cli.fit_table import how_to_go_on, noting_first
from privrep.cli.image_rows import read_images
from privrep.cli.options import ConfigFile, Population, flag
from privrep.errors import InputError, NothingLearned, UnknownLabels, WeakPrivacy

if TYPE_CHECKING:
    from privrep.data.images import Images
    from privrep.data.table import UserTable
    from privrep.estimators.network import Centaur
    from privrep.schema.commands import NetworkModel, NeuralConfig

_NOT_PRIVATE = "(not private: for your eyes)"


def fit_neural(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model; else output.folder. Continues a stopped fit.")
    ] = None,
    population: Population = None,
    check: Annotated[bool, flag("--check", help="Say what would be shared, and spend nothing.")] = False,
) -> None:
    """Learn a shared part of a network privately, and every user's head, from images."""
    from privrep.privacy.ledger import Budget
    from privrep.schema.commands import NeuralConfig

    asked = NeuralConfig.read(config)
    if check and files_are_missing(config, asked):
        return
    folder = out or asked.out
    if folder is None and not check:
        raise InputError("say where the model goes: --out FOLDER, or output.folder in the config.")
    chosen, privacy = population or asked.privacy.population, asked.privacy
    budget = Budget(privacy.epsilon, privacy.delta)
    open_account(chosen, "", budget, folder, seeded=privacy.seed is not None)  # no image is read in vain
    images = _images(asked)
    train, held = _tables(asked, images)
    model = _model(asked, images, train)
    plan = model.planned(train.n_users, train.n_features)
    unknown = _unknown(train, model)
    if unknown:
        note(f"{unknown:,} rows have a label that is none of the classes, and count for nothing {_NOT_PRIVATE}.")
    note_weakness(asked.privacy.epsilon, asked.privacy.delta, users=train.n_users)
    tell(plan=plan.words, users=train.n_users)
    if check:
        show(plan.words)
        numbers = train.n_features
        show(f"Checked: {train.n_users:,} users, rows of {numbers:,} numbers. Nothing was spent.", row_numbers=numbers)
        return
    assert folder is not None
    model.population = chosen
    _fit(model, train, folder, plan.rounds + 3)
    _summarise(model, folder, held)


def _images(asked: NeuralConfig) -> Images:
    """Return the images; labels that are numbers are places among the classes."""
    classes = asked.model.classes
    names = classes if isinstance(classes, list) else [str(number) for number in range(classes)]
    return read_images(asked.data, names, asked.users.by)


def _tables(asked: NeuralConfig, images: Images) -> tuple[UserTable, UserTable | None]:
    """Return users' rows, their labels as places among the classes, and rows held out to measure with."""
    import numpy as np

    from privrep.data.partition import make_image_table, make_natural_table, partition

    classes = asked.model.classes
    listed = classes if isinstance(classes, list) else [str(number) for number in range(classes)]
    place = np.array([*(listed.index(name) if name in listed else -1 for name in images.names), -1])  # -1 stays -1

    def known(table: UserTable) -> UserTable:
        return replace(table, y=place[table.y.astype(np.int64)].astype(np.float32))

    dealt = asked.users.partition
    if dealt is not None:
        parts = partition(images.labels, **{"seed": 0, **dealt.given()})
        held = make_image_table(images, parts.validation) if parts.validation.size else None
        return known(make_image_table(images, parts.train)), None if held is None else known(held)
    table, share = known(make_natural_table(images)), asked.users.validation or 0.0
    return _apart(table, share) if share else (table, None)


def _apart(table: UserTable, share: float) -> tuple[UserTable, UserTable]:
    """Return everybody's rows without a share of them, and that share, spread evenly over each user's rows."""
    import numpy as np

    place = np.arange(table.n_rows) - np.repeat(table.offsets[:-1], table.sizes)
    held = np.floor((place + 1) * share + 0.5) > np.floor(place * share + 0.5)

    def part(chosen: Any) -> UserTable:
        sizes = np.bincount(np.repeat(np.arange(table.n_users), table.sizes)[chosen], minlength=table.n_users)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return replace(table, X=table.X[chosen], y=table.y[chosen], offsets=offsets)

    return part(~held), part(held)


def _model(asked: NeuralConfig, images: Images, table: UserTable) -> Centaur:
    try:
        from privrep import Centaur
    except ImportError as error:
        raise InputError(str(error)) from None
    from privrep.neural.training import PLAIN, WHOLE

    model, privacy = asked.model, asked.privacy
    options = model.given("network", "features", "keep", "cache")
    made = Centaur(
        None if model.network == "none" else model.network,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        random_state=privacy.seed,
        population=privacy.population,
        image=images.shape,
        features=_features(model, images.shape),
        rounds=asked.training.rounds,
        **options,
    )
    given = asked.training.given("rounds")
    if given:
        whole = made.planned(table.n_users, table.n_features).share in ("all", "adapters")
        made.settings = replace(WHOLE if whole else PLAIN, **given)
    return made


def _unknown(train: UserTable, model: Centaur) -> int:
    """Return how many rows have a label that is no class; raise InputError if all have."""
    from privrep.neural.checks import count_unknown_labels

    return count_unknown_labels(train.y, model.n_classes, places=True)


def _features(model: NetworkModel, shape: tuple[int, int, int]) -> Any:
    from privrep.neural.features import Dct, Edges

    if model.features == "efficientnet":
        from privrep.neural.pretrained import efficientnet

        return efficientnet(shape, cache=model.cache)
    if model.features in ("edges", "dct"):
        kept = {} if model.keep is None else {"keep": model.keep}
        return (Edges if model.features == "edges" else Dct)(*shape, **kept)
    return None if model.features == "none" else "auto"


def _fit(model: Centaur, table: UserTable, folder: Path, pages: int) -> None:
    again = f"Continuing the run in {folder}: pages that stand are read, and nothing is spent twice."
    with stoppable(lambda: how_to_go_on(folder)), progress(folder) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingLearned)  # the summary says it
        warnings.simplefilter("ignore", UnknownLabels)  # a note said it
        warnings.simplefilter("ignore", WeakPrivacy)  # the same
        model.run_folder = folder
        bar.begin("reading", pages)
        begun = (folder / "run.json").is_file()
        if begun or bar.visible:
            model.on_page = noting_first(again if begun else "", bar.page)
        if bar.visible:
            model.on_loss = bar.loss
            model.on_progress = bar.counting("features", lambda: bar.begin("reading", pages))
        model.fit(table)


def _measured(model: Centaur, rows: Any, labels: Any, users: Any) -> float:
    """Return the accuracy on rows held out; a bar counts features of a frozen network."""
    from privrep.neural.features import Frozen

    with progress() as bar:
        if isinstance(model.map_, Frozen):
            model.map_ = replace(model.map_, on_progress=bar.counting("features") if bar.visible else None)
        return model.score(rows, labels, users)


def _summarise(model: Centaur, folder: Path, held: UserTable | None) -> None:
    import numpy as np

    report = model.privacy_
    tell_privacy(report)
    say(f"Model: {folder}", model=folder)
    say(model.plan_.words)
    say(f"Privacy: {report}")
    if held is not None and held.n_rows:
        groups, known = held.ids[np.repeat(np.arange(held.n_users), held.sizes)], held.y >= 0
        labels = model.classes_[held.y[known].astype(np.int64)]
        accuracy = _measured(model, held.X[known], labels, groups[known])
        say(
            f"Accuracy on {len(labels):,} rows held out: {accuracy:.3f} {_NOT_PRIVATE}",
            not_private={"rows_held_out": len(labels), "accuracy": accuracy},
        )
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {folder} but {folder / 'private'} may be published; the heads in there belong to their users.")
    say(f"Predict with: privrep predict {folder} FILE --out FILE     What it means: privrep inspect {folder}")
