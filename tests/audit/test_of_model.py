"""Settings of an audit of a model: of each kind of release, the costliest that its ledger charged."""

from __future__ import annotations

import pytest

from privrep.audit.of_model import plan_events
from privrep.audit.releases import Settings
from privrep.privacy.events import Batched, Event, Gaussian, Pure, Relation, Sampled, Selection

REPLACE: Relation = "replace-one-user"
WHOLE = Settings(2.0, 1e-6, REPLACE, 64)


@pytest.mark.parametrize(
    ("kind", "cheap", "costly"),
    [
        ("sums", Gaussian(3.0), Gaussian(2.0)),
        ("walks", Gaussian(2.0, count=2), Gaussian(4.0, count=100)),  # mu of 0.7 and 2.5
        ("selections", Selection(9.0, 1e-8), Selection(8.0, 1e-8)),
        ("choices", Pure(0.1), Pure(0.2)),
        ("samples", Sampled(1.0, 0.01, REPLACE, 4), Sampled(2.0, 0.5, REPLACE, 4)),  # about 0.02 and 0.5
        ("samples", Sampled(1.0, 0.1, REPLACE), Sampled(2.0, 0.1, REPLACE, 900)),  # about 0.1 and 1.5
        ("batches", Batched(1.0, 0.01, REPLACE, 4), Batched(2.0, 0.5, REPLACE, 4)),
    ],
)
def test_the_costliest_is_audited_whichever_came_first(kind: str, cheap: Event, costly: Event) -> None:
    """By its mu, or about: the rate times the root of the count, by the noise multiplier. Choices go by epsilon."""
    alone, _ = plan_events([costly], WHOLE)
    assert alone.keys() == {kind}
    assert plan_events([cheap], WHOLE)[0] != alone
    for events in ([cheap, costly], [costly, cheap]):
        assert plan_events(events, WHOLE) == (alone, {})
