"""Name the kinds of arrays that functions take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Numbers in double precision: everything that is summed, clipped, released or computed from releases."""
Floats = NDArray[Any]
"""Numbers in single or double precision, as users' rows came."""
Singles = NDArray[np.float32]
"""Numbers in single precision: rows and weights of networks."""
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Axes:
    """Number of axes of the array in a field, as in `Annotated[Array, Axes(2)]`.

    Every array of a step that travels to nodes declares its axes. Nodes refuse an array with another number of axes:
    with one more, a user's rows could count for several users.
    """

    count: int


Vector = Annotated[Array, Axes(1)]
Matrix = Annotated[Array, Axes(2)]
Weights = Annotated[Singles, Axes(1)]
"""Weights of a network, one after the other."""
