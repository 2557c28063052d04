"""The configurations of `privrep fit`, which takes the same as options, `privrep fit-neural` and `privrep federate`.

What `federate` learns, and from which columns, travels to the nodes: all of it is public, and classes and categories
are declared in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from privrep.errors import InputError
from privrep.schema.machinery import (
    Configuration,
    ImageShape,
    InputPath,
    Names,
    Number,
    OutputPath,
    Section,
    SectionOfKind,
    Shown,
    Table,
    Text,
    Texts,
    Whole,
    YesNo,
    check_all,
    entry,
)
from privrep.schema.sections import (
    Budget,
    CifarFolder,
    FeatureMap,
    IdxFiles,
    ImageArchive,
    ImageFeatures,
    ImageFolder,
    ImageParquet,
    Network,
    Output,
    RelationBudget,
    Share,
    TableColumns,
    TableModel,
    Training,
)

_NATURAL = {"npz": "writers", "folder": "folders", "parquet": "column"}
ImageData = IdxFiles | CifarFolder | ImageArchive | ImageFolder | ImageParquet
HOST, PORT = "127.0.0.1", 9092


class TableFile(Section):
    """The table."""

    table: InputPath = entry("A Parquet or CSV file, relative to this file.", example="rows.parquet")
    user_as_text: YesNo = entry("CSV: ids that look like numbers are text (keeps leading zeros).", False)
    encoding: Text | None = entry("CSV: how text is encoded; found out if left out.", None, example="cp1252")
    delimiter: Text | None = entry(
        "CSV: comma, semicolon, tab or bar; read off the header if left out.", None, example="semicolon"
    )
    decimal: Text | None = entry("CSV: the decimal mark, point or comma.", None, example="comma")


class FitColumns(TableColumns):
    """Names of the columns of the table. Without features, all other columns of numbers are features."""

    features: Annotated[Texts | None, Shown()] = entry(
        "Columns of numbers; if left out all others (of Parquet: all others of numbers).",
        None,
        example=["x0", "x1", "x2"],
    )
    categorical: Texts | None = entry(
        "Columns of text or integers, a feature for each value; values that categories does not list are selected "
        "privately. If left out, those that categories lists.",
        None,
        example=["colour"],
    )
    numeric: Texts | None = entry(
        "Columns of numbers, whatever they look like: leading zeros, text in a Parquet file.", None, example=["x0"]
    )
    item: Text | None = entry(
        "Ratings: column that names the item of each row; the target is the rating.", None, example="item"
    )
    items: Any = entry("Ratings: the list of all items, if public; else selected privately.", None, example=["a", "b"])


class FitModel(TableModel):
    """The model, and how it is learned."""

    classes: Any = entry("Classification: the public classes; else selected privately.", None, example=["no", "yes"])
    covariance: Table | None = entry(
        "Public covariance of the features, in place of scale.",
        None,
        example={"columns": ["x0", "x1"], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
    )


class FitConfig(Configuration):
    """Learn a shared representation privately, and every user's head, from a table."""

    data: TableFile = entry("The table.")
    columns: FitColumns = entry("Its columns.")
    privacy: RelationBudget = entry("The budget.")
    model: FitModel = entry("What is learned.")
    output: Output = entry("Where the model goes.")


class Partition(Section):
    """Images dealt to made-up users, for experiments."""

    clients: Whole = entry("How many users.", example=100)
    classes_per_client: Whole = entry("Classes that each of them sees.", example=5)
    seed: Whole | None = entry("Seed of the deal; 0 if left out.", None, example=0)
    validation: Number | None = entry("Share of everybody's images that is held out.", None, example=0.1)


class ImageUsers(Section):
    """The users: as the data tells, or made up."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["by"]}, {"required": ["partition"]}]})

    by: Annotated[Literal["writers", "folders", "column"] | None, Shown()] = entry(
        "How the data tells users: writers of an archive, folders, or a column of a Parquet file.",
        None,
        example="writers",
    )
    validation: Number | None = entry(
        "Share of every user's rows that is held out, to measure with.", None, example=0.2
    )
    partition: Partition | None = entry(
        "Instead of `by`: images are dealt to made-up users.", None, example={"clients": 100, "classes_per_client": 5}
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.by is None) == (self.partition is None):
            raise InputError(
                'say who the users are: users.by = "column", "writers" or "folders" if the data tells, or '
                "users.partition = {clients = 100, classes_per_client = 5} to deal images to made-up ones."
            )
        if self.partition is not None and self.validation is not None:
            raise InputError(
                "of dealt images, users.partition.validation says how many are held out; leave the other out."
            )
        if self.validation is not None and not 0 <= self.validation < 1:
            raise InputError(f"users.validation must lie from 0 to below 1. Got {self.validation} instead.")
        return self


class NetworkModel(Section):
    """The shared part, and what everybody's own head predicts."""

    share: Share | None = entry("What users share; auto: as much as users and budget can carry.", None, example="auto")
    network: Network | None = entry("The network; none: a linear layer on public features.", None, example="none")
    features: ImageFeatures | None = entry(
        "The public map of images to features; efficientnet: a frozen network trained on ImageNet.",
        None,
        example="auto",
    )
    cache: OutputPath | None = entry(
        "With features efficientnet: a folder that keeps them, readable by you alone.", None, example="features"
    )
    keep: Whole | None = entry("With features edges or dct: how many to keep.", None, example=60)
    rows: Whole | None = entry("Rows of each user that take part; the first so many.", None, example=32)
    classes: Names = entry("How many classes, numbered from 0, or a list of their public names.", example=10)


class NeuralConfig(Configuration):
    """Learn a shared part of a network privately, and every user's head, from images."""

    data: Annotated[ImageData, Field(discriminator="kind")] = entry("The images.")
    users: ImageUsers = entry("Who the users are.")
    privacy: Budget = entry("The budget.")
    model: NetworkModel = entry("What is learned.")
    training: Training = entry("The rounds.")
    output: Output = entry("Where the model goes.")

    @property
    def out(self) -> Path | None:
        """Return where the model goes, if the file says."""
        return self.output.folder

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_all(partial(_check_told, self.data.kind, self.users.by), self._check_model)
        return self

    def _check_model(self) -> None:
        model = self.model
        if self.data.kind == "folder" and not isinstance(model.classes, list):
            raise InputError("classes of an image folder have names: list those that are public in model.classes.")
        if model.keep is not None and model.features not in ("edges", "dct"):
            raise InputError(
                'model.keep says how many features to keep; it goes with model.features = "edges" or "dct".'
            )
        if model.cache is not None and model.features != "efficientnet":
            raise InputError(
                'model.cache keeps features of a frozen network; it goes with model.features = "efficientnet".'
            )


def _check_told(kind: str, by: str | None) -> None:
    if by is not None and by != _NATURAL.get(kind):
        told = f'use users.by = "{_NATURAL[kind]}"' if kind in _NATURAL else "use users.partition"
        raise InputError(f'data of kind "{kind}" does not tell users by "{by}"; {told}.')


class ImageInput(Configuration):
    """Images and their users, for a model that is there: of a file of `fit-neural`, the sections that say so."""

    data: Annotated[ImageData, Field(discriminator="kind")] = entry("The images.")
    users: ImageUsers = entry("Who the users are.")

    @classmethod
    def checked(cls, found: Mapping[str, Any], folder: Path) -> Self:
        """Return the two sections; others that `fit-neural` knows are not looked at."""
        others = set(NeuralConfig.model_fields) - set(cls.model_fields)
        return super().checked({name: section for name, section in found.items() if name not in others}, folder)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_told(self.data.kind, self.users.by)
        return self


class ModelOfKind(SectionOfKind):
    """The model of a federation, of one of two kinds."""

    needs = "the config must say"
    tells_kinds = False
    stray = ""
    unknown = 'a model of kind "{kind}" has no key {key}; {there}'


class SharedTable(TableModel, TableColumns, ModelOfKind):
    """A table at every node: its columns, and what is learned of them."""

    kind: Literal["table"]


class RowColumns(Section):
    """Columns of nodes' tables, where a network learns from them."""

    user: Text = entry("Column that names the user of each row.", example="user")
    target: Text = entry("Column of labels.", example="label")
    features: Texts = entry("Columns of numbers.", example=["x0", "x1"])


class SharedNetwork(ModelOfKind):
    """A network whose users are on nodes."""

    kind: Literal["neural"]
    share: Share | None = entry("What users share; auto: as much as users and budget can carry.", None, example="auto")
    network: Network | None = entry("The network; none: a linear layer on public features.", None, example="none")
    image: ImageShape | None = entry("Rows are images of this shape.", None, example=[28, 28, 1])
    width: Whole | None = entry("Numbers of a row, where nothing else tells.", None, example=64)
    columns: RowColumns | None = entry(
        "Nodes have tables with these columns.",
        None,
        example={"user": "user", "target": "label", "features": ["x0", "x1"]},
    )
    features: FeatureMap | None = entry("The public map of images to features.", None, example="auto")
    keep: Whole | None = entry("With features edges or dct: how many to keep.", None, example=60)
    rows: Whole | None = entry("Rows of each user that take part; the first so many.", None, example=32)
    classes: Names = entry("How many classes, numbered from 0, or a list of their public names.", example=10)


class Federation(Section):
    """When a round goes on, and who adds the noise."""

    min_users: Whole = entry("Users behind the answers of a round, at least.", 1)
    min_nodes: Whole = entry("Nodes that must have joined before the run begins.", 1)
    wait: Number = entry("Seconds: for nodes at the start, and for a round in all.", 600.0)
    round_timeout: Number = entry("Seconds after which a round ends with the answers it has.", 60.0)
    resend: Number = entry("Seconds after which a silent node is asked again.", 10.0)
    poll: Number = entry("Seconds between two looks for answers.", 0.05)
    noise: Literal["server", "nodes"] = entry("Who adds the noise.", "server")
    noise_nodes: Whole = entry("With noise of the nodes: how many must answer in every round.", 1)
    server_epsilon: Number | None = entry(
        "With noise of the nodes: the most that the server learns.", None, example=8.0
    )
    most_users: Whole | None = entry(
        "Users of one node, at most; a node that says more is left out.", None, example=1000
    )


class Server(Section):
    """Where nodes find the server."""

    host: Text = entry("Address to listen at.", HOST)
    port: Whole = entry("Port to listen at; 0: any that is free.", PORT)
    keys: InputPath | None = entry("Folder that `privrep federate keys` made.", None, example="keys")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.port < 1 << 16:
            raise InputError(f"server.port must lie from 0 to 65535. Got {self.port} instead.")
        return self


class FederateFile(Configuration):
    """Learn together, every node keeping its users' rows and heads."""

    privacy: RelationBudget = entry("The budget.")
    model: Annotated[SharedTable | SharedNetwork, Field(discriminator="kind")] = entry("What is learned.")
    training: Training = entry('The rounds, of model.kind = "neural".')
    federation: Federation = entry("How the federation is run.")
    server: Server = entry("Where nodes find the server.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.model, SharedTable) and self.training.model_fields_set:
            raise InputError('[training] is for model.kind = "neural"; leave it out.')
        return self
