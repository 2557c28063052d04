"""What is said about heads with a prior, from released numbers made up here."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from privrep.linear.tails import NORMAL
from privrep.local.prior import QUANTILES, HeadPrior, PriorMean
from privrep.local.representation import Gains, Representation
from privrep.local.transform import FeatureTransform
from privrep.models.description import Columns, Config
from privrep.models.gains import (
    FAMILIES,
    describe_gains,
    describe_heads,
    find_family,
    find_slopes_ratio,
    is_calibrated,
    judge_nothing,
    make_heads_json,
)
from privrep.models.words import TableFacts, make_table_json, make_table_sections
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.report import PrivacyReport

CLEAR = Gains(alone=-0.1, prior_mean=0.2, heads=-0.7, sigma=0.02)
UNCLEAR = Gains(alone=-0.1, prior_mean=0.2, heads=-0.13, sigma=0.02)
LOST = Gains(alone=0.3, prior_mean=0.2, heads=0.1, sigma=0.8)


def learned(
    gains: Gains | None = CLEAR, rank: int = 1, columns: int = 1, slopes: float = 0.0, level_ratio: float = 4.0
) -> Representation:
    """Return a representation of three features, with heads that differ along so many columns."""
    mean = replace(PriorMean.zero(3, 1, True), slopes=slopes * np.array([[0.0], [2.0], [-1.0]]))
    normal = np.array([0.32, 0.67, 1.0, 1.28, 1.64, 1.96, 2.33, 2.58])
    assert len(normal) == len(QUANTILES)
    factor = 2.0 * np.eye(3)[:, :columns]
    prior = HeadPrior(mean, factor, True, level_ratio, np.array([0.25]), normal, 2 * normal, np.array([5.0]))
    transform = FeatureTransform(np.array([1.0, 0.5, 4.0]))
    return Representation(np.eye(3)[:, :rank], transform, 0.01 * rank, prior=prior, gains=gains)


def spent(*names: str) -> PrivacyReport:
    ledger = Ledger(Budget(1.0, 1e-6))
    ledger.charge({name: Gaussian(20.0) for name in names})
    return ledger.report()


JUDGED = spent("families-1/losses", "calibration/tails")
NAMED = Columns("user", ("y",), ("age", "height", "weight"))


def facts(found: Representation, report: PrivacyReport = JUDGED) -> TableFacts:
    return TableFacts("model", True, Config(None, 1.0, 1e-6), NAMED, report, found, 10)


def words(found: Representation, report: PrivacyReport = JUDGED) -> dict[str, str]:
    return {section.heading: "\n".join(section.sentences) for section in make_table_sections(facts(found, report))}


def test_a_clear_gain_is_said_in_numbers() -> None:
    found = learned()
    assert not found.learned_nothing
    assert judge_nothing(found) == ""
    said = describe_gains(found)
    assert "50% smaller (within 2 points) than by its own mean" in said
    assert "45% smaller than by the best that it can do alone" in said
    assert "alone" not in describe_gains(learned(replace(CLEAR, alone=0.1)))


@pytest.mark.parametrize("gains", [UNCLEAR, LOST, replace(CLEAR, heads=0.5)])
def test_what_is_within_noise_of_alone_is_nothing(gains: Gains) -> None:
    found = learned(gains)
    assert found.learned_nothing
    assert "not seen to do better than what users can do alone" in judge_nothing(found)
    assert describe_gains(found).startswith("Nothing is gained for sure")
    assert "found" not in words(found)["The representation"].split("Estimated error")[1]


def test_noise_that_drowns_everything_is_said_without_numbers() -> None:
    assert "lost in the noise" in judge_nothing(learned(LOST))
    assert "3% smaller (within 3.9 points)" in judge_nothing(learned(UNCLEAR))


def test_models_without_gains_keep_their_rule() -> None:
    found = replace(learned(None), error=0.5, prior=None)
    assert found.learned_nothing
    assert "mostly noise" in judge_nothing(found)
    assert "The heads" not in words(found)
    assert "heads" not in make_table_json(facts(found))
    assert not replace(found, error=0.01).learned_nothing


@pytest.mark.parametrize(
    ("rank", "columns", "family"), [(1, 0, 0), (0, 0, 0), (1, 1, 1), (1, 3, 2), (0, 3, 2), (3, 3, 1)]
)
def test_families_and_whether_heads_use_the_representation(rank: int, columns: int, family: int) -> None:
    found = learned(rank=rank, columns=columns)
    assert found.prior is not None
    assert find_family(found, found.prior) == family
    said = words(found)
    about = said["The representation"]
    if family == 0 and not rank:
        assert "Users' slopes were not seen to differ: rank 0." in about
    elif family == 0:
        assert "not seen to differ along it" in about
    elif family == 2:
        assert "in all features" in about
    assert ("Estimated error" in about) == (family == 1)
    assert ("The representation was found" in about) == (family == 1)
    told = make_heads_json(found, NAMED, JUDGED)
    assert told is not None
    assert told["family"] == FAMILIES[family]


def test_words_about_heads_with_a_prior() -> None:
    said = "\n".join(describe_heads(learned(slopes=1.0), NAMED, JUDGED))
    assert "Released losses decided so" in said
    assert "Levels of users differ by 2 times the noise" in said
    assert "Users' own slopes move a row by 2 times the noise" in said
    assert "standard deviation of about 0.5" in said
    assert "A newcomer without rows gets the prior mean" in said
    assert "22% larger (within 4.9 points) than by a user's own mean" in said
    assert "calibrated by a charged release" in said
    assert "The strongest of 3 by the features' scales: weight (-1), height (+2)." in said
    few = "\n".join(describe_heads(learned(level_ratio=math.inf), Columns(), spent("calibration/noise")))
    assert "too few users to compare" in few
    assert "Levels are the users' own" in few
    assert "they take errors to be normal" in few
    assert "Common slopes: none stood out" in few


def test_numbers_for_machines() -> None:
    told = json.loads(json.dumps(make_table_json(facts(learned(slopes=1.0))), allow_nan=False))["heads"]
    assert told["learned"] is True
    assert told["level_ratio"] == 4.0
    assert told["slopes_ratio"] == pytest.approx(4.0)
    assert told["smaller_than_mean"] == pytest.approx(1 - math.exp(-0.7))
    assert told["smaller_than_alone"] == pytest.approx(1 - math.exp(-0.6))
    assert told["nine_in_ten_errors"] == pytest.approx([0.5 * 1.64])
    assert told["nine_in_ten_errors_of_newcomers"] == pytest.approx([0.5 * math.sqrt(5) * 3.28])
    assert told["common_slopes"] == [[0.0, 2.0, -1.0]]
    free = make_heads_json(learned(level_ratio=math.inf), NAMED, JUDGED)
    assert free is not None
    assert free["level_ratio"] is None


def test_strength_of_slopes_is_measured_in_public_coordinates() -> None:
    found = learned(columns=2)
    assert found.prior is not None
    assert find_slopes_ratio(found, found.prior) == pytest.approx(4 * (1.0 + 0.25))
    whitened = replace(found, transform=replace(found.transform, whitening=2 * np.eye(3)))
    assert find_slopes_ratio(whitened, found.prior) == pytest.approx(1.0 + 0.25)
    assert find_slopes_ratio(learned(columns=0), replace(found.prior, factor=np.zeros((3, 0)))) == 0.0


def test_errors_of_unknown_size_are_said_to_be_unknown() -> None:
    found = learned()
    assert found.prior is not None
    found = replace(found, prior=replace(found.prior, noise=np.array([np.inf])))
    said = make_heads_json(found, NAMED, JUDGED)
    assert said is not None
    assert said["noise_deviation"] == said["nine_in_ten_errors"] == said["nine_in_ten_errors_of_newcomers"] == [None]
    json.dumps(said, allow_nan=False)
    assert "not known" in " ".join(describe_heads(found, NAMED, JUDGED))


def test_intervals_are_calibrated_only_by_a_release_that_was_heard() -> None:
    """It is always asked for: where it is lost in noise, quantiles are those of normal errors."""
    found = learned()
    assert found.prior is not None
    assert is_calibrated(found.prior, JUDGED)
    assert not is_calibrated(found.prior, spent("calibration/noise"))
    for lost in (
        replace(found.prior, known=NORMAL),
        replace(found.prior, new=NORMAL),
        replace(found.prior, noise=np.array([np.inf])),
    ):
        assert not is_calibrated(lost, JUDGED)
        said = make_heads_json(replace(found, prior=lost), NAMED, JUDGED)
        assert said is not None
        assert said["intervals_calibrated"] is False
        assert "calibrated by a charged release" not in "\n".join(
            describe_heads(replace(found, prior=lost), NAMED, JUDGED)
        )


def test_a_newcomer_who_gets_no_slopes_has_no_estimate_that_counts_them() -> None:
    """Losses of the prior mean count slopes around users' own means, which newcomers do not have."""
    there = learned(slopes=1.0)
    assert "On the users of the fit its squared error is" in words(there)["The heads"]
    assert there.prior is not None
    for located, estimated in (([1.0, 0.0, 1.0], False), ([0.0, 1.0, 1.0], True)):  # slopes are of the last two
        mean = replace(there.prior.mean, located=np.array(located))
        said = words(replace(there, prior=replace(there.prior, mean=mean)))["The heads"]
        assert ("On the users of the fit its squared error is" in said) == estimated
        assert ("gets a level, and no slopes of features" in said) != estimated
