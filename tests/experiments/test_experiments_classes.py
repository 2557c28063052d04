"""The experiments on classes and on writers: what is measured, on populations so small that all can be checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.classes import excess_ratio, read, worst_net, write
from experiments.classes_runs import (
    AT,
    OWN_KINDS,
    TWO,
    NetRow,
    Row,
    Setting,
    alones,
    draw,
    in_place_of,
    outputs_of,
    ratio_with_error,
    safety_net,
)
from experiments.writers_features import FEATURES, public_map, strokes

from experiments import classes_runs, writers, writers_features
from privrep.heads.classification import fit_class_shared
from privrep.heads.fitting import fit_heads
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.references import subspace_distance
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform

SMALL = Setting("small", 60, 8, 2, 15, classes=3, skew=1.0)


def test_representation_in_place_of_another_has_its_prior_and_the_span_asked_for() -> None:
    trial = draw(SMALL, 1)
    model = private_fedrep(trial.run(8.0), SMALL.rank, loss=SMALL.loss)
    oracle = in_place_of(model, 3 * trial.truth.U)
    assert subspace_distance(np.linalg.qr(oracle.matrix)[0], trial.truth.U) < 1e-7
    assert (oracle.precision, oracle.preference) == (model.precision, model.preference)
    same = in_place_of(model, model.matrix)
    np.testing.assert_allclose(same.matrix, model.matrix, atol=1e-12)
    lengths = [np.linalg.svd(one.matrix, compute_uv=False) for one in (oracle, model)]
    np.testing.assert_allclose(*lengths)
    assert model.prior is not None
    along = replace(model, prior=replace(model.prior, factor=2 * model.matrix))  # slopes that differ along U
    turned = in_place_of(along, trial.truth.U).prior
    assert turned is not None
    assert subspace_distance(np.linalg.qr(turned.factor)[0], trial.truth.U) < 1e-7
    np.testing.assert_allclose(np.linalg.svd(turned.factor, compute_uv=False), 2 * lengths[1])


def test_measured_losses_are_those_of_the_population() -> None:
    trial = draw(SMALL, 1)
    truth = trial.truth

    def right(X: np.ndarray, users: np.ndarray) -> np.ndarray:
        return np.log(truth.probabilities(X, users))

    def nothing(X: np.ndarray, users: np.ndarray) -> np.ndarray:
        return np.zeros((len(X), 3))

    measured = trial.measure({"right": right, "nothing": nothing})
    np.testing.assert_allclose(measured["nothing"][0], np.log(3), rtol=1e-6)
    assert (measured["right"][0] < measured["nothing"][0]).all()  # the truth is best for every user
    few = trial.measure({"right": right}, users=7)
    assert len(few["right"][0]) == 7


def test_logistic_regression_alone_is_that_on_all_features() -> None:
    """In the span of a user's rows it is the same, with fewer rows than features or more."""
    for rows in (5, 12):
        trial = draw(replace(SMALL, rows=rows, users=6), 2)
        X, y = (part.astype(np.float64) for part in trial.table.group(np.arange(6), rows))
        signs = SMALL.loss.signs(y)
        fits = [
            fit_class_shared(X, signs, SMALL.loss, np.eye(8), True, precision) for precision in (64.0, 8.0, 1.0, 0.125)
        ]
        best = np.stack([fit.loss for fit in fits]).argmin(axis=0)
        found = alones(trial.table, SMALL.loss)["alone, logistic"]
        for user, which in enumerate(best):
            np.testing.assert_allclose(found.weights[user], fits[which].weights[user], atol=1e-8)
            np.testing.assert_allclose(found.intercepts[user], fits[which].intercept[user], atol=1e-8)


def test_majority_predicts_the_most_frequent_class() -> None:
    trial = draw(SMALL, 3)
    found = alones(trial.table, SMALL.loss)["majority"]
    counts = np.stack([np.bincount(y.astype(int), minlength=3) for y in trial.table.y.reshape(60, 15)])
    chosen = found.intercepts.argmax(axis=1)
    assert (counts[np.arange(60), chosen] == counts.max(axis=1)).all()


def test_ratio_has_the_error_of_its_users() -> None:
    rng = np.random.default_rng(5)
    draws = [ratio_with_error(2 + rng.standard_normal(400), 1 + 0.5 * rng.standard_normal(400)) for _ in range(300)]
    ratios, errors = np.array(draws).T
    # the standard deviation of 300 ratios is known to 4%: five times that, false alarms below 1e-6
    assert np.std(ratios) == pytest.approx(errors.mean(), rel=0.2)


def test_hopeless_budget_is_measured_against_the_best_alone() -> None:
    setting = Setting("hopeless", 40, 8, 2, 10)
    row = safety_net(setting, 0.1, 1)
    trial = draw(setting, 1)
    measured = trial.measure({name: one.outputs for name, one in alones(trial.table, setting.loss).items()})
    assert row.best_log_loss == pytest.approx(min(measured[name][0].mean() for name in OWN_KINDS))
    assert row.best_error == pytest.approx(min(measured[name][1].mean() for name in OWN_KINDS))
    assert row.log_loss_ratio == pytest.approx(row.log_loss / row.best_log_loss)
    assert worst_net([row, replace(row, log_loss_ratio=9.0)])[0].log_loss_ratio == 9.0


def test_excess_is_a_ratio_of_sums_over_seeds(tmp_path: Path) -> None:
    rows = [
        Row(TWO.name, method, epsilon, seed, 0.5, 0.2, excess=excess)
        for seed, (private, fedrep) in enumerate([(3e-4, 1e-4), (3e-4, 3e-4)])
        for method, epsilon, excess in (("private", AT, private), ("FedRep", None, fedrep), ("private", 0.1, 1.0))
    ]
    ratio, error, each = excess_ratio(rows, "two classes")
    assert ratio == pytest.approx(1.5)
    assert each == pytest.approx([3.0, 1.0])
    assert error == pytest.approx(np.std([1.5e-4, -1.5e-4], ddof=1) / np.sqrt(2) / 2e-4)
    write(tmp_path / "rows.csv", rows)
    assert read(tmp_path / "rows.csv", Row) == rows
    assert read(tmp_path / "none.csv", NetRow) == []


def test_public_map_sees_no_data_and_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers_features, "STROKES", 300)
    images = (255 * strokes(np.random.default_rng(9), 5)).astype(np.uint8)
    first, again = public_map()(images), public_map()(images[:2])
    assert first.shape == (5, FEATURES)
    np.testing.assert_allclose(first[:2], again, rtol=1e-4, atol=1e-4)
    assert 0.3 < float(np.sqrt((first**2).mean())) < 3  # strokes like those it was made from: about one


def made_up_digits(writers_count: int, rows: int) -> writers.Digits:
    rng = np.random.default_rng(4)
    label = np.tile(np.arange(rows) % 10, writers_count)
    features = rng.standard_normal((writers_count * rows, FEATURES)).astype(np.float32)
    features[np.arange(len(label)), label] += 4
    return writers.Digits(features, label.astype(np.float32), np.repeat(np.arange(writers_count), rows) * 7)


def test_split_tests_on_rows_that_were_not_labelled() -> None:
    digits = made_up_digits(6, 30)
    found = writers.split(digits, 10, seed=1)
    assert found.table.sizes.tolist() == [10] * 6
    assert len(found.test) == 6 * 20
    labelled = {row.tobytes() for row in found.table.X}
    assert not labelled & {row.tobytes() for row in digits.features[found.test]}
    assert writers.split(digits, 26, seed=1).table.n_users == 0  # four rows are too few to test on
    assert writers.split(digits, 40, seed=1, whole=20).table.sizes.tolist() == [20] * 6


def test_every_writer_counts_alike() -> None:
    digits = made_up_digits(3, 30)
    found = writers.split(digits, 10, seed=1)
    uneven = replace(found, test=np.concatenate([found.test[:1], found.test[-20:]]))

    def wrong_for_the_last(X: np.ndarray, users: np.ndarray) -> np.ndarray:
        return np.where(users[:, None] == 2, -8.0, 8.0) * X[:, :10]

    assert uneven.measure(wrong_for_the_last)["writers"] == 2
    assert uneven.measure(wrong_for_the_last)["error"] == pytest.approx(0.5, abs=0.2)


def test_writers_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(writers, "RANK", 2)
    monkeypatch.setattr(writers, "TESTED", 4)
    monkeypatch.setattr(writers, "EPSILONS", (8.0,))
    monkeypatch.setattr(writers, "LABELLED", (5, 10))
    monkeypatch.setattr(classes_runs, "OWN_PRECISIONS", (8.0,))
    rows = list(writers.rows_of(made_up_digits(12, 30), made_up_digits(8, 30), 20, seed=1))
    assert {row.method for row in rows} == {"private", "no noise", "random U", "pooled", *OWN_KINDS}
    groups = {(row.group, row.labelled) for row in rows}
    assert groups == {("training writers", 20), ("new writers", 5), ("new writers", 10)}
    pooled = [row.error for row in rows if row.method == "pooled"]
    assert max(pooled) < 0.1  # digits so clear that one model for all reads them
    write(tmp_path / "writers.csv", rows)
    assert len(read(tmp_path / "writers.csv", writers.Row)) == len(rows)
    writers.draw([*rows, *(replace(row, trained=40) for row in rows)], tmp_path / "writers.png")
    assert (tmp_path / "writers.png").stat().st_size > 10_000


def test_digits_are_read_by_writer() -> None:
    path = writers.default_data() / "test.npz"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    with np.load(path) as file:
        expected = len(np.unique(file["writers"]))
    digits = writers.read_digits(path, public_map())
    assert len(np.unique(digits.writer)) == expected == 297
    new = writers.split(digits, 5, seed=1)
    model = writers.random_model(Representation(np.eye(FEATURES), FeatureTransform.plain(FEATURES), 0.0, precision=1.0))
    heads = fit_heads(new.table.blocks(), model, safety_net=False, loss=writers.DIGITS)
    assert new.measure(outputs_of(heads, model))["error"] < 0.8  # a guess among ten is wrong nine times
