"""Local steps as data: a JSON text and arrays by name, from which a node makes the step again. No code travels.

The text is a tree. Numbers, texts, booleans, None and lists are themselves; whatever else is an object of one kind:

  {"class": "module:name", "fields": {...}}   a dataclass of the lists, with all its fields
  {"array": "a0", "strides": [...]}           an array that was sent beside the text; strides where it is not in C order
  {"scalar": "a1"}                            a number of NumPy's, sent as an array without axes
  {"bits": "7ff0000000000000"}                a float that is not finite
  {"tuple": [...]}, {"dict": {...}}
  {"part": {...}}                             a torch module, see `module_codec`

Formal guarantee: whatever the text says, `decode` imports nothing but modules of the lists in `travelling`, calls
nothing but the constructors of their dataclasses and of the layers in `module_codec`, and raises nothing but
InputError. Fields have the types, and arrays the numbers of axes, that the dataclasses declare. Steps are for rows such
as the node's, so that a step which `decode` made, told of the node's rows, makes of each user's one contribution, a
function of those. What `encode` wrote is read as it was, to the last bit, the order of arrays in memory included, by
which products round.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.categories import MOST_CLASSES
from privrep.errors import InputError
from privrep.federated.wire import travelling
from privrep.federated.wire.travelling import (
    ENCODED,
    HELD,
    INNER_STEPS,
    LABEL_RESIDUAL,
    LOSS,
    PART,
    SPLIT,
    STANDARDS,
    STEPS,
    TABLE_STEPS,
    class_of,
    name_of,
)
from privrep.privacy.protocol import Step

WIDEST = 4096  # a matrix of a table's step, where rows are not wider
DTYPES = frozenset(np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))
MOST_NESTED, MOST_ARRAYS = 40, 1024
MOST_SPREAD = 1 << 20  # numbers of memory over which the numbers of a small array may lie

Arrays = dict[str, NDArray[Any]]


def encode(step: Step) -> tuple[str, Arrays]:
    """The step as a text and the arrays it names; the same for the same step."""
    arrays: Arrays = {}
    if name_of(step) not in STEPS:
        raise _cannot_be_sent(step)
    return json.dumps(_written(step, arrays, 0), allow_nan=False, separators=(",", ":")), arrays


def decode(text: str, arrays: Mapping[str, NDArray[Any]], features: int | None = None, targets: int = 1) -> Step:
    """The step that `encode` was given. Whatever is wrong with what was sent is an InputError.

    Pass how many features and targets rows have on this node: a step for other rows could lay rows of different users
    over each other, and is refused. Without them the sender is trusted with that.
    """
    try:
        if len(arrays) > MOST_ARRAYS:
            raise _wrong(f"it has {len(arrays):,} arrays, and the most is {MOST_ARRAYS:,}")
        reader = _Reader(dict(arrays), features)
        step = reader.read(json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant), 0)
        if name_of(step) not in STEPS:
            raise _wrong("it is no step that a node knows")
        _check_targets(step, targets)
        if name_of(step) in TABLE_STEPS:
            _check_width(arrays, WIDEST if features is None else max(features, WIDEST))
        if reader.arrays:
            raise _wrong(f"the array {_short(next(iter(reader.arrays)))} was sent and is named nowhere")
        return step
    except InputError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except Exception as error:  # of a parser, or of a constructor
        raise _wrong(f"it has a {type(error).__name__}") from None


def _check_width(arrays: Mapping[str, NDArray[Any]], most: int) -> None:
    """Matrices meet users' rows: one that is far wider than rows are makes what memory a node needs depend on rows."""
    if any(array.ndim > 1 and max(array.shape) > most for array in arrays.values()):
        raise _wrong(f"it has a matrix of more than {most:,} rows or columns")


def _check_targets(step: Any, targets: int) -> None:
    if targets > 1 and not travelling.takes_several_targets(name_of(step)):
        raise _wrong(f"it is for rows with one target, and rows have {targets:,} here")
    if name_of(step) == ENCODED:
        _check_classes(step.classes)
        _check_targets(step.step, step.classes if step.classes > 2 else 1)
    elif name_of(step) == LABEL_RESIDUAL:
        _check_targets(step.step, step.loss.outputs)
    elif name_of(step) in INNER_STEPS:  # it hands users' targets on as they are
        _check_targets(step.step, targets)


def _check_classes(classes: int) -> None:
    if not 2 <= classes <= MOST_CLASSES:
        raise _wrong(f"it is of {classes:,} classes, and there are 2 to {MOST_CLASSES:,}")


def _wrong(what: str) -> InputError:
    return InputError(f"the local step that was sent cannot be used: {what}. Ask its sender for one of this version.")


def _too_deep() -> InputError:
    return _wrong(f"it is nested more than {MOST_NESTED} times")


def _short(text: object) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _cannot_be_sent(value: object) -> InputError:
    return InputError(
        f"a local step with a {type(value).__module__}.{type(value).__qualname__} cannot be sent to nodes. Use a "
        "method whose steps are on the list of privrep.federated.wire.travelling."
    )


def _written(value: Any, arrays: Arrays, depth: int) -> Any:
    if depth > MOST_NESTED:
        raise InputError(f"a local step nested more than {MOST_NESTED} times cannot be sent to nodes.")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"bits": struct.pack(">d", value).hex()}
    if type(value) is np.ndarray:
        return _written_array(value, arrays)
    if isinstance(value, np.generic) and value.dtype in DTYPES:
        return {"scalar": _put(np.asarray(value), arrays)}
    if type(value) is list:
        return [_written(each, arrays, depth + 1) for each in value]
    if type(value) is tuple:
        return {"tuple": [_written(each, arrays, depth + 1) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _written(each, arrays, depth + 1) for key, each in value.items()}}
    name = name_of(value)
    if not name:
        raise _cannot_be_sent(value)
    if name == PART:
        from privrep.federated.wire import module_codec as modules

        return {"part": modules.written(value.module, lambda array: _written_array(array, arrays))}
    fields = {each: _written(getattr(value, each), arrays, depth + 1) for each in travelling.fields_of(name)}
    return {"class": name, "fields": fields}


def _written_array(value: NDArray[Any], arrays: Arrays) -> dict[str, Any]:
    if value.dtype not in DTYPES:
        raise InputError(
            f"a local step with an array of {value.dtype} cannot be sent to nodes. Use float64 or float32."
        )
    written: dict[str, Any] = {"array": _put(np.asarray(value, order="C"), arrays)}
    strides = [stride // value.itemsize for stride in value.strides]
    if not value.flags.c_contiguous and _spread(value.shape, strides) is not None:
        written["strides"] = strides
    return written


def _put(value: NDArray[Any], arrays: Arrays) -> str:
    name = f"a{len(arrays)}"
    arrays[name] = value
    return name


def _spread(shape: tuple[int, ...], strides: list[int]) -> int | None:
    """Over how many numbers of memory an array with these strides lies; None if some coincide, or it is very wide."""
    end = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1 and stride <= end:
            return None
        end += stride * (length - 1)
    return end + 1 if end < max(MOST_SPREAD, 64 * math.prod(shape)) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _wrong("it has the same name twice")
    return found


def _no_constant(name: str) -> float:
    raise _wrong(f"it has {name} for a number")


@dataclass
class _Reader:
    """Reads a tree. Every array is named once, and is taken from those that are left."""

    arrays: Arrays
    features: int | None

    def read(self, tree: Any, depth: int) -> Any:
        if depth > MOST_NESTED:
            raise _too_deep()
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if type(tree) is list:
            return [self.read(each, depth + 1) for each in tree]
        match tree:
            case {"class": str(name), "fields": dict(fields), **rest} if not rest:
                return self._dataclass(name, fields, depth)
            case {"array": str(name), **rest} if rest.keys() <= {"strides"}:
                return self.array(tree)
            case {"scalar": str(name), **rest} if not rest:
                value = self._taken(name)
                if value.ndim:
                    raise _wrong(f"the array {_short(name)} is not one number")
                return value[()]
            case {"bits": str(bits), **rest} if not rest and len(bits) == 16:
                return struct.unpack(">d", bytes.fromhex(bits))[0]
            case {"tuple": list(several), **rest} if not rest:
                return tuple(self.read(each, depth + 1) for each in several)
            case {"dict": dict(several), **rest} if not rest:
                return {key: self.read(each, depth + 1) for key, each in several.items()}
            case {"part": dict(layer), **rest} if not rest:
                from privrep.federated.wire import module_codec as modules

                return class_of(PART)(modules.read(layer, self.array, MOST_NESTED - depth))
        raise _wrong(f"it has an object with {_short(sorted(tree))}")

    def array(self, tree: Any) -> NDArray[Any]:
        """In fresh memory, laid out as it was."""
        if type(tree) is not dict or not {"array"} <= tree.keys() <= {"array", "strides"}:
            raise _wrong("it has no array where one belongs")
        value = self._taken(tree["array"])
        if "strides" not in tree:
            return value
        strides = tree["strides"]
        fits = type(strides) is list and all(type(each) is int for each in strides) and len(strides) == value.ndim
        spread = _spread(value.shape, strides) if fits and value.size else None
        if spread is None:
            raise _wrong(f"the array {_short(tree['array'])} cannot have the strides that were sent")
        first = sum(-stride * (length - 1) for stride, length in zip(strides, value.shape, strict=True) if stride < 0)
        memory = np.empty(spread, value.dtype)[first:]
        laid: NDArray[Any] = np.lib.stride_tricks.as_strided(
            memory, value.shape, [stride * value.itemsize for stride in strides]
        )
        laid[...] = value
        return laid

    def _taken(self, name: Any) -> NDArray[Any]:
        value = self.arrays.pop(name, None) if type(name) is str else None
        if value is None:
            raise _wrong(f"the array {_short(name)} is named and was not sent, or is named twice")
        if type(value) is not np.ndarray or value.dtype not in DTYPES:
            raise _wrong(f"the array {_short(name)} is of a kind that steps do not have")
        return np.array(value, order="C")

    def _dataclass(self, name: str, fields: dict[str, Any], depth: int) -> Any:
        if name not in STEPS and name not in HELD:
            raise _wrong(f"it has a {_short(name)}, which no step is made of")
        declared = travelling.fields_of(name)
        if fields.keys() != declared.keys():
            raise _wrong(f"the fields of its {name.partition(':')[2]} are not {', '.join(declared) or 'none'}")
        values = {each: self.read(fields[each], depth + 1) for each in declared}
        for each, value in values.items():
            if not travelling.fits(value, declared[each], name):
                raise _wrong(f"the field {each} of its {name.partition(':')[2]} cannot be what was sent")
        made = class_of(name)(**values)
        if name == LOSS:
            _check_classes(made.classes)
        if name == SPLIT:
            from privrep.federated.wire import module_codec as modules

            modules.check_split(made, self.features)
        if name == STANDARDS and (made.raw < 0 or self.features not in (None, made.raw + len(made.centre))):
            raise _wrong("its standards are of other rows")
        return made
