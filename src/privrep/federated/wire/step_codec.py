"""Local steps as data: a JSON text and arrays by name, from which a node makes the step again. No code travels.

The text is a tree. Numbers, texts, booleans, None and lists are themselves; whatever else is an object of one kind:

  {"class": "module:name", "fields": {...}}   a dataclass of the lists, with all its fields
  {"array": "a0", "strides": [...]}           an array that was sent beside the text; strides where it is not in C order
  {"scalar": "a1"}                            a number of NumPy's, sent as an array without axes
  {"bits": "7ff0000000000000"}                a float that is not finite
  {"tuple": [...]}, {"dict": {...}}
  {"part": {...}}                             a torch module, see `module_codec`

Formal guarantee, whatever the text says:
* `decode` imports nothing but modules of the lists in `travelling`.
* It calls nothing but the constructors of their dataclasses and of the layers in `module_codec`.
* It raises nothing but InputError.
* Fields have the types, and arrays the numbers of axes, that the dataclasses declare.
* Steps are for rows such as the node's, if `decode` was told of them.
* So a decoded step makes of each user's rows one contribution, a function of these rows alone.
* What `encode` wrote is read as it was, to the last bit. That includes the order of arrays in memory, by which products
  round.
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
    """Return a step as a text and the arrays it names; the same for the same step.

    InputError says if the step is on no list, or holds something that cannot be sent.
    """
    arrays: Arrays = {}
    if name_of(step) not in STEPS:
        raise _make_send_error(step)
    return json.dumps(_write_value(step, arrays, 0), allow_nan=False, separators=(",", ":")), arrays


def decode(text: str, arrays: Mapping[str, NDArray[Any]], features: int | None = None, targets: int = 1) -> Step:
    """Return the step that `encode` was given; raise InputError for whatever is wrong with what was sent.

    Steps for other rows could lay rows of different users over each other, and are refused. That takes the shape of the
    node's rows; without it the sender is trusted.

    Args:
        text: the step's tree.
        arrays: the arrays that the text names.
        features: how many numbers rows have on this node; None if that is not known.
        targets: how many targets rows have on this node.
    """
    try:
        if len(arrays) > MOST_ARRAYS:
            raise _make_error(f"it has {len(arrays):,} arrays, and the most is {MOST_ARRAYS:,}")
        reader = _Reader(dict(arrays), features)
        step = reader.read(json.loads(text, object_pairs_hook=_refuse_repeats, parse_constant=_refuse_constant), 0)
        if name_of(step) not in STEPS:
            raise _make_error("it is no step that a node knows")
        _check_targets(step, targets)
        if name_of(step) in TABLE_STEPS:
            _check_width(arrays, WIDEST if features is None else max(features, WIDEST))
        if reader.arrays:
            raise _make_error(f"the array {_shorten(next(iter(reader.arrays)))} was sent and is named nowhere")
        return step
    except InputError:
        raise
    except RecursionError:
        raise _make_depth_error() from None
    except Exception as error:  # a parser's, or a constructor's
        raise _make_error(f"it has a {type(error).__name__}") from None


def _check_width(arrays: Mapping[str, NDArray[Any]], most: int) -> None:
    """Raise InputError for a matrix far wider than rows are: it would make a node's memory depend on rows."""
    if any(array.ndim > 1 and max(array.shape) > most for array in arrays.values()):
        raise _make_error(f"it has a matrix of more than {most:,} rows or columns")


def _check_targets(step: Any, targets: int) -> None:
    """Raise InputError if a step, or one that it holds, cannot take rows with this number of targets."""
    if targets > 1 and not travelling.takes_several_targets(name_of(step)):
        raise _make_error(f"it is for rows with one target, and rows have {targets:,} here")
    if name_of(step) == ENCODED:
        _check_classes(step.classes)
        _check_targets(step.step, step.classes if step.classes > 2 else 1)
    elif name_of(step) == LABEL_RESIDUAL:
        _check_targets(step.step, step.loss.outputs)
    elif name_of(step) in INNER_STEPS:  # it hands users' targets on as they are
        _check_targets(step.step, targets)


def _check_classes(classes: int) -> None:
    """Raise InputError unless there are between 2 and MOST_CLASSES classes."""
    if not 2 <= classes <= MOST_CLASSES:
        raise _make_error(f"it is of {classes:,} classes, and there are 2 to {MOST_CLASSES:,}")


def _make_error(what: str) -> InputError:
    """Return the error that says why a step that was sent cannot be used."""
    return InputError(f"the local step that was sent cannot be used: {what}. Ask its sender for one of this version.")


def _make_depth_error() -> InputError:
    """Return the error for a step that is nested too often."""
    return _make_error(f"it is nested more than {MOST_NESTED} times")


def _shorten(text: object) -> str:
    """Return a text in ASCII, 60 characters at most, for error sentences."""
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _make_send_error(value: object) -> InputError:
    """Return the error for a value that is on no list."""
    return InputError(
        f"a local step with a {type(value).__module__}.{type(value).__qualname__} cannot be sent to nodes. Use a "
        "method whose steps are on the list of privrep.federated.wire.travelling."
    )


def _write_value(value: Any, arrays: Arrays, depth: int) -> Any:
    """Return a value as a JSON tree, and put its arrays beside it.

    Args:
        value: a step, or a part of one.
        arrays: where arrays are put, by name.
        depth: how many values this one lies within.
    """
    if depth > MOST_NESTED:
        raise InputError(f"a local step nested more than {MOST_NESTED} times cannot be sent to nodes.")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"bits": struct.pack(">d", value).hex()}
    if type(value) is np.ndarray:
        return _write_array(value, arrays)
    if isinstance(value, np.generic) and value.dtype in DTYPES:
        return {"scalar": _put(np.asarray(value), arrays)}
    if type(value) is list:
        return [_write_value(each, arrays, depth + 1) for each in value]
    if type(value) is tuple:
        return {"tuple": [_write_value(each, arrays, depth + 1) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _write_value(each, arrays, depth + 1) for key, each in value.items()}}
    name = name_of(value)
    if not name:
        raise _make_send_error(value)
    if name == PART:
        from privrep.federated.wire import module_codec as modules

        return {"part": modules.write_module(value.module, lambda array: _write_array(array, arrays))}
    fields = {each: _write_value(getattr(value, each), arrays, depth + 1) for each in travelling.fields_of(name)}
    return {"class": name, "fields": fields}


def _write_array(value: NDArray[Any], arrays: Arrays) -> dict[str, Any]:
    """Return the JSON that names an array, with its strides where it is not in C order."""
    if value.dtype not in DTYPES:
        raise InputError(
            f"a local step with an array of {value.dtype} cannot be sent to nodes. Use float64 or float32."
        )
    written: dict[str, Any] = {"array": _put(np.asarray(value, order="C"), arrays)}
    strides = [stride // value.itemsize for stride in value.strides]
    if not value.flags.c_contiguous and _measure_spread(value.shape, strides) is not None:
        written["strides"] = strides
    return written


def _put(value: NDArray[Any], arrays: Arrays) -> str:
    """Put an array beside the text, and return its name."""
    name = f"a{len(arrays)}"
    arrays[name] = value
    return name


def _measure_spread(shape: tuple[int, ...], strides: list[int]) -> int | None:
    """Return over how many numbers of memory an array with these strides lies.

    None says that some numbers would coincide, or that they would lie very far apart.

    Args:
        shape: of the array.
        strides: for each axis, in numbers.
    """
    end = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1 and stride <= end:
            return None
        end += stride * (length - 1)
    return end + 1 if end < max(MOST_SPREAD, 64 * math.prod(shape)) else None


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict; raise InputError if a name comes twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _make_error("it has the same name twice")
    return found


def _refuse_constant(name: str) -> float:
    """Raise InputError for a number that JSON does not have, NaN for example."""
    raise _make_error(f"it has {name} for a number")


@dataclass
class _Reader:
    """Reads a tree. Every array is named once, and is taken from the arrays that are left."""

    arrays: Arrays
    features: int | None

    def read(self, tree: Any, depth: int) -> Any:
        """Return the value that a tree describes; raise InputError for a tree that describes none."""
        if depth > MOST_NESTED:
            raise _make_depth_error()
        if tree is None or type(tree) in (bool, int, float, str):
            return tree
        if type(tree) is list:
            return [self.read(each, depth + 1) for each in tree]
        match tree:
            case {"class": str(name), "fields": dict(fields), **rest} if not rest:
                return self._read_dataclass(name, fields, depth)
            case {"array": str(name), **rest} if rest.keys() <= {"strides"}:
                return self.read_array(tree)
            case {"scalar": str(name), **rest} if not rest:
                value = self._take(name)
                if value.ndim:
                    raise _make_error(f"the array {_shorten(name)} is not one number")
                return value[()]
            case {"bits": str(bits), **rest} if not rest and len(bits) == 16:
                return struct.unpack(">d", bytes.fromhex(bits))[0]
            case {"tuple": list(several), **rest} if not rest:
                return tuple(self.read(each, depth + 1) for each in several)
            case {"dict": dict(several), **rest} if not rest:
                return {key: self.read(each, depth + 1) for key, each in several.items()}
            case {"part": dict(layer), **rest} if not rest:
                from privrep.federated.wire import module_codec as modules

                return class_of(PART)(modules.read_module(layer, self.read_array, MOST_NESTED - depth))
        raise _make_error(f"it has an object with {_shorten(sorted(tree))}")

    def read_array(self, tree: Any) -> NDArray[Any]:
        """Return the array that a tree names, in fresh memory and laid out as it was."""
        if type(tree) is not dict or not {"array"} <= tree.keys() <= {"array", "strides"}:
            raise _make_error("it has no array where one belongs")
        value = self._take(tree["array"])
        if "strides" not in tree:
            return value
        strides = tree["strides"]
        fits = type(strides) is list and all(type(each) is int for each in strides) and len(strides) == value.ndim
        spread = _measure_spread(value.shape, strides) if fits and value.size else None
        if spread is None:
            raise _make_error(f"the array {_shorten(tree['array'])} cannot have the strides that were sent")
        first = sum(-stride * (length - 1) for stride, length in zip(strides, value.shape, strict=True) if stride < 0)
        memory = np.empty(spread, value.dtype)[first:]
        laid: NDArray[Any] = np.lib.stride_tricks.as_strided(
            memory, value.shape, [stride * value.itemsize for stride in strides]
        )
        laid[...] = value
        return laid

    def _take(self, name: Any) -> NDArray[Any]:
        """Return the array of this name, and strike it off; raise InputError if there is none left."""
        value = self.arrays.pop(name, None) if type(name) is str else None
        if value is None:
            raise _make_error(f"the array {_shorten(name)} is named and was not sent, or is named twice")
        if type(value) is not np.ndarray or value.dtype not in DTYPES:
            raise _make_error(f"the array {_shorten(name)} is of a kind that steps do not have")
        return np.array(value, order="C")

    def _read_dataclass(self, name: str, fields: dict[str, Any], depth: int) -> Any:
        """Return the dataclass of this name with these fields; raise InputError unless name and fields are allowed."""
        if name not in STEPS and name not in HELD:
            raise _make_error(f"it has a {_shorten(name)}, which no step is made of")
        declared = travelling.fields_of(name)
        if fields.keys() != declared.keys():
            raise _make_error(f"the fields of its {name.partition(':')[2]} are not {', '.join(declared) or 'none'}")
        values = {each: self.read(fields[each], depth + 1) for each in declared}
        for each, value in values.items():
            if not travelling.fits(value, declared[each], name):
                raise _make_error(f"the field {each} of its {name.partition(':')[2]} cannot be what was sent")
        made = class_of(name)(**values)
        if name == LOSS:
            _check_classes(made.classes)
        if name == SPLIT:
            from privrep.federated.wire import module_codec as modules

            modules.check_split(made, self.features)
        if name == STANDARDS and (made.raw < 0 or self.features not in (None, made.raw + len(made.centre))):
            raise _make_error("its standards are of other rows")
        return made
