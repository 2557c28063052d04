"""Name the kinds of arrays that functions take and return."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Numbers in double precision: whatever is summed, clipped, released or computed from releases."""
Floats = NDArray[Any]
"""Numbers in single or double precision, as users' rows came."""
Singles = NDArray[np.float32]
"""Numbers in single precision: rows and weights of networks."""
Integers = NDArray[np.int64]
