"""Sections that several commands have: the budget, the rounds, images in files, the facts of a table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from privrep.schema.machinery import (
    Column,
    InputPath,
    Number,
    OutputPath,
    Section,
    SectionOfKind,
    Shown,
    Size,
    Table,
    Targets,
    Text,
    Texts,
    Values,
    Whole,
    YesNo,
    entry,
)

Relation = Literal["replace-one-user", "add-or-remove-one-user"]


# Privacy


class Budget(Section):
    """The budget of the whole fit."""

    epsilon: Number = entry("Privacy budget of the whole fit. Smaller is more private.", example=2.0)
    delta: Number = entry("Second part of the budget; well below 1 / number of users.", example=1e-6)
    seed: Whole | None = entry("Seeded noise: repeatable and NOT PRIVATE. For experiments.", None, example=0)
    population: InputPath | None = entry(
        "Population ledger that the budget is reserved from: privrep population create.", None, example="people.db"
    )


class RelationBudget(Budget):
    """The budget of the whole fit, and what it compares."""

    relation: Relation | None = entry(
        "Whose data differs between two neighbouring populations; replace-one-user if left out.",
        None,
        example="replace-one-user",
    )


class Output(Section):
    """Where the model goes."""

    folder: Annotated[OutputPath | None, Shown()] = entry(
        "Folder of the model, relative to this file; --out goes before it.", None, example="model"
    )


# Networks


class Training(Section):
    """The rounds of a network. What is left out follows from what is shared; all of it is public."""

    rounds: Whole | None = entry("Rounds in which users are asked.", None, example=16)
    clip: Number | None = entry("Norm to which a user's update is clipped.", None, example=0.25)
    step_size: Number | None = entry("Size of users' local steps.", None, example=0.01)
    batch: Whole | None = entry("Rows of a local step; all of them if left out.", None, example=16)
    epochs: Whole | None = entry("Passes over a user's rows in a round.", None, example=1)
    rate: Number | None = entry("Probability with which each user is asked in a round.", None, example=1.0)
    server: Literal["sgd", "momentum", "adam"] | None = entry("The server's optimiser.", None, example="sgd")
    server_rate: Number | None = entry("Rate of the server's optimiser.", None, example=1.0)
    momentum: Number | None = entry("Momentum of the server's optimiser.", None, example=0.9)
    quantile: Number | None = entry("The bound follows this quantile of users' updates.", None, example=0.5)


Share = Literal["auto", "all", "adapters", "linear", "directions", "nothing"]
Network = Literal["mlp", "lenet", "none"]
FeatureMap = Literal["auto", "edges", "dct", "none"]
ImageFeatures = Literal["auto", "edges", "dct", "efficientnet", "none"]


class ImageColumns(Section):
    """Columns of a Parquet file of images."""

    image: Column = entry("Column of encoded images, PNG or JPEG.", example="image")
    label: Column = entry("Column of labels.", example="label")
    user: Column | None = entry("Column that names the user of each row.", None, example="user")


class IdxFiles(SectionOfKind):
    """Images and labels in two idx files, as MNIST has them."""

    kind: Literal["idx"]
    images: InputPath = entry("The idx file of images, gzipped or not.", example="train-images.gz")
    labels: InputPath = entry("The idx file of labels.", example="train-labels.gz")
    transpose: YesNo = entry("Whether rows and columns of pixels are swapped, as in EMNIST.", False)


class CifarFolder(SectionOfKind):
    """The Python version of CIFAR-10 or CIFAR-100."""

    kind: Literal["cifar"]
    path: InputPath = entry("The folder, or its archive.", example="cifar-100-python")
    part: Literal["train", "test"] = entry("Which of the two parts.", "train")
    coarse: YesNo = entry("CIFAR-100: the 20 coarse classes.", False)


class ImageArchive(SectionOfKind):
    """A NumPy archive of images and labels, and of writers where it tells users."""

    kind: Literal["npz"]
    path: InputPath = entry("Archive with the arrays images, labels and writers.", example="images.npz")


class ImageFolder(SectionOfKind):
    """A folder of images: path/class/file, or path/user/class/file."""

    kind: Literal["folder"]
    path: InputPath = entry("The folder.", example="images")
    size: Size = entry("Every image is resized to [height, width].", example=[32, 32])
    colour: YesNo = entry("false: images become grey.", True)


class ImageParquet(SectionOfKind):
    """A Parquet file with a column of encoded images."""

    kind: Literal["parquet"]
    path: InputPath = entry("The Parquet file.", example="images.parquet")
    size: Size = entry("Every image is resized to [height, width].", example=[32, 32])
    columns: ImageColumns = entry("Names of its columns.", example={"image": "image", "label": "label", "user": "user"})
    colour: YesNo = entry("false: images become grey.", True)


# Tables


class TableColumns(Section):
    """Names of the columns of a table."""

    user: Text = entry("Column that names the user of each row.", example="user")
    target: Targets = entry("Column to predict, or a list of several. Each user gets a head for each.", example="y")
    features: Annotated[Texts | None, Shown()] = entry("Columns of numbers.", None, example=["x0", "x1", "x2"])
    categories: dict[str, Values] | None = entry(
        "Columns of text or integers with their public values, a feature for each value.",
        None,
        example={"colour": ["red", "green"]},
    )
    missing: Literal["impute", "drop", "refuse"] = entry(
        "Missing features: filled inside each user, rows that miss one left out, or an error.", "impute"
    )
    missing_indicator: Texts | None = entry(
        "Columns of numbers that get a feature which says where a value was missing.", None, example=["x0"]
    )
    weight: Text | None = entry(
        "Column of weights: how much a row counts beside its user's others.", None, example="weight"
    )


class TableModel(Section):
    """The model of a table, and how it is learned."""

    task: Literal["regression", "classification"] = entry(
        "regression, of numbers, or classification, of text, integers or booleans.", "regression"
    )
    classes: Any = entry("Classification: the public classes.", None, example=["no", "yes"])
    loss: Text | None = entry("Classification: log, or hinge; log if left out.", None, example="log")
    rank: Whole | None = entry("Columns of the representation; found by the fit if left out.", None, example=2)
    method: Text = entry("The method.", "private-fedrep")
    configuration: Text = entry('default, or "paper": the method as published, for comparison.', "default")
    start: Text | None = entry("Where the method starts; its own start if left out.", None, example="spectral")
    intercept: YesNo = entry("Whether users have intercepts.", True)
    safety_net: YesNo = entry("Whether users whom the representation does not help are left without it.", True)
    scale: Table | None = entry("Public size of every feature.", None, example={"x0": 1.0, "x1": 1.0, "x2": 1.0})
