"""The configuration of `privrep fit-clip`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from privrep.errors import InputError
from privrep.schema.machinery import (
    Configuration,
    FolderOrName,
    InputPath,
    Number,
    OutputPath,
    Section,
    SectionOfKind,
    Shown,
    Text,
    Texts,
    Whole,
    YesNo,
    check_all,
    entry,
)
from privrep.schema.sections import CifarFolder, IdxFiles, ImageArchive, ImageFolder, ImageParquet, Output

EFFICIENTNET, MINILM = "efficientnet", "minilm"
_TEST = {"idx": ("images", "labels"), "cifar": ("part",), "flickr8k": ("held_out",)}  # others: a path


# Data


class TestPairs(Section):
    """Pairs to measure with, of the same kind: its files, or how many images are held out."""

    __test__ = False  # no test of pytest's

    path: InputPath | None = entry("Data of the same kind.", None, example="test.npz")
    images: InputPath | None = entry("idx: images.", None)
    labels: InputPath | None = entry("idx: labels.", None)
    part: Literal["train", "test"] | None = entry("cifar: the other part.", None)
    held_out: Whole | None = entry("flickr8k: how many images are held out.", None)


class PairData(SectionOfKind):
    """Images and texts that belong together."""

    unit: Literal["pair", "user"] = entry("The unit of privacy: a pair, or a user with all its pairs.", example="user")
    pairs_per_user: Annotated[Whole | None, Shown()] = entry(
        "With unit user: of each user the first so many pairs take part.", None, example=4
    )
    classes: Texts | None = entry("Public names of the labels, in their order.", None, example=["cat", "dog"])
    templates: Texts | None = entry("Prompts that are filled with the classes.", None, example=["a photo of a {}."])
    bank: Annotated[InputPath | None, Shown()] = entry(
        "Public texts: a .txt file, a line each, or a .npz file of their features.", None, example="texts.npz"
    )
    test: TestPairs | None = entry("What to measure with, not private.", None, example={"path": "test.npz"})


_USERS = "With unit user: a text file with the user of each image, a line each."


class FeaturePairs(PairData):
    """A NumPy archive of images' features, with labels or captions, and users."""

    kind: Literal["features"]
    path: InputPath = entry("Archive with the arrays images, labels or captions, and users.", example="train.npz")
    users: InputPath | None = entry(_USERS, None, example="users.txt")


class IdxPairs(PairData, IdxFiles):
    """Images and labels in two idx files, as MNIST has them."""

    users: InputPath | None = entry(_USERS, None, example="users.txt")


class CifarPairs(PairData, CifarFolder):
    """The Python version of CIFAR-10 or CIFAR-100."""

    users: InputPath | None = entry(_USERS, None, example="users.txt")


class ArchivePairs(PairData, ImageArchive):
    """A NumPy archive of images and labels, and of writers where it tells users."""


class FolderPairs(PairData, ImageFolder):
    """A folder of images: path/class/file, or path/user/class/file."""


class ParquetPairs(PairData, ImageParquet):
    """A Parquet file with a column of encoded images."""


class FlickrPairs(PairData):
    """Flickr8k: images with five captions each."""

    kind: Literal["flickr8k"]
    path: InputPath = entry("Its folder.", example="flickr8k")
    most: Whole | None = entry("At most so many images.", None, example=1000)


PairSource = FeaturePairs | IdxPairs | CifarPairs | ArchivePairs | FolderPairs | ParquetPairs | FlickrPairs


# Learning


class Encoders(Section):
    """How images and texts become vectors, and which part of that learns."""

    image: FolderOrName | None = entry(
        "efficientnet, or the name or folder of a CLIP model; features have none.", None, example=EFFICIENTNET
    )
    text: Text | None = entry("minilm, unless image is a CLIP model.", None, example=MINILM)
    train: Literal["projections", "last", "all"] = entry("What learns: projections, last layers or all.", "projections")
    learn: Literal["image", "both"] | None = entry(
        "Which side learns; image with mechanism bank.", None, example="image"
    )
    dim: Whole | None = entry("Numbers of an embedding.", None, example=16)
    size: Whole | None = entry("Side of the images that the network takes.", None, example=112)
    tokens: Whole | None = entry("Most tokens of a text.", None, example=32)
    cache: OutputPath | None = entry("Folder for features that were computed; private.", None, example="cache")


class PairBudget(Section):
    """The budget of the whole fit."""

    epsilon: Number = entry("Privacy budget of the whole fit. Smaller is more private.", example=2.0)
    delta: Number | None = entry("Second part of the budget; 1 / (2 users) if left out.", None, example=1e-6)
    seed: Whole | None = entry("Seeded noise: repeatable and NOT PRIVATE. For experiments.", None, example=0)
    population: InputPath | None = entry(
        "Population ledger that the budget is reserved from: privrep population create.", None, example="people.db"
    )


class PairTraining(Section):
    """The steps. What is left out follows from public numbers: users, budget, sizes."""

    mechanism: Literal["bank", "batch", "inside"] = entry(
        "bank: public negatives; batch and inside: the batch's own.", "bank"
    )
    steps: Whole | None = entry("How many steps.", None, example=40)
    batch: Whole | None = entry("Users of a step; 0: everyone.", None, example=0)
    sampling: Literal["poisson", "fixed"] | None = entry("How a batch is drawn.", None, example="poisson")
    clip: Number | None = entry("Norm to which gradients are clipped.", None, example=0.2)
    rate: Number | None = entry("Rate of the optimiser.", None, example=1e-3)
    optimiser: Literal["sgd", "momentum", "adam"] | None = entry("The optimiser.", None, example="adam")
    average: Number | None = entry("Share of the last steps whose weights are averaged.", None, example=0.5)
    page: Whole | None = entry("Steps of a page: a stopped fit goes on from the last page.", None, example=10)
    chunk: Whole | None = entry("Rows that are differentiated at a time.", None, example=256)
    temperature: Number | None = entry("Temperature of the loss, at the start.", None, example=0.1)
    learn_temperature: YesNo | None = entry("Whether the temperature learns.", None, example=False)
    cosine: YesNo | None = entry("Whether embeddings count by direction alone.", None, example=True)
    centre: Number | None = entry("Share of the budget that centres features.", None, example=0.03)


class PairsConfig(Configuration):
    """Learn to match images and texts privately (DP-CLIP)."""

    data: Annotated[PairSource, Field(discriminator="kind")] = entry("The pairs.")
    encoders: Encoders = entry("The encoders.")
    privacy: PairBudget = entry("The budget.")
    training: PairTraining = entry("The steps.")
    output: Output = entry("Where the model goes.")

    @property
    def out(self) -> Path | None:
        """Return where the model goes, if the file says."""
        return self.output.folder

    @property
    def mechanism(self) -> Literal["bank", "batch", "inside"]:
        """Return what images are held against."""
        return self.training.mechanism

    @property
    def train(self) -> Literal["projections", "last", "all"]:
        """Return what learns."""
        return self.encoders.train

    @property
    def both(self) -> bool:
        """Return whether texts learn, too."""
        return (self.encoders.learn or ("image" if self.mechanism == "bank" else "both")) == "both"

    @property
    def linear(self) -> bool:
        """Return whether images of features learn a linear map to fixed texts, each user clipped alone."""
        return self.mechanism == "bank" and self.pretrained is None and self.train == "projections" and not self.both

    @property
    def cosine(self) -> bool:
        """Return whether images' embeddings count by their direction alone. Where they need not, the loss is convex."""
        return not self.linear if self.training.cosine is None else self.training.cosine

    @property
    def pretrained(self) -> str | None:
        """Return the name or folder of a CLIP model, if that is the encoder."""
        image = EFFICIENTNET if self.encoders.image is None else self.encoders.image
        return None if image == EFFICIENTNET or self.data.kind == "features" else image

    @model_validator(mode="after")
    def _check(self) -> Self:
        data = (partial(check, self.data) for check in (_check_test, _check_users, _check_texts))
        check_all(*data, partial(_check_encoders, self))
        return self


# What goes together


def _check_test(data: PairSource) -> None:
    wanted = _TEST.get(data.kind, ("path",))
    if data.test is not None and data.test.model_fields_set != set(wanted):
        raise InputError(f'data.test of kind "{data.kind}" says {" and ".join(wanted)}, and nothing else.')


def _check_users(data: PairSource) -> None:
    if data.kind == "flickr8k" and data.unit == "pair":
        raise InputError(
            'an image of Flickr8k has five captions, so a pair is no unit: say data.unit = "user", which protects an '
            "image with all its captions."
        )
    if data.unit == "user" and isinstance(data, IdxPairs | CifarPairs) and data.users is None:
        raise InputError(
            f'data of kind "{data.kind}" does not tell users; name them in data.users, a line for each image.'
        )
    if data.unit == "user" and isinstance(data, ParquetPairs) and data.columns.user is None:
        raise InputError("the config must say data.columns.user, the column that names the user of each row.")
    for name in ("users", "pairs_per_user") if data.unit == "pair" else ():
        if name in data.model_fields_set:
            raise InputError(f'data.{name} goes with data.unit = "user"; leave it out, or protect users.')
    if data.unit == "user" and data.kind != "flickr8k" and data.pairs_per_user is None:
        raise InputError("the config must say data.pairs_per_user: of each user the first so many take part.")
    if data.pairs_per_user == 0:
        raise InputError("data.pairs_per_user must be 1 or more.")


def _check_texts(data: PairSource) -> None:
    bank = "" if data.bank is None else data.bank.suffix
    if data.bank is not None and bank not in (".txt", ".npz"):
        raise InputError("data.bank is a .txt file of public captions, a line each, or a .npz file of their features.")
    if bank == ".npz" and data.kind != "features":
        raise InputError('data.bank with features goes with data.kind = "features"; give a .txt file of captions.')
    if data.templates is not None and data.classes is None:
        raise InputError("data.templates are filled with data.classes; name the classes.")
    if data.classes is not None and bank:
        raise InputError("the public texts are either prompts of data.classes or those of data.bank; give one of them.")
    if data.kind == "flickr8k" and data.classes is not None:
        raise InputError("Flickr8k has captions, not classes; leave data.classes out.")
    if data.kind not in ("features", "flickr8k") and data.classes is None:
        raise InputError("the config must say data.classes, a list of the classes' public names, in the labels' order.")


def _check_encoders(config: PairsConfig) -> None:
    encoders = config.encoders
    told = encoders.image is not None or encoders.size is not None
    if config.data.kind == "features" and (told or config.train != "projections"):
        raise InputError(
            "features are encoded images: leave out encoders.image and encoders.size, and train projections."
        )
    if config.pretrained is not None:
        for name in ("text", "size", "tokens", "dim"):
            if name in encoders.model_fields_set:
                raise InputError(f"a CLIP model brings both encoders and their sizes; leave encoders.{name} out.")
    elif encoders.text not in (None, MINILM):
        raise InputError(f'encoders.text is "{MINILM}", unless encoders.image is a CLIP model. Got {encoders.text!r}.')
    if config.mechanism == "inside" and (config.train != "projections" or not config.both):
        raise InputError('mechanism "inside" trains two projections: encoders.train = "projections", learn = "both".')
    if encoders.dim == 0:
        raise InputError("encoders.dim must be 1 or more.")
