"""The configuration of `privrep fit-neural`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from privrep.errors import InputError
from privrep.schema.machinery import Configuration, Names, Number, Section, Shown, Whole, entry
from privrep.schema.sections import (
    Budget,
    CifarFolder,
    FeatureMap,
    IdxFiles,
    ImageArchive,
    ImageFolder,
    ImageParquet,
    Network,
    Output,
    Share,
    Training,
)

_NATURAL = {"npz": "writers", "folder": "folders", "parquet": "column"}
ImageData = IdxFiles | CifarFolder | ImageArchive | ImageFolder | ImageParquet


class Partition(Section):
    """Images dealt to made-up users, for experiments."""

    clients: Whole = entry("How many users.", example=100)
    classes_per_client: Whole = entry("Classes that each of them sees.", example=5)
    seed: Whole | None = entry("Seed of the deal; 0 if left out.", None, example=0)
    validation: Number | None = entry("Share of everybody's images that is held out.", None, example=0.1)


class ImageUsers(Section):
    """Who the users are: as the data tells, or made up."""

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
    """What is shared, and what everybody's own head predicts."""

    share: Share | None = entry("What users share; auto: as much as users and budget can carry.", None, example="auto")
    network: Network | None = entry("The network; none: a linear layer on public features.", None, example="none")
    features: FeatureMap | None = entry("The public map of images to features.", None, example="auto")
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
        return self.output.folder

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind, model, by = self.data.kind, self.model, self.users.by
        if by is not None and by != _NATURAL.get(kind):
            told = f'use users.by = "{_NATURAL[kind]}"' if kind in _NATURAL else "use users.partition"
            raise InputError(f'data of kind "{kind}" does not tell users by "{by}"; {told}.')
        if kind == "folder" and not isinstance(model.classes, list):
            raise InputError("classes of an image folder have names: list those that are public in model.classes.")
        if model.keep is not None and model.features not in ("edges", "dct"):
            raise InputError(
                'model.keep says how many features to keep; it goes with model.features = "edges" or "dct".'
            )
        return self
