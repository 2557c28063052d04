"""The parts of a given network that users could share, and those made here: frozen maps and linear heads."""

from __future__ import annotations

import os

from torch import nn

from privrep.errors import InputError
from privrep.neural.checks import check_scores
from privrep.neural.frozen import Frozen, OnProgress, measure
from privrep.neural.models import add_adapters, initialise
from privrep.neural.plan import ADAPTER_RANKS, Options, Share
from privrep.nn.flat_module import FlatModule, try_representation, with_head

_TAKES_IMAGES = "it takes images, and what is trained takes rows"


def offer(
    representation: nn.Module,
    head: nn.Module | None,
    features: int,
    public: Options,
    *,
    pretrained: bool,
    share: Share,
    frozen: Frozen | None,
) -> Options:
    """Return what users could share of a network; raise InputError if it cannot be used as asked.

    A pretrained network that cannot be trained (it has BatchNorm, it takes images) may still stay as it is: then a
    plan shares what is learned on its outputs. Where its weights would be trained, it is refused.

    Args:
        representation: the network.
        head: its head; None for a linear one.
        features: numbers of a row.
        public: what could be shared without the network.
        pretrained: whether the network may stay as it is.
        share: what is asked for.
        frozen: the network as a public map, where that is what heads and linear layers see.
    """
    stays = pretrained and share not in ("all", "adapters")
    found = Options(public.classes, public.features if frozen is None else frozen.size, frozen=frozen is not None)
    try:
        if stays and frozen is not None and len(frozen.shape) > 1:
            raise InputError(_TAKES_IMAGES)
        middle = try_representation(representation, features)
    except InputError as error:
        if stays:
            return Options(found.classes, found.features, frozen=found.frozen, untrained=_first_sentence(error))
        raise InputError(f"{error}{_hint(representation, pretrained)}") from None
    own = linear_head(middle.shape[1], public.classes) if head is None else head
    both = with_head(representation, own, middle, features)
    check_scores(both, public.classes)
    adapters = _adapters(representation) if pretrained else ()
    return Options(found.classes, found.features, both.representation.size, adapters, found.frozen)


def _first_sentence(error: InputError) -> str:
    return str(error).partition(". ")[0].rstrip(".")


def _hint(representation: nn.Module, pretrained: bool) -> str:
    """Return what else can be done with a network that cannot be trained."""
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in representation.modules()):
        return ""
    return f" Or leave its weights as they are: {'' if pretrained else 'pretrained=True and '}share='auto'."


def _adapters(representation: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return (rank, parameters) of each kind of adapters; none where no layer can have one."""
    try:
        return tuple((rank, FlatModule(add_adapters(representation, rank)).size) for rank in ADAPTER_RANKS)
    except InputError:
        return ()


def frozen_map(
    module: nn.Module,
    features: int,
    image: tuple[int, int, int] | None,
    cache: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Frozen:
    """Return a network as a public map of rows, or of images where rows are images and it cannot take rows.

    Args:
        module: the network.
        features: numbers of a row.
        image: (height, width, channels) of rows that are images.
        cache: where features are kept.
        on_progress: told how many rows are done.
    """
    try:
        shape: tuple[int, ...] = (features,)
        size = measure(module, shape, "representation")
    except InputError:
        if image is None:
            raise
        shape = tuple(image)
        size = measure(module, shape, "representation")
    return Frozen(module, type(module).__name__, shape, size, cache, on_progress)


def linear_head(rank: int, classes: int) -> nn.Module:
    """Return a linear head on representations of `rank` numbers; its weights at the start are public."""
    head = nn.Linear(rank, classes)
    initialise(head, "head")
    return head
