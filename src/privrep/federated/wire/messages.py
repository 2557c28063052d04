"""Messages between server and nodes: JSON and arrays in one Flower record, made and read strictly.

Down go questions (`Question`): a local step, bounds, and whom to ask.
Up come answers (`Answer`): a clipped sum for each bound, or a noisy one, and the number of users the node joined with.
A node that cannot answer sends one of a few fixed words (`REFUSALS`). The reason is for its own log, because a reason
may quote its rows.

Reading refuses whatever is not exactly of this form, in one sentence and without looking at it twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from safetensors.numpy import load, save

from privrep.boundary import parse_json
from privrep.errors import InputError
from privrep.federated.wire.step_codec import decode, encode
from privrep.privacy.bounds import Bound, LossBound
from privrep.privacy.groups import Group
from privrep.privacy.protocol import Step

RECORD = "privrep"
VERSION = 6  # of the wire: raised whenever a message, or a step in it, is written in another way
MOST_TEXT = 1 << 24  # characters
Arrays = dict[str, NDArray[Any]]
Refusal = Literal["unknown-run", "no-data", "refused", "failed"]
REFUSALS: tuple[str, ...] = get_args(Refusal)


def pack(fields: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> RecordDict:
    """Return JSON fields and named arrays as the content of a message: one record, as each is a request of its own."""
    blob = save({name: np.asarray(array, order="C") for name, array in (arrays or {}).items()})
    text = json.dumps(fields, allow_nan=False)
    return RecordDict({RECORD: ConfigRecord({"version": VERSION, "text": text, "arrays": blob})})


def unpack(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """Return the fields and arrays of a message; raise InputError unless `pack` could have written it."""
    if set(content) != {RECORD} or not isinstance(content[RECORD], ConfigRecord):
        raise InputError("a message holds one record, of privrep; this one is of another kind.")
    record: Any = content[RECORD]
    _check_version(record.get("version", 1))  # version 1 did not say so
    text, blob = record.get("text"), record.get("arrays")
    if set(record) != {"version", "text", "arrays"} or not isinstance(text, str) or not isinstance(blob, bytes):
        raise InputError("a message holds a text and arrays; this one does not.")
    if len(text) > MOST_TEXT:
        raise InputError(f"the text of a message has at most {MOST_TEXT:,} characters; this one has more.")
    try:
        fields, arrays = parse_json(text, finite=True), load(blob)
    except Exception:  # a parser's, which may quote what was sent
        raise InputError("a message is damaged: its text is not JSON, or its arrays cannot be read.") from None
    if not isinstance(fields, dict):
        raise InputError("the text of a message is a JSON object; this one is not.")
    return fields, arrays


def _check_version(version: Any) -> None:
    """Raise InputError if the other side writes messages in another way."""
    if version != VERSION:
        other = version if type(version) is int and 0 < version < 1000 else "an unknown one"
        raise InputError(
            f"server and node speak different versions of privrep's wire: {other} there, {VERSION} here. Install the "
            "same version of privrep on both."
        )


@dataclass(frozen=True)
class Question:
    """One pass over a node's users.

    With `page`, the node answers with noise of its own, charged to its own ledger: `mu_squared` for each statistic.
    `chosen` says which of its users are asked where a sample is; `rate` is the sample's public rate.
    """

    run: str
    number: int
    step: Step
    bounds: Mapping[str, Bound | LossBound]
    group: Group | None = None
    chosen: NDArray[np.bool_] | None = field(default=None, repr=False)
    rate: float = 1.0
    page: str | None = None
    mu_squared: Mapping[str, float] | None = None

    def to_record(self) -> RecordDict:
        """Return the question as the content of a message."""
        text, arrays = encode(self.step)
        fields = {
            "run": self.run,
            "number": self.number,
            "step": text,
            "bounds": {key: _bound_to_json(bound) for key, bound in self.bounds.items()},
            "group": None if self.group is None else [self.group.split, self.group.index, self.group.count],
            "rate": self.rate,
            "page": self.page,
            "mu_squared": None if self.mu_squared is None else dict(self.mu_squared),
        }
        sampled = {} if self.chosen is None else {"members": np.packbits(self.chosen)}
        return pack({**fields, "asked": None if self.chosen is None else len(self.chosen)}, {
            **{f"step.{name}": array for name, array in arrays.items()}, **sampled
        })  # fmt: skip

    @classmethod
    def from_record(cls, content: RecordDict, features: int, targets: int) -> Question:
        """Read a question on a node, which takes nothing on trust: the server may say anything.

        Args:
            content: what came.
            features: how many numbers the node's rows have.
            targets: how many targets they have.
        """
        fields, arrays = unpack(content)
        known = {"run", "number", "step", "bounds", "group", "rate", "page", "mu_squared", "asked"}
        if set(fields) != known:
            raise InputError("a question has other fields than this version of privrep knows.")
        members = None if fields["asked"] is None else _unpack_mask(arrays.pop("members", None), fields["asked"])
        if any(not name.startswith("step.") for name in arrays):
            raise InputError("a question has arrays that belong to nothing.")
        held = {name.removeprefix("step."): array for name, array in arrays.items()}
        step = decode(fields["step"], held, features, targets)
        try:
            return cls(
                _check_text(fields["run"]),
                _check_whole(fields["number"]),
                step,
                {_check_text(key): _bound_from_json(bound) for key, bound in fields["bounds"].items()},
                None if fields["group"] is None else Group(*fields["group"]),
                members,
                _check_rate(fields["rate"]),
                None if fields["page"] is None else _check_text(fields["page"]),
                None
                if fields["mu_squared"] is None
                else {k: _check_number(v) for k, v in fields["mu_squared"].items()},
            )
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"a question is malformed ({type(error).__name__}).") from None


@dataclass(frozen=True)
class Answer:
    """A node's sums and its number of users. Nothing else leaves a node in a round.

    Exact sums are int64, in whole steps of each bound's grid. Noisy ones are float64.
    """

    number: int
    users: int
    sums: Mapping[str, NDArray[Any]]

    def to_record(self) -> RecordDict:
        """Return the answer as the content of a message."""
        return pack({"number": self.number, "users": self.users}, self.sums)

    @classmethod
    def from_record(cls, content: RecordDict) -> Answer:
        """Read an answer on the server, which takes nothing on trust; whoever knows the bounds checks the sums."""
        fields, arrays = unpack(content)
        if set(fields) != {"number", "users"}:
            raise InputError("an answer has a number and a number of users; this one has other fields.")
        if any(array.dtype not in (np.float64, np.int64) or array.ndim != 1 for array in arrays.values()):
            raise InputError("an answer's sums are vectors of int64 or float64; these are not.")
        return cls(_check_whole(fields["number"]), _check_whole(fields["users"]), arrays)


def make_refusal(reason: Refusal) -> RecordDict:
    """Return the content of a message by which a node says that it cannot answer."""
    return pack({"refused": reason})


def read_refusal(content: RecordDict) -> str | None:
    """Return the word of a node that could not answer; None if it did."""
    fields, arrays = unpack(content)
    if "refused" not in fields:
        return None
    if set(fields) != {"refused"} or arrays or fields["refused"] not in REFUSALS:
        raise InputError("a refusal is one of a few words; this one is not.")
    return str(fields["refused"])


def _bound_to_json(bound: Bound | LossBound) -> dict[str, Any]:
    """Return a bound as JSON fields; raise InputError for a function of a whole batch."""
    if isinstance(bound, LossBound):
        return {"candidates": bound.size}
    if bound.terms_per_user is not None:
        raise InputError("functions of a whole batch need all rows in one place; nodes keep theirs.")
    return {"norm": bound.norm, "size": bound.size, "acute": bound.acute}


def _bound_from_json(fields: Mapping[str, Any]) -> Bound | LossBound:
    """Return the bound that JSON fields describe; raise ValueError if they describe none."""
    if set(fields) == {"candidates"}:
        return LossBound(_check_whole(fields["candidates"]))
    if set(fields) != {"norm", "size", "acute"} or not isinstance(fields["acute"], bool):
        raise ValueError("bound")
    return Bound(_check_number(fields["norm"]), _check_whole(fields["size"]), fields["acute"])


def _unpack_mask(packed_bits: NDArray[Any] | None, asked: Any) -> NDArray[np.bool_]:
    """Return which users are asked, (users,), from bits.

    Args:
        packed_bits: eight users a byte, (bytes,).
        asked: how many users there are, as it was sent.
    """
    if not isinstance(asked, int) or packed_bits is None or packed_bits.dtype != np.uint8 or packed_bits.ndim != 1:
        raise InputError("a question about a sample says who is in it, bit by bit; this one does not.")
    if not 0 <= asked <= 8 * len(packed_bits) < asked + 8:
        raise InputError("a question about a sample is about another number of users.")
    return np.unpackbits(packed_bits, count=asked).astype(bool)


def _check_whole(value: Any) -> int:
    """Return a whole number from 0; raise InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InputError(f"a whole number was expected in a message. Got {str(value)[:40]!r} instead.")
    return value


def _check_number(value: Any) -> float:
    """Return a number as a float; raise InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"a number was expected in a message. Got {str(value)[:40]!r} instead.")
    return float(value)


def _check_rate(value: Any) -> float:
    """Return a rate above 0, 1 at most; raise InputError for anything else."""
    if not 0 < _check_number(value) <= 1:
        raise InputError("the rate of a sample lies between 0 and 1; that of a question does not.")
    return float(value)


def _check_text(value: Any) -> str:
    """Return a short text; raise InputError for anything else."""
    if not isinstance(value, str) or not value or len(value) > 200:
        raise InputError("a short text was expected in a message.")
    return value
