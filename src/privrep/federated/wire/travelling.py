"""Classes that may travel to nodes: steps and what they are made of, one line each, and what their fields hold.

Classes declare the rest themselves, where they are defined. Fields declare their types, and arrays their number of axes
(`typing.Axes`). Steps declare whether rows may have several targets (`privacy.protocol.Step`). A class that a step
holds says which protocol it stands for (`fills`).

Formal guarantee:
* A declaration counts for classes of the lists alone, and is read from the class, never from what was sent.
* What is not declared is refused.
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from privrep.errors import InputError
from privrep.privacy.protocol import Step
from privrep.typing import Axes

TABLE_STEPS = (
    "privrep.linear.methods.centaur:HalfLossGradient",
    "privrep.linear.methods.fedavg:ModelUpdate",
    "privrep.linear.methods.private_fedrep:BatchGradient",
    "privrep.linear.methods.private_fedrep:FirstHalfPairs",
    "privrep.users.projected:ProjectedStep",
    "privrep.heads.regression:Preference",
    "privrep.linear.class_steps:ClassGradient",
    "privrep.linear.class_steps:Encoded",
    "privrep.linear.label_steps:LabelGradient",
    "privrep.linear.label_steps:LabelLosses",
    "privrep.linear.label_steps:LabelResidual",
    "privrep.linear.label_steps:LabelTrust",
    "privrep.linear.label_steps:LabelVotes",
    "privrep.linear.families:HeadErrors",
    "privrep.linear.families:HeadLosses",
    "privrep.linear.families:HeadVotes",
    "privrep.linear.methods.lipschitz_selection:LipschitzLosses",
    "privrep.linear.methods.margin_selection:MarginLosses",
    "privrep.linear.methods.priv_altmin:DisjointPairs",
    "privrep.linear.methods.priv_altmin:NormalEquations",
    "privrep.linear.methods.priv_altmin:QuarterEquations",
    "privrep.linear.panel_steps:ColumnSizes",
    "privrep.linear.panel_steps:CommonGradient",
    "privrep.linear.panel_steps:LevelCells",
    "privrep.linear.panel_steps:PanelMoments",
    "privrep.linear.panel_steps:Residual",
    "privrep.linear.rating_steps:ItemPull",
    "privrep.linear.rating_steps:RatedItems",
    "privrep.linear.rating_steps:RatingLevels",
    "privrep.linear.rating_steps:RatingLosses",
    "privrep.linear.rating_steps:RatingPairs",
    "privrep.linear.spreads:HeadSpreads",
    "privrep.linear.steps:FeatureSizes",
    "privrep.linear.steps:Frequencies",
    "privrep.linear.steps:LeaveOneOutGradient",
    "privrep.linear.steps:PairMoments",
    "privrep.linear.steps:PowerStep",
    "privrep.linear.steps:ResidualMoments",
    "privrep.linear.steps:SecondMoments",
)
"""Steps that a node can be asked for of a table: their users have equally many rows."""

NETWORK_STEPS = (
    "privrep.neural.training:MeanRow",
    "privrep.neural.gradient_step:GradientStep",
    "privrep.neural.local_sgd:LocalSgdStep",
    "privrep.neural.class_moments:Scatter",
    "privrep.neural.curvature:FeaturePairs",
    "privrep.neural.curvature:FeatureSquares",
    "privrep.heads.neural:HeadLosses",
    "privrep.neural.rounds:MeasuredStep",
    "privrep.neural.standard_step:StandardStep",
)
"""Steps that a node can be asked for of networks: their calls have a fixed shape."""

STEPS = TABLE_STEPS + NETWORK_STEPS
"""All steps that a node can be asked for."""

HELD = (
    "privrep.linear.nets:RandomNet",
    "privrep.local.losses:Loss",
    "privrep.local.prior:PriorMean",
    "privrep.local.representation:Ratings",
    "privrep.local.transform:FeatureTransform",
    "privrep.local.transform:Projection",
    "privrep.neural.plan:SharingPlan",
    "privrep.neural.standard_step:Coordinates",
    "privrep.neural.standard_step:Standards",
    "privrep.neural.training:SharedPart",
    "privrep.neural.training:PriorHeads",
    "privrep.heads.gradient:HeadFit",
    "privrep.heads.softmax:Candidate",
    "privrep.neural.rounds:Round",
    "privrep.nn.flat_module:Split",
)
"""Classes that steps are made of."""

PART = "privrep.nn.flat_module:FlatModule"  # travels as layers and weights, see `module_codec`
SPLIT = "privrep.nn.flat_module:Split"  # its parts are tried on rows without numbers
STANDARDS = "privrep.neural.standard_step:Standards"  # the scale of the rows that a step gets
ENCODED = "privrep.linear.class_steps:Encoded"  # makes a target of each class
LOSS = "privrep.local.losses:Loss"  # its number of classes is bounded

LABEL_RESIDUAL = "privrep.linear.label_steps:LabelResidual"  # makes a target of each output

INNER_STEPS = {
    ENCODED: TABLE_STEPS,
    "privrep.users.projected:ProjectedStep": TABLE_STEPS,
    "privrep.linear.panel_steps:Residual": TABLE_STEPS,
    LABEL_RESIDUAL: TABLE_STEPS,
    "privrep.neural.rounds:MeasuredStep": NETWORK_STEPS,
    "privrep.neural.standard_step:StandardStep": NETWORK_STEPS,
}
"""The steps that a step can hold, for each step that is made of another."""


def name_of(value: object) -> str:
    """Return the name of a value's class as the lists have it, or an empty text if it is on none."""
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if (name in STEPS or name in HELD or name == PART) and class_of(name) is kind else ""


@cache
def class_of(name: str) -> Any:
    """Return the class that a list has by this name."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@cache
def fields_of(name: str) -> dict[str, Any]:
    """Return the declared types of a listed class's fields, in order.

    Raises:
        TypeError: the class has an array without a number of axes, and cannot be on a list.
    """
    kind = class_of(name)
    if lacking := find_undeclared(kind):
        raise TypeError(f"{name} cannot travel. Declare with privrep.typing.Axes the arrays of {', '.join(lacking)}.")
    return _read_hints(kind)


def find_undeclared(kind: type) -> list[str]:
    """Return the fields of a dataclass that may hold an array and do not declare its number of axes."""
    return [each for each, declared in _read_hints(kind).items() if _has_bare_array(declared)]


def _read_hints(kind: Any) -> dict[str, Any]:
    """Return the declared type of each field of a dataclass, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _has_bare_array(declared: Any) -> bool:
    """Return whether a declared type may hold an array without a declared number of axes."""
    if _read_declared_array(declared) is not None:
        return False
    bare = declared is np.ndarray or get_origin(declared) is np.ndarray
    return bare or any(_has_bare_array(each) for each in get_args(declared))


def _read_declared_array(declared: Any) -> tuple[int, str] | None:
    """Return the number of axes and the kinds of numbers of a declared array, or None if this is not exactly one."""
    if get_origin(declared) is not Annotated:
        return None
    array, *facts = get_args(declared)
    if get_origin(array) is not np.ndarray or len(facts) != 1 or not isinstance(facts[0], Axes):
        return None
    (number,) = get_args(get_args(array)[1]) or (Any,)
    known = isinstance(number, type) and issubclass(number, np.generic)
    return facts[0].count, np.dtype(number).kind if known else "bif"


def takes_several_targets(name: str) -> bool:
    """Return whether a step may be asked of users with several targets a row.

    Any other step could lay users' rows over each other there. The class declares it in its own body. What its bases
    declare, or the steps that it holds, does not count.
    """
    return name in STEPS and vars(class_of(name)).get("several_targets") is True


def fits(value: Any, declared: Any, holder: str) -> bool:
    """Return whether a field may have a value, by its declared type.

    Args:
        value: what was sent for the field.
        declared: the type that the field's class declares.
        holder: the name of that class, as the lists have it.
    """
    array = _read_declared_array(declared)
    if array is not None:  # only the declared kind of numbers: a mask of integers would be a list of places
        return type(value) is np.ndarray and value.ndim == array[0] and value.dtype.kind in array[1]
    origin = get_origin(declared)
    if origin in (Union, types.UnionType):
        return any(fits(value, each, holder) for each in get_args(declared))
    if origin is Literal:
        return type(value) is str and value in get_args(declared)
    if origin is tuple:
        each, *rest = get_args(declared)
        return rest == [...] and type(value) is tuple and all(fits(one, each, holder) for one in value)
    if declared is float:
        return type(value) in (int, float) or isinstance(value, np.floating | np.integer)
    if declared is int:
        return type(value) is int or isinstance(value, np.integer)
    if declared is bool:
        return isinstance(value, bool | np.bool_)
    if declared is Step:
        return name_of(value) in INNER_STEPS[holder]
    return declared is not None and (declared is type(value) or declared is _find_protocol(value))


def list_left_behind(method: object) -> list[str]:
    """Return the names of the steps that a method's file defines and that are on no list: nodes do not know them.

    Args:
        method: one of a registry, whose steps stand in the file of its class.
    """
    module = type(method).__module__
    kinds = [kind for kind in vars(import_module(module)).values() if isinstance(kind, type)]
    steps = [kind for kind in kinds if kind.__module__ == module and {"spec", "__call__"} <= set(_list_members(kind))]
    return sorted(kind.__qualname__ for kind in steps if f"{module}:{kind.__qualname__}" not in STEPS)


def _list_members(kind: type) -> list[str]:
    """Return the names of what a class and its bases define, and of fields without a default."""
    return [name for each in kind.__mro__ for name in (*vars(each), *vars(each).get("__annotations__", ()))]


def check_travels(method: Any) -> None:
    """Raise InputError if a method has steps that no node knows: it would be found out after some budget was spent."""
    if missing := list_left_behind(method):
        raise InputError(
            f"the method {method.name} cannot be federated: nodes do not know its {missing[0]}. Put the step on the "
            "list of privrep.federated.wire.travelling, or choose another method."
        )


def _find_protocol(value: Any) -> type | None:
    """Return the protocol that a held value's class declares in its own body to stand for."""
    found = vars(type(value)).get("fills") if name_of(value) in HELD else None
    return found if isinstance(found, type) else None
