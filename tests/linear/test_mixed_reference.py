"""The mixed model that the demo compares with: as good as one who knows the population."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.table_references import informed

from privrep.data.synthetic import make_population
from privrep.linear.references import fit_mixed


@pytest.mark.parametrize("rows", [6, (3, 9)])
def test_a_mixed_model_is_near_one_who_knows_the_population(rows: int | tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    truth = make_population(rng, 1500, 4, 1, rows, 1.0, level=5.0, intercept=1.0, common=2.0, between=1.0, context=1.0)
    table = truth.sample(rng)
    best = truth.population_mse(*informed(truth, table))
    assert truth.population_mse(*fit_mixed(table, truth.U)) < 1.02 * best
    assert truth.population_mse(*fit_mixed(table, np.eye(4))) < 1.05 * best
    assert truth.population_mse(*fit_mixed(table, np.eye(4), follow=False)) > 1.02 * best  # levels do follow mean rows


def test_a_mixed_model_without_slopes_of_users_own() -> None:
    rng = np.random.default_rng(1)
    truth = make_population(rng, 800, 3, 0, 5, 1.0, intercept=0.5, common=1.0)
    table = truth.sample(rng)
    found = truth.population_mse(*fit_mixed(table, np.zeros((3, 0))))
    assert found < 1.02 * truth.population_mse(*informed(truth, table))
