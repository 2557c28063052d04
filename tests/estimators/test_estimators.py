"""The scikit-learn face: conventions, frames, errors, and the estimator checks that apply."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from privrep import (
    CentaurLinear,
    DPFedAvg,
    InputError,
    NothingLearned,
    PrivAltMin,
    PrivateFactorization,
    PrivateFedRep,
    ResumeError,
    UnknownUsers,
)
from privrep.linear.registry import METHODS


def rows(users=300, size=8, features=6, seed=0):
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.normal(size=(features, 2)))[0]
    V = rng.normal(size=(users, 2))
    groups = np.repeat(np.arange(users), size)
    X = rng.normal(size=(users * size, features))
    y = np.einsum("rd,rd->r", X, V[groups] @ U.T) + 3.0 + 0.05 * rng.normal(size=len(X))
    order = rng.permutation(len(X))
    return X[order], y[order], groups[order]


@pytest.fixture(scope="module")
def data():
    return rows()


@pytest.fixture(scope="module")
def fitted(data):
    X, y, groups = data
    return PrivateFedRep(rank=2, epsilon=50.0, delta=1e-6, random_state=1).fit(X, y, groups=groups)


def test_learns_and_reports(fitted, data):
    X, y, groups = data
    assert fitted.representation_.shape == (6, 2)
    assert np.mean((fitted.predict(X, groups=groups) - y) ** 2) < 0.02  # noise variance 0.0025, target variance 11
    report = fitted.privacy_
    assert report.relation == "replace-one-user"
    assert report.epsilon == pytest.approx(50.0, abs=1e-4)
    assert report.epsilon <= 50.0
    assert report.seeded
    assert "SEEDED" in str(report)
    assert len(report.events) > 5


def test_same_seed_same_model_other_seed_other_model(data, fitted):
    X, y, groups = data
    again = clone(fitted).fit(X, y, groups=groups)
    assert np.array_equal(again.representation_, fitted.representation_)
    other = clone(fitted).set_params(random_state=2).fit(X, y, groups=groups)
    assert not np.allclose(other.representation_, fitted.representation_)


@pytest.mark.filterwarnings("ignore::privrep.errors.FittedAgain")
def test_cryptographic_noise_differs_between_fits(data):
    X, y, groups = data
    a, b = (PrivateFedRep(rank=2, epsilon=5.0).fit(X, y, groups=groups) for _ in range(2))
    assert not a.privacy_.seeded
    assert not np.allclose(a.representation_, b.representation_)


def test_order_of_rows_and_kind_of_ids_do_not_matter(data, fitted):
    X, y, groups = data
    sort = np.argsort(groups, kind="stable")
    model = clone(fitted).fit(X[sort], y[sort], groups=groups[sort])
    assert np.allclose(model.representation_, fitted.representation_)
    names = [f"user {g:04d}" for g in groups]
    named = clone(fitted).fit(X, y, groups=names)
    assert np.allclose(named.representation_, fitted.representation_)
    assert np.allclose(named.predict(X, groups=names), fitted.predict(X, groups=groups))
    tuples = [("clinic", int(g)) for g in groups]
    assert np.allclose(
        clone(fitted).fit(X, y, groups=tuples).predict(X, groups=tuples), fitted.predict(X, groups=groups)
    )


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow"])
def test_frames(kind, data, fitted):
    X, y, groups = data
    columns = {f"f{j}": X[:, j] for j in range(X.shape[1])}
    frame, target, users = {
        "pandas": lambda: (pd.DataFrame(columns), pd.Series(y), pd.Series(groups)),
        "polars": lambda: (pl.DataFrame(columns), pl.Series(y), pl.Series(groups)),
        "arrow": lambda: (pa.table(columns), pa.chunked_array([y]), pa.chunked_array([groups])),
    }[kind]()
    model = clone(fitted).fit(frame, target, groups=users)
    assert list(model.feature_names_in_) == list(columns)
    assert np.allclose(model.predict(frame, groups=users), fitted.predict(X, groups=groups))


def test_pipeline(data, fitted):
    X, y, groups = data
    pipe = make_pipeline(FunctionTransformer(lambda X: X * 2.0), clone(fitted))
    pipe.fit(X, y, privatefedrep__groups=groups)
    assert np.mean((pipe.predict(X, groups=groups) - y) ** 2) < 0.02


def test_new_user_gets_a_head_as_good_as_the_others(fitted):
    rng = np.random.default_rng(5)
    U = np.linalg.qr(fitted.representation_)[0]
    v = rng.normal(size=2)
    X = rng.normal(size=(200, 6))
    y = X @ U @ v + 3.0 + 0.05 * rng.normal(size=200)
    head = fitted.personalize(X[:8], y[:8])
    assert head.kind == "posterior"
    assert np.mean((head.predict(X[8:]) - y[8:]) ** 2) < 0.02


def test_shift_and_scale_of_the_data_change_the_representation_by_its_units_only(data):
    X, y, groups = data
    plain = PrivateFedRep(rank=2, epsilon=50.0, random_state=1).fit(X, y, groups=groups)
    moved = PrivateFedRep(rank=2, epsilon=50.0, random_state=1).fit(X * 1024 + 512, y * 64 - 7, groups=groups)
    a, b = np.linalg.qr(plain.representation_)[0], np.linalg.qr(moved.representation_)[0]
    assert np.linalg.norm(b - a @ (a.T @ b), 2) < 0.05  # sine of the largest angle; the noise alone leaves about 0.01
    assert np.allclose(moved.model_.representation.scale, 1024 * plain.model_.representation.scale)


def test_paper_configuration(data):
    X, y, groups = data
    model = PrivateFedRep.paper(2, epsilon=1.0, random_state=0).fit(X, y, groups=groups)
    assert next(name for name, _ in model.privacy_.events) == "paper-moments/moments"
    assert model.privacy_.epsilon == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(InputError, match="neither intercepts nor feature scales"):
        PrivateFedRep(rank=2, configuration="paper", random_state=0).fit(X, y, groups=groups)
    with pytest.raises(InputError, match="configuration must be one of default, paper"):
        PrivateFedRep(rank=2, configuration="best", random_state=0).fit(X, y, groups=groups)


def test_a_hopeless_fit_says_so():
    X, y, groups = rows(users=30)
    with pytest.warns(NothingLearned, match="not seen to do better than what users can do alone"):
        PrivateFedRep(rank=2, epsilon=0.1, random_state=0).fit(X, y, groups=groups)


def test_rank_auto(data):
    X, y, groups = rows(users=2000)
    assert PrivateFedRep(epsilon=20.0, random_state=0).fit(X, y, groups=groups).rank_ == 2


def test_save_and_load(tmp_path, data, fitted):
    X, _, groups = data
    fitted.save(tmp_path / "model")
    loaded = PrivateFedRep.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(X, groups=groups), fitted.predict(X, groups=groups))
    assert loaded.privacy_ == fitted.privacy_
    assert loaded.get_params() == {**fitted.get_params(), "run_folder": None}
    assert (tmp_path / "model" / "private").stat().st_mode & 0o077 == 0
    assert (tmp_path / "model" / "private" / "heads.parquet").stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="exists already"):
        fitted.save(tmp_path / "model")
    fitted.save(tmp_path / "model", overwrite=True)


def test_public_folder_alone_personalises_and_predicts_everybody_by_the_prior_mean(tmp_path, data, fitted):
    import shutil

    X, y, groups = data
    fitted.save(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "private")
    public = PrivateFedRep.load(tmp_path / "model")
    head = public.personalize(X[groups == 3], y[groups == 3])
    assert np.allclose(head.predict(X[groups == 3]), fitted.predict(X[groups == 3], groups=groups[groups == 3]))
    with pytest.warns(UnknownUsers, match="without its users' heads"):
        found = public.predict(X, groups=groups)
    with pytest.warns(UnknownUsers, match="without a head"):
        assert np.array_equal(found, fitted.predict(X, groups=np.full(len(X), -1)))


def test_run_folder_resumes_and_refuses_other_settings(tmp_path, data, fitted, monkeypatch):
    X, y, groups = data
    from privrep.models import learning

    class Killed(Exception):
        pass

    def kill(page, epsilon):
        if page == "round-2":
            raise Killed

    learn = learning.learn
    monkeypatch.setattr(learning, "learn", lambda *a, **k: learn(*a, **{**k, "on_page": kill}))
    model = clone(fitted).set_params(run_folder=tmp_path / "run")
    with pytest.raises(Killed):
        model.fit(X, y, groups=groups)
    monkeypatch.setattr(learning, "learn", learn)
    with pytest.raises(ResumeError, match="other settings"):
        clone(model).set_params(rank=3).fit(X, y, groups=groups)
    model.fit(X, y, groups=groups)
    assert np.array_equal(model.representation_, fitted.representation_)
    assert model.privacy_.events == fitted.privacy_.events
    with pytest.raises(InputError, match="finished model"):
        clone(model).fit(X, y, groups=groups)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epsilon": 0.0}, "epsilon must be a positive"),
        ({"epsilon": float("nan")}, "epsilon must be a positive"),
        ({"delta": 1.0}, "delta must lie"),
        ({"rank": -1}, "rank must lie between 0"),
        ({"rank": 7}, "rank must lie between 0"),
        ({"rank": 2.5}, "rank must be a whole number"),
        ({"relation": "rows"}, "relation must be one of"),
        ({"random_state": "x"}, "random_state must be None"),
        ({"feature_scale": [1.0]}, "feature_scale must hold 6"),
        ({"feature_scale": [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]}, "feature_scale must hold 6 positive"),
        ({"feature_covariance": np.ones((5, 5))}, "symmetric matrix of 6 x 6"),
        ({"feature_covariance": np.triu(np.ones((6, 6)))}, "symmetric matrix"),
        ({"feature_covariance": np.eye(6), "feature_scale": np.ones(6)}, "leave feature_scale out"),
        ({"start": "best"}, "start must be one of"),
        ({"start": "random", "rank": "auto"}, "give a rank"),
    ],
)
def test_bad_parameters(change, sentence, data):
    X, y, groups = data
    with pytest.raises(InputError, match=sentence):
        PrivateFedRep(**{"rank": 2, "random_state": 0, **change}).fit(X, y, groups=groups)


def test_bad_calls(data, fitted):
    X, y, groups = data
    with pytest.raises(InputError, match="needs groups"):
        PrivateFedRep().fit(X, y)
    with pytest.raises(InputError, match="needs groups"):
        fitted.predict(X)
    with pytest.raises(InputError, match=r"user 99999 .* was not in fit"):
        copy.copy(fitted).set_params(unknown_users="refuse").predict(X[:1], groups=[99999])
    with pytest.raises(InputError, match="one user per row"):
        fitted.predict(X, groups=groups[:5])
    with pytest.raises(InputError, match="one user per observation"):
        PrivateFedRep(random_state=0).fit(X, y, groups=groups[:5])
    with pytest.raises(InputError, match="no user in row 1"):
        PrivateFedRep(random_state=0).fit(X[:2], y[:2], groups=["a", None])
    with pytest.raises(InputError, match=r"X contains infinity .*: column 1 \(\d+\)"):
        PrivateFedRep(random_state=0).fit(np.where(X > 3, np.inf, X), y, groups=groups)


def _rows(X):
    return X.shape[0] if hasattr(X, "shape") else len(np.asarray(X))


class _GroupedByPosition:
    """scikit-learn's checks know nothing of groups: this gives every fifth row to one user."""

    def fit(self, X, y):
        return super().fit(X, y, groups=np.arange(_rows(X)) % 5)

    def predict(self, X):
        return super().predict(X, groups=np.zeros(_rows(X), dtype=int))

    def score(self, X, y, sample_weight=None):
        from sklearn.metrics import r2_score

        return r2_score(y, self.predict(X), sample_weight=sample_weight)


class GroupedFedRep(_GroupedByPosition, PrivateFedRep): ...


class GroupedAltMin(_GroupedByPosition, PrivAltMin): ...


class GroupedCentaur(_GroupedByPosition, CentaurLinear): ...


class GroupedFedAvg(_GroupedByPosition, DPFedAvg): ...


KINDS = (GroupedFedRep, GroupedAltMin, GroupedCentaur, GroupedFedAvg)
GROUPED = [kind(rank=1, epsilon=1e4, random_state=0) for kind in KINDS]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(GROUPED)
def test_scikit_learn_checks(estimator, check):
    """Every check scikit-learn has for regressors, run on the estimators as they are apart from the groups."""
    check(estimator)


@pytest.mark.parametrize("estimator", GROUPED)
def test_sparse_rows_and_several_targets_are_declared_so_that_scikit_learn_checks_them(estimator):
    tags = get_tags(estimator)
    accepts = METHODS[estimator.method].accepts
    assert tags.input_tags.sparse == ("sparse" in accepts)
    assert tags.target_tags.multi_output == ("several targets" in accepts)
    names = {getattr(check, "func", check).__name__ for _, check in estimator_checks_generator(estimator)}
    assert {"check_estimator_sparse_array", "check_estimator_sparse_matrix"} <= names
    assert ("check_regressor_multioutput" in names) == ("several targets" in accepts)
    assert len(names) > 40


def test_sparse_rows_and_several_targets(data):
    X, y, groups = data
    thin = sparse.csr_matrix(np.where(np.abs(X) > 0.7, X, 0.0))
    targets = np.column_stack([y, 1e4 * y + 3])
    model = PrivateFedRep(rank=2, epsilon=100.0, random_state=1).fit(thin, targets, groups=groups)
    predictions = model.predict(thin, groups=groups)
    assert predictions.shape == targets.shape
    assert np.allclose((predictions[:, 1] - 3) / 1e4, predictions[:, 0], atol=0.05)
    head = model.personalize(thin[groups == 3], targets[groups == 3])
    assert np.allclose(head.predict(thin[groups == 3]), predictions[groups == 3])
    assert head.weights.shape == (2, 6)
    assert len(head.kind) == 2


@pytest.mark.parametrize("kind", [PrivAltMin, CentaurLinear, PrivateFactorization])
def test_another_class_cannot_load_it_and_says_which_can(tmp_path, fitted, kind):
    fitted.save(tmp_path / "model")
    with pytest.raises(InputError, match="load it with") as raised:
        kind.load(tmp_path / "model")
    if kind is not PrivateFactorization:
        assert "PrivateFedRep.load" in str(raised.value)
    assert str(raised.value).count(".") <= 3
    assert "\n" not in str(raised.value)


def test_a_model_of_ratings_is_not_one_of_tables(tmp_path):
    rng = np.random.default_rng(0)
    who, what = np.repeat(np.arange(200), 5), rng.integers(0, 4, 1000)
    PrivateFactorization(1, epsilon=50.0, items=range(4), random_state=0).fit(
        who, what, what + rng.normal(size=1000)
    ).save(tmp_path / "model")
    with pytest.raises(InputError, match=r"load it with PrivateFactorization\.load"):
        PrivateFedRep.load(tmp_path / "model")


def test_declared_covariance_and_starts_are_saved(tmp_path, data):
    X, y, groups = data
    model = PrivateFedRep(2, epsilon=50.0, feature_covariance=2 * np.eye(6), start="power-method", random_state=1)
    model.fit(X, y, groups=groups).save(tmp_path / "model")
    loaded = PrivateFedRep.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(X, groups=groups), model.predict(X, groups=groups))
    assert loaded.start == "power-method"
    assert np.array_equal(loaded.feature_covariance, 2 * np.eye(6))
    asked = {name for name, _ in model.privacy_.events}
    assert not {"scales/sizes", "moments/moments"} & asked
    assert "power-1/image" in asked


def test_a_declared_covariance_is_not_for_sparse_rows(data):
    X, y, groups = data
    model = PrivateFedRep(2, epsilon=100.0, feature_covariance=np.eye(6), random_state=0)
    with pytest.raises(InputError, match="declare feature_scale instead"):
        model.fit(sparse.csr_array(X), y, groups=groups)
    model.fit(X, y, groups=groups)
