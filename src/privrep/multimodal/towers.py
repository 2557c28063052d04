"""Two encoders and a temperature as one model with flat public weights, and how rows are images and texts.

The weights are the image encoder's, then the text encoder's, then the logarithm of the scale of similarities if it is
learned. What has `requires_grad=False` is frozen: public, and in no release.

Cached features get a common scale: of length one, less the mean of all users', of length one again. Features of a
frozen network have a large mean in common, which tells no image from another. Their mean is released once, charged like
everything else. All arithmetic on the mean is public, and on every row by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.errors import InputError
from privrep.multimodal.pairs import Pairs
from privrep.nn.flat_module import FlatModule, check_module, try_module
from privrep.nn.threads import own_copy
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Singles

MOST_SCALE = 100.0  # the largest scale of similarities, as in CLIP
CENTRE_PAGE = "centre"
MOST_DIRECTIONS = 64  # the most directions of a space of texts, if nobody says otherwise
AT_ONCE = 256  # rows of a forward pass that nobody differentiates


@dataclass(frozen=True, eq=False)
class Layout:
    """Public facts of rows: how many numbers are an image's, and the public texts that a target names."""

    image_numbers: int
    text_numbers: int  # numbers of a caption in the row; 0 where all captions are in the bank
    bank: Singles
    classes: NDArray[np.int64] | None = None  # the class of each text of the bank, where texts name classes

    @property
    def free(self) -> int:
        """Return the target of a row that holds its own caption."""
        return len(self.bank)

    @property
    def class_count(self) -> int:
        """Return how many classes the texts of the bank name; 0 if they name none."""
        return 0 if self.classes is None else int(self.classes.max()) + 1

    def find_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the caption of each row, of y's shape; -1 where there is none.

        Absent rows have none, and neither have rows whose target is no caption.

        Args:
            y: targets as numbers, of any shape.
        """
        most = self.free if self.text_numbers else self.free - 1
        good = (y >= 0) & (y <= most) & (y == np.floor(y))
        return np.where(good, y, -1).astype(np.int64)

    def take_images(self, rows: Tensor) -> Tensor:
        """Return the images of rows, (rows, image numbers)."""
        return rows[:, : self.image_numbers].contiguous()

    def find_texts(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the text of each row, (rows, numbers of a text); zeros where it has none.

        Args:
            rows: images and, for free captions, texts, (rows, numbers).
            targets: the caption of each row, (rows,).
        """
        found = torch.zeros(len(rows), self.bank.shape[1])
        listed = (targets >= 0) & (targets < self.free)
        found[listed] = torch.from_numpy(self.bank)[targets[listed]]
        if self.text_numbers:
            own = targets == self.free
            found[own] = rows[own, self.image_numbers :]
        return found


def layout_of(pairs: Pairs) -> Layout:
    """Return the public facts of rows of these pairs."""
    return Layout(pairs.image_numbers, pairs.text_numbers, pairs.bank, pairs.classes)


@dataclass(frozen=True, eq=False)
class Towers:
    """Both encoders as one model.

    `cosine` says that embeddings of images count by their direction alone; embeddings of texts always do.
    """

    image: FlatModule
    text: FlatModule
    dim: int
    learn_scale: bool = False
    cosine: bool = True

    @property
    def size(self) -> int:
        return self.image.size + self.text.size + self.learn_scale

    def weights(self, temperature: float) -> Singles:
        """Return the modules' own weights, as they are now, (size,)."""
        scale = [np.float32(-math.log(temperature))] if self.learn_scale else []
        return np.concatenate([self.image.weights(), self.text.weights(), np.array(scale, np.float32)])

    def split_weights(self, weights: Singles, temperature: float) -> tuple[Tensor, Tensor, float]:
        """Return the image encoder's weights, the text encoder's, and the logarithm of the scale.

        Args:
            weights: of both encoders, and of the scale if it is learned, (size,).
            temperature: 1 over the scale where it is not learned.
        """
        image, both = self.image.size, self.image.size + self.text.size
        log_scale = float(weights[both]) if self.learn_scale else -math.log(temperature)
        return torch.tensor(weights[:image]), torch.tensor(weights[image:both]), min(log_scale, math.log(MOST_SCALE))

    def embed_images(self, weights: Singles, rows: Singles, temperature: float = 1.0) -> Singles:
        """Return embeddings of images, (rows, dim), not normalised.

        Args:
            weights: of both encoders, (size,).
            rows: of images, (rows, image numbers).
            temperature: is not used for embeddings.
        """
        return _embed(self.image, self.split_weights(weights, temperature)[0], rows, self.dim)

    def embed_texts(self, weights: Singles, rows: Singles, temperature: float = 1.0) -> Singles:
        """Return embeddings of texts, (rows, dim), not normalised.

        Args:
            weights: of both encoders, (size,).
            rows: of texts, (rows, text numbers).
            temperature: is not used for embeddings.
        """
        return _embed(self.text, self.split_weights(weights, temperature)[1], rows, self.dim)


def make_towers(
    image: nn.Module,
    text: nn.Module,
    image_numbers: int,
    text_numbers: int,
    learn_scale: bool = False,
    cosine: bool = True,
) -> Towers:
    """Return both encoders as one model; raise InputError if a layer mixes users, or sizes do not fit.

    Args:
        image: takes rows of `image_numbers` numbers.
        text: takes rows of `text_numbers` numbers.
        image_numbers: of an image.
        text_numbers: of a text.
        learn_scale: whether the scale of similarities is learned.
        cosine: whether embeddings of images count by their direction alone.
    """
    dims = []
    for what, module, numbers in (("image encoder", image, image_numbers), ("text encoder", text, text_numbers)):
        check_module(module, what)
        module.eval()
        rows = torch.cos(torch.arange(2.0 * numbers)).reshape(2, numbers)
        out = try_module(module, rows, what, f"rows of {numbers} numbers")
        if out.ndim != 2:
            raise InputError(f"the {what} must give each row a vector. Got shape {tuple(out.shape)} for 2 rows.")
        dims.append(int(out.shape[1]))
    if dims[0] != dims[1]:
        raise InputError(f"embeddings of images have {dims[0]} numbers and those of texts {dims[1]}; project one side.")
    if not FlatModule(image).size + FlatModule(text).size:
        raise InputError("neither encoder has a trainable parameter, so there is nothing to learn.")
    return Towers(FlatModule(image), FlatModule(text), dims[0], learn_scale, cosine)


def normalise_rows(rows: Tensor) -> Tensor:
    """Return the direction of each row, (rows, dim); a row of zeros stays one."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)


def pull_through_directions(slopes: Tensor, rows: Tensor, directions: Tensor) -> Tensor:
    """Return slopes in rows, from slopes in their directions, (rows, dim) all; zero rows get zeros."""
    lengths = rows.norm(dim=1, keepdim=True)
    across = slopes - (slopes * directions).sum(dim=1, keepdim=True) * directions
    return torch.where(lengths > 0, across / lengths, 0.0)


def _embed(part: FlatModule, flat: Tensor, rows: Singles, dim: int) -> Singles:
    """Return what an encoder makes of rows, (rows, dim), some at a time.

    Args:
        part: the encoder.
        flat: its weights, (size,).
        rows: (rows, numbers).
        dim: of embeddings.
    """
    part = own_copy(part)  # steps of other threads copy the module, which must not hold these weights meanwhile
    with torch.no_grad():
        some = [part(flat, torch.from_numpy(rows[start : start + AT_ONCE])) for start in range(0, len(rows), AT_ONCE)]
    return np.asarray(torch.cat(some).numpy() if some else np.zeros((0, dim), np.float32))


@dataclass(frozen=True, eq=False)
class CentreStep:
    """The step that releases a centre: users send the mean of their images' features, each of length one."""

    layout: Layout
    rows_per_user: int

    @property
    def spec(self) -> StepSpec:
        """Return how rows are laid out, and how many floats a user takes."""
        held = self.layout.image_numbers
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        rows = batch.X[..., : self.layout.image_numbers].astype(np.float64)
        lengths = np.sqrt((rows * rows).sum(axis=2, keepdims=True))
        there = (self.layout.find_targets(batch.y) >= 0)[..., None]
        rows *= np.where(there & (lengths > 0), 1 / np.where(lengths > 0, lengths, 1), 0)
        return {"sum": Vectors(rows.sum(axis=1) / np.maximum(there.sum(axis=1), 1))}


def release_centre(run: Run, layout: Layout, rows_per_user: int, mu_squared: float) -> Singles:
    """Return the mean of all users' features of length one, (numbers,), released for this much of the budget.

    Args:
        run: the run whose ledger is charged.
        layout: what rows hold.
        rows_per_user: how many rows of a user count.
        mu_squared: the budget of the release.
    """
    query = Query(Bound(1.0, layout.image_numbers), mu_squared)
    released = run.release(CENTRE_PAGE, CentreStep(layout, rows_per_user), {"sum": query})["sum"]
    return mean_of(released.value, run.users.facts.users)


def mean_of(total: Array, users: int) -> Singles:
    """Return a mean, (numbers,), from a released sum over users."""
    return (total / users).astype(np.float32)


class Centred(nn.Module):
    """A module that takes rows of features: of length one, less a public mean, of length one again."""

    mean: Tensor

    def __init__(self, mean: Singles) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, rows: Tensor) -> Tensor:
        """Return centred rows, (rows, features)."""
        return normalise_rows(normalise_rows(rows) - self.mean)


class TextSpace(nn.Linear):
    """A public, frozen map of texts' features to the directions in which the texts of a bank differ most.

    It takes their features less their mean, and gives `dim` principal components of them, equally long on average over
    the bank. Without `dim` there are MOST_DIRECTIONS at most. Texts of classes cost no more in more directions: one
    score is learned for each class, whatever the directions of its texts (`multimodal.closed`).
    """

    def __init__(self, bank: NDArray[Any], dim: int | None = None) -> None:
        """Find the directions of a bank.

        Args:
            bank: features of public texts, (texts, numbers).
            dim: how many directions; fewer if the texts have fewer.
        """
        dim = MOST_DIRECTIONS if dim is None else dim
        texts = np.asarray(bank, np.float64)
        mean = texts.mean(axis=0)
        _, lengths, components = np.linalg.svd(texts - mean, full_matrices=False)
        kept = min(dim, int((lengths > 1e-6 * lengths[0]).sum()))
        directions = components[:kept] / lengths[:kept, None] * np.sqrt(len(texts))
        super().__init__(texts.shape[1], kept)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(directions))
            self.bias.copy_(torch.from_numpy(-directions @ mean))
        self.requires_grad_(False)
