"""Data of `experiments.dp_blip_captions`: Flickr8k seen by a frozen network, in parts of public, private and tested.

A photograph is seen in ten places: the map of EfficientNet-Lite0 at 224 pixels, averaged to 3 by 3, and its mean.
Computing that takes ten minutes on one core, once; what is kept in the cache is as private as the photographs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from experiments.dp_clip_data import Sources
from privrep.multimodal.encoders import Encoder, describe_embeddings, efficientnet, features
from privrep.multimodal.pairs import read_flickr8k
from privrep.neural.features import load_efficientnet
from privrep.nn.feature_cache import load_or_compute

Floats = NDArray[np.float32]
SIZE, CELLS, WIDTH = 224, 3, 1280
PLACES = CELLS * CELLS + 1  # the first is the mean of the photograph
TESTED, POOL = 1_000, 2_000  # photographs reported on, and those that may be public
VISIBLE = 256  # numbers of a place that the decoder sees
ALWAYS = 0.1  # the part of a photograph's numbers that is the same for all: what a kind of photographs has in common
SplitName = Literal["plain", "dogs"]
DOGS = re.compile(
    r"\b(dogs?|doggy|doggie|pupp(y|ies)|pups?|canines?|poodles?|terriers?|retrievers?|collies?|dachshunds?|hounds?|"
    r"greyhounds?|labradors?|labs?|husk(y|ies)|pugs?|bulldogs?|beagles?|chihuahuas?|dalmatians?|spaniels?|mutts?|"
    r"rottweilers?|dobermans?|dobermann?s?|boxers?|corgis?|schnauzers?|setters?|whippets?|mastiffs?)\b",
    re.IGNORECASE,
)
PETS = ("dog", "dogs", "puppy", "puppies")  # words that the owner expects, and no public caption of "dogs" says


class Places(nn.Module):
    """Rows of pixels to the features of ten places of each photograph, (rows, PLACES * WIDTH)."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, rows: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.net.head.register_forward_hook(lambda layer, inputs, output: kept.append(output))
        try:
            mean = self.net(rows)
        finally:
            handle.remove()
        cells = adaptive_avg_pool2d(kept[0], CELLS).flatten(2).transpose(1, 2)
        return torch.cat([mean[:, None], cells], dim=1).flatten(1)


def places_encoder() -> Encoder:
    """Return EfficientNet-Lite0 at 224 pixels, frozen, for photographs of 112."""
    plain = efficientnet(size=SIZE, side=112)
    return Encoder(Places(plain.module), plain.numbers, PLACES * WIDTH, plain.prepare, f"{plain.name}, {PLACES} places")


@dataclass(frozen=True, eq=False)
class Seen:
    """Photographs as (n, PLACES, WIDTH), and the captions of each."""

    places: Floats
    captions: tuple[tuple[str, ...], ...]
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[np.int64]) -> Seen:
        chosen = rows.tolist()
        return Seen(
            self.places[rows], tuple(self.captions[row] for row in chosen), tuple(self.ids[row] for row in chosen)
        )


def flickr_seen(sources: Sources) -> Seen:
    """Return all photographs of Flickr8k, from the cache if they are there."""
    data = read_flickr8k(sources.data / "flickr8k")
    encoder = places_encoder()

    def told(done: int) -> None:
        if done % 512 == 0:
            print(f"{done:,} of {len(data):,} photographs", flush=True)

    found = load_or_compute(
        sources.cache / "flickr8k_places.npz",
        describe_embeddings(encoder, data.pixels),
        lambda: features(encoder, data.pixels, told),
    )
    return Seen(found.reshape(len(data), PLACES, WIDTH), data.captions, data.ids)


@dataclass(frozen=True, eq=False)
class Parts:
    """Disjoint photographs, each with all its captions."""

    public: Seen
    private: Seen
    tested: Seen


def parts_of(seen: Seen, name: SplitName, public: int, private: int | None = None) -> Parts:
    """Return the parts of a split, in the order of a hash of the photographs' names.

    Tested and private photographs are the same in all splits, and random. Public ones come from the POOL. In "plain"
    they are its first ones. In "dogs" they are the first of which no caption speaks of a dog, so that private and
    tested photographs are of another kind: a good quarter of those are of dogs.

    Args:
        seen: all photographs.
        name: of the split.
        public: how many photographs are public at most.
        private: how many are private at most; None for all that is left.
    """
    digests = [hashlib.blake2b(f"captions {one}".encode(), digest_size=16).hexdigest() for one in seen.ids]
    order = np.argsort(digests, kind="stable")
    tested, pool, rest = order[:TESTED], order[TESTED : TESTED + POOL], order[TESTED + POOL :]
    if name == "dogs":
        pool = pool[[not any(DOGS.search(text) for text in seen.captions[row]) for row in pool.tolist()]]
    return Parts(seen.take(pool[:public]), seen.take(rest[:private]), seen.take(tested))


@dataclass(frozen=True, eq=False)
class Lens:
    """How photographs are handed on, by public numbers: public photographs' and the network's own."""

    mean: Floats
    map: Floats  # (WIDTH, VISIBLE)
    numbers_mean: Floats
    numbers_map: Floats  # (WIDTH, k)

    def seen(self, places: Floats) -> Floats:
        """Return (n, PLACES, VISIBLE), what the decoder attends to: principal components, of equal size each."""
        return np.asarray((places - self.mean) @ self.map, np.float32)

    def numbers(self, places: Floats) -> Floats:
        """Return (n, k + 1), what a shift is a linear map of: of length one, the last always the same."""
        found = (places[:, 0] - self.numbers_mean) @ self.numbers_map
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        always = np.full((len(found), 1), ALWAYS)
        return np.asarray(np.hstack([found * np.sqrt(1 - ALWAYS**2), always]), np.float32)


def lens_of(public: Seen, k: int) -> Lens:
    """Return components of public photographs, and k directions in which EfficientNet's 1,000 classes differ most.

    The latter see what no public photograph shows, dogs say.
    """
    flat = public.places.reshape(-1, WIDTH)
    mean, whole = flat.mean(0), public.places[:, 0].mean(0)
    values, vectors = np.linalg.eigh(((flat - mean).T @ (flat - mean) / len(flat)).astype(np.float64))
    components = vectors[:, ::-1][:, :VISIBLE] / np.sqrt(values[::-1][:VISIBLE])
    return Lens(mean, np.asarray(components, np.float32), whole, class_directions(k))


def class_directions(k: int) -> Floats:
    """Return (WIDTH, k): principal directions of the classes' weights, as long as classes differ along them."""
    weights = load_efficientnet(SIZE)._fc.weight.detach().numpy()
    _, lengths, directions = np.linalg.svd(weights - weights.mean(axis=0), full_matrices=False)
    return np.asarray(directions[:k].T * lengths[:k], np.float32)
