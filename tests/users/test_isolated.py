"""How long sums may be that somebody else made."""

from __future__ import annotations

import numpy as np
import pytest

from privrep.errors import InputError
from privrep.privacy.bounds import Bound
from privrep.users.isolated import check_sums


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_sum_of_users_who_each_pass_passes(size: int) -> None:
    """Each was measured with rounding, and their sum is, too: else rows could decide whether a node answers."""
    rng = np.random.default_rng(size)
    bound = Bound(0.7, size)
    for users in (2, 3, 10, 1000):
        direction = rng.normal(size=size)
        one = direction / np.linalg.norm(direction) * bound.reach
        while True:  # as long as a single user may be, to the last bit
            try:
                check_sums({"x": bound}, {"x": one}, 1)
                break
            except InputError:
                one = one * (1 - 2.0**-53)
        check_sums({"x": bound}, {"x": users * one}, users)
        check_sums({"x": bound}, {"x": np.sum(np.tile(one, (users, 1)), axis=0)}, users)
        with pytest.raises(InputError, match="longer than"):
            check_sums({"x": bound}, {"x": users * one * (1 + 2.0**-44)}, users)


def test_a_single_user_has_no_room() -> None:
    bound = Bound(0.7, 1)
    check_sums({"x": bound}, {"x": np.array([bound.reach])}, 1)
    with pytest.raises(InputError, match="1 clipped users"):
        check_sums({"x": bound}, {"x": np.array([np.nextafter(bound.reach, 1.0)])}, 1)
