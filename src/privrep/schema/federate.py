"""The configuration of `privrep federate`. What is learned, and from which columns, travels to the nodes: all of it is
public, and classes and categories are declared here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from privrep.errors import InputError
from privrep.schema.machinery import (
    Configuration,
    ImageShape,
    InputPath,
    Names,
    Number,
    Section,
    SectionOfKind,
    Text,
    Texts,
    Whole,
    entry,
)
from privrep.schema.sections import FeatureMap, Network, RelationBudget, Share, TableColumns, TableModel, Training

HOST, PORT = "127.0.0.1", 9092


class ModelOfKind(SectionOfKind):
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
