"""Two encoders and a temperature as one model with flat public weights, and how rows are images and texts.

The weights are those of the image encoder, then of the text encoder, then the logarithm of the scale of similarities if
it is learned. What has `requires_grad=False` is frozen: public, and in no release.

Cached features get a common scale: of length one, less the mean of all users', of length one again. Features of a
frozen network have a large mean in common, which tells no image from another. Their mean is released once, charged like
everything else; what is done with it is public arithmetic on every row by itself.
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
from privrep.nn.flat_module import FlatModule, check_module, tried
from privrep.nn.threads import own_copy
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Singles

MOST_SCALE = 100.0  # of similarities, as in CLIP
CENTRE_PAGE = "centre"
MOST_DIRECTIONS = 64  # of a space of texts, if nobody says otherwise
AT_ONCE = 256  # rows of a forward pass that nobody differentiates


@dataclass(frozen=True, eq=False)
class Layout:
    """Public facts of rows: how many numbers are an image's, and the public texts that a target names."""

    image_numbers: int
    text_numbers: int  # of a caption in the row; 0 where all captions are in the bank
    bank: Singles
    classes: NDArray[np.int64] | None = None  # the class of each text of the bank, where texts name classes

    @property
    def free(self) -> int:
        """The target of a row that holds its own caption."""
        return len(self.bank)

    @property
    def class_count(self) -> int:
        """Return how many classes the texts of the bank name; 0 if they name none."""
        return 0 if self.classes is None else int(self.classes.max()) + 1

    def targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """The caption of each row, -1 where there is none: absent rows, and rows whose target is no caption."""
        most = self.free if self.text_numbers else self.free - 1
        good = (y >= 0) & (y <= most) & (y == np.floor(y))
        return np.where(good, y, -1).astype(np.int64)

    def images(self, rows: Tensor) -> Tensor:
        return rows[:, : self.image_numbers].contiguous()

    def texts(self, rows: Tensor, targets: Tensor) -> Tensor:
        """The text of each row; zeros where it has none."""
        found = torch.zeros(len(rows), self.bank.shape[1])
        listed = (targets >= 0) & (targets < self.free)
        found[listed] = torch.from_numpy(self.bank)[targets[listed]]
        if self.text_numbers:
            own = targets == self.free
            found[own] = rows[own, self.image_numbers :]
        return found


def layout_of(pairs: Pairs) -> Layout:
    return Layout(pairs.image_numbers, pairs.text_numbers, pairs.bank, pairs.classes)


@dataclass(frozen=True, eq=False)
class Towers:
    """The model. `cosine` says that embeddings of images count by their direction alone; those of texts always do."""

    image: FlatModule
    text: FlatModule
    dim: int
    learn_scale: bool = False
    cosine: bool = True

    @property
    def size(self) -> int:
        return self.image.size + self.text.size + self.learn_scale

    def weights(self, temperature: float) -> Singles:
        """The modules' own, as they are now."""
        scale = [np.float32(-math.log(temperature))] if self.learn_scale else []
        return np.concatenate([self.image.weights(), self.text.weights(), np.array(scale, np.float32)])

    def pieces(self, weights: Singles, temperature: float) -> tuple[Tensor, Tensor, float]:
        """Weights of images, weights of texts, and the logarithm of the scale."""
        image, both = self.image.size, self.image.size + self.text.size
        log_scale = float(weights[both]) if self.learn_scale else -math.log(temperature)
        return torch.tensor(weights[:image]), torch.tensor(weights[image:both]), min(log_scale, math.log(MOST_SCALE))

    def of_images(self, weights: Singles, rows: Singles, temperature: float = 1.0) -> Singles:
        return _embedded(self.image, self.pieces(weights, temperature)[0], rows, self.dim)

    def of_texts(self, weights: Singles, rows: Singles, temperature: float = 1.0) -> Singles:
        return _embedded(self.text, self.pieces(weights, temperature)[1], rows, self.dim)


def towers(
    image: nn.Module,
    text: nn.Module,
    image_numbers: int,
    text_numbers: int,
    learn_scale: bool = False,
    cosine: bool = True,
) -> Towers:
    """Both modules, checked: layers known to carry one user's data to another are refused, and sizes must fit."""
    dims = []
    for what, module, numbers in (("image encoder", image, image_numbers), ("text encoder", text, text_numbers)):
        check_module(module, what)
        module.eval()
        rows = torch.cos(torch.arange(2.0 * numbers)).reshape(2, numbers)
        out = tried(module, rows, what, f"rows of {numbers} numbers")
        if out.ndim != 2:
            raise InputError(f"the {what} must give each row a vector. Got shape {tuple(out.shape)} for 2 rows.")
        dims.append(int(out.shape[1]))
    if dims[0] != dims[1]:
        raise InputError(f"embeddings of images have {dims[0]} numbers and those of texts {dims[1]}; project one side.")
    if not FlatModule(image).size + FlatModule(text).size:
        raise InputError("neither encoder has a trainable parameter, so there is nothing to learn.")
    return Towers(FlatModule(image), FlatModule(text), dims[0], learn_scale, cosine)


def unit(rows: Tensor) -> Tensor:
    """Directions; a row of zeros stays one."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _embedded(part: FlatModule, flat: Tensor, rows: Singles, dim: int) -> Singles:
    part = own_copy(part)  # steps of other threads copy the module, which must not hold these weights meanwhile
    with torch.no_grad():
        some = [part(flat, torch.from_numpy(rows[start : start + AT_ONCE])) for start in range(0, len(rows), AT_ONCE)]
    return np.asarray(torch.cat(some).numpy() if some else np.zeros((0, dim), np.float32))


@dataclass(frozen=True, eq=False)
class CentreStep:
    """Users send the mean of their images' features, each of length one."""

    layout: Layout
    rows_per_user: int

    @property
    def spec(self) -> StepSpec:
        held = self.layout.image_numbers
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        rows = batch.X[..., : self.layout.image_numbers].astype(np.float64)
        lengths = np.sqrt((rows * rows).sum(axis=2, keepdims=True))
        there = (self.layout.targets(batch.y) >= 0)[..., None]
        rows *= np.where(there & (lengths > 0), 1 / np.where(lengths > 0, lengths, 1), 0)
        return {"sum": Vectors(rows.sum(axis=1) / np.maximum(there.sum(axis=1), 1))}


def centre(run: Run, layout: Layout, rows_per_user: int, mu_squared: float) -> Singles:
    """The mean of all users' features of length one, released for this much of the budget."""
    query = Query(Bound(1.0, layout.image_numbers), mu_squared)
    released = run.release(CENTRE_PAGE, CentreStep(layout, rows_per_user), {"sum": query})["sum"]
    return mean_of(released.value, run.users.facts.users)


def mean_of(total: Array, users: int) -> Singles:
    return (total / users).astype(np.float32)


class Centred(nn.Module):
    """Rows of features, of length one, less a public mean, of length one again."""

    mean: Tensor

    def __init__(self, mean: Singles) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, rows: Tensor) -> Tensor:
        return unit(unit(rows) - self.mean)


class TextSpace(nn.Linear):
    """The directions in which the public texts of a bank differ most: their features less their mean, `dim` principal
    components of them, equally long on average over the bank. Public, and frozen.

    Without `dim` there are MOST_DIRECTIONS at most. Texts of classes cost no more in more directions: what is learned
    has one score for each class, whatever the directions of its texts (`multimodal.closed`).
    """

    def __init__(self, bank: NDArray[Any], dim: int | None = None) -> None:
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
