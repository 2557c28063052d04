"""Pairs whose texts are a few classes: the convex problem, its whitening, its shrinking, and what is charged for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from privrep.errors import InputError  # noqa: E402
from privrep.estimators.clip import DPClip  # noqa: E402
from privrep.multimodal.closed import (  # noqa: E402
    LEAST_KEPT,
    ClosedProblem,
    compute_class_directions,
    compute_kept_share,
    compute_moment_noise,
    estimate_whitening,
)
from privrep.multimodal.encoders import Projection, blank  # noqa: E402
from privrep.multimodal.evaluation import zero_shot  # noqa: E402
from privrep.multimodal.mechanisms.classes import ClosedRows, Whitening  # noqa: E402
from privrep.multimodal.pairs import Pairs, captions_by_class, labelled  # noqa: E402
from privrep.multimodal.towers import Layout, TextSpace, make_towers  # noqa: E402
from privrep.multimodal.training import MOMENT, ClipSettings, choose_settings, is_closed  # noqa: E402
from privrep.privacy.billboard import Release  # noqa: E402
from privrep.privacy.moments import symmetrise  # noqa: E402

FEATURES, TEXT, CLASSES, USERS = 10, 8, 4, 3000
RNG = np.random.default_rng(6)
MEANS = RNG.normal(size=(CLASSES, FEATURES))
CLASS_OF_TEXT = np.repeat(np.arange(CLASSES), 3)
BANK = (RNG.normal(size=(CLASSES, TEXT))[CLASS_OF_TEXT] + 0.1 * RNG.normal(size=(3 * CLASSES, TEXT))).astype(np.float32)


def images(count, seed):
    rng = np.random.default_rng([60, seed])
    labels = rng.integers(0, CLASSES, count)
    return (MEANS[labels] + 0.7 * rng.normal(size=(count, FEATURES))).astype(np.float32), labels


def data(count=USERS, **options):
    return labelled(*images(count, 0), BANK, captions_by_class(CLASS_OF_TEXT), **options)


def made(space=None, **options):
    space = TextSpace(BANK) if space is None else space
    common = {"epsilon": 2.0, "cosine": False, "centre": 0.03, "random_state": 4}
    return DPClip(blank(FEATURES, space.out_features), space, **(common | options))


def accuracy(model):
    X, labels = images(1000, 1)
    return zero_shot(model.images(X), model.texts(BANK), CLASS_OF_TEXT, labels).accuracy


def problem(space, whitening=None, **options):
    model = make_towers(blank(FEATURES, space.out_features), space, FEATURES, TEXT, cosine=False)
    layout = Layout(FEATURES, 0, BANK, CLASS_OF_TEXT)
    whitening = whitening or Whitening(np.zeros((FEATURES, 0)), np.zeros(0), 1.0)
    common = {"steps": 4, "clip": 1.0, "rate": 2.0, "average": 0.5, "temperature": 0.1, "users": 50}
    texts = compute_class_directions(model, layout)
    return ClosedProblem(ClosedRows(layout, None, 1), whitening, texts, **(common | options))


# The default


def test_the_default_learns_classes_and_spends_the_budget_and_no_more():
    model = made().fit(data())
    assert model.settings_.solver == "classes"
    assert model.settings_.moment == MOMENT
    assert accuracy(model) > 0.85
    assert 1.999 < model.privacy_.epsilon <= 2.0
    names = [name for name, _ in model.privacy_.events]
    assert names == ["centre/sum", "moment/moment", "steps-1/gradient"]


def test_a_moment_has_its_share_of_what_a_centre_leaves():
    model = made().fit(data())
    events = dict(model.privacy_.events)
    spent = {name: event.count / event.noise_multiplier**2 for name, event in events.items()}
    centre, moment, steps = spent.values()
    assert centre / sum(spent.values()) == pytest.approx(0.03, rel=1e-3)
    assert moment / (moment + steps) == pytest.approx(MOMENT, rel=1e-3)


def test_few_users_release_no_moment():
    assert made(epsilon=0.1).settings_of(data(50)).moment == 0
    names = [name for name, _ in made(epsilon=0.1).fit(data(50)).privacy_.events]
    assert names == ["centre/sum", "steps-1/gradient"]


def test_users_with_several_pairs_and_no_centre():
    users = np.repeat(np.arange(USERS // 3), 3)
    model = made(centre=0.0, pairs_per_user=3, epsilon=4.0).fit(data(users=users))
    assert accuracy(model) > 0.7


def test_a_space_of_fewer_directions_than_classes_does_what_it_can():
    assert accuracy(made(TextSpace(BANK, 2), epsilon=50.0).fit(data())) > 0.6


def test_a_saved_model_is_the_same_again(tmp_path):
    space = TextSpace(BANK)
    model = made(space).fit(data())
    model.save(tmp_path / "model")
    again = DPClip.load(tmp_path / "model", blank(FEATURES, space.out_features), space)
    assert again.settings_ == model.settings_
    assert np.array_equal(again.images(images(5, 2)[0]), model.images(images(5, 2)[0]))


class StoppedError(Exception):
    pass


def test_a_fit_that_was_stopped_goes_on_and_spends_once(tmp_path):
    def stop(done):
        if done == 6:
            raise StoppedError

    settings = replace(made().settings_of(data()), page=4)
    whole = made(settings=settings).fit(data())
    with pytest.raises(StoppedError):
        made(settings=settings, run_folder=tmp_path, on_step=stop).fit(data())
    again = made(settings=settings, run_folder=tmp_path).fit(data())
    assert np.array_equal(again.weights_, whole.weights_)
    assert (tmp_path / "ledger.jsonl").read_text().count('"charge"') == 5
    assert again.privacy_.epsilon == whole.privacy_.epsilon <= 2.0


# When it is taken


def test_a_start_that_knows_something_and_texts_of_no_class_are_for_descent():
    X, labels = images(30, 0)
    space = TextSpace(BANK)
    free = labelled(X, labels % 2, BANK, [[0, 1], [2]])
    assert free.classes is None
    assert made(space).settings_of(free).solver == "descent"
    known = DPClip(Projection(FEATURES, space.out_features, 1), space, cosine=False)
    assert known.settings_of(data()).solver == "descent"
    assert made(space, cosine=True).settings_of(data()).solver == "descent"
    assert made(space, learn_temperature=True).settings_of(data()).solver == "descent"
    assert made(space).settings_of(data()).solver == "classes"


def test_many_classes_in_few_directions_are_for_descent():
    bank = np.random.default_rng(1).normal(size=(40, TEXT)).astype(np.float32)
    few, many = (
        make_towers(blank(FEATURES, space.out_features), space, FEATURES, TEXT, cosine=False)
        for space in (TextSpace(bank, 3), TextSpace(np.eye(40, TEXT) + bank, 8))
    )
    layout = Layout(FEATURES, 0, bank, np.arange(40))
    assert not is_closed(few, layout)
    assert not is_closed(many, layout)
    assert is_closed(few, Layout(FEATURES, 0, bank, np.arange(40) % 20))
    assert choose_settings("bank", few, 1000, 1.0, 0.1).solver == "descent"


def test_mistakes_are_refused():
    with pytest.raises(InputError, match="everyone"):
        ClipSettings(solver="classes", batch=10)
    with pytest.raises(InputError, match="moment"):
        ClipSettings(solver="classes", moment=1.0)
    settings = ClipSettings(solver="classes", steps=2)
    with pytest.raises(InputError, match="blank"):
        DPClip(Projection(FEATURES, TEXT, 1), Projection(TEXT, TEXT, 2), settings=settings).fit(data(20))
    found = data(20)
    with pytest.raises(InputError, match="every text"):
        Pairs(found.table, FEATURES, 0, BANK, classes=np.arange(3))
    with pytest.raises(InputError, match="numbered"):
        Pairs(found.table, FEATURES, 0, BANK, classes=CLASS_OF_TEXT + 1)


# The arithmetic


def test_weights_give_the_scores_of_classes():
    """Up to what all classes have in common, whatever the space of texts and the whitening."""
    turned = np.linalg.qr(RNG.normal(size=(FEATURES, 3)))[0]
    found = problem(TextSpace(BANK), Whitening(turned, np.array([0.3, 2.0, 5.0]), 1.7))
    value = RNG.normal(size=CLASSES * FEATURES)
    state = found.move(found.start(), Release(value, 1e-9, 1.0, 1e-9))
    weights = state["weights"].reshape(-1, FEATURES)
    rows = RNG.normal(size=(6, FEATURES))
    whitened = found.whitening(torch.tensor(rows, dtype=torch.float32)).numpy()
    wanted = -found.rate / found.users * whitened @ value.reshape(CLASSES, FEATURES).T
    scores = rows @ weights.T @ found.texts.T / found.temperature
    for some in (wanted, scores):
        some -= some.mean(axis=1, keepdims=True)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
    assert scores == pytest.approx(wanted, abs=1e-4)


def test_the_last_weights_are_averaged():
    found, ways = problem(TextSpace(BANK)), []
    state = found.start()
    for step in range(4):
        value = np.random.default_rng(step).normal(size=CLASSES * FEATURES)
        state = found.move(state, Release(value, 1e-9, 1.0, 1e-9))
        ways.append(state["weights"])
    assert state["average"] == pytest.approx((ways[2] + ways[3]) / 2)


def test_parts_that_are_noise_are_shrunk():
    turned = np.eye(FEATURES)[:, :2]
    found = problem(TextSpace(BANK), Whitening(turned, np.ones(2), 1.0))
    total = np.random.default_rng(1).normal(size=(CLASSES, FEATURES))
    total -= total.mean(axis=0)
    total[:, :2] *= 20
    shrunk = found.shrink(total, 1.0)
    assert shrunk[:, :2] == pytest.approx(total[:, :2], rel=0.01)
    assert np.linalg.norm(shrunk[:, 2:]) < 0.5 * np.linalg.norm(total[:, 2:])
    assert compute_kept_share(np.ones(4), 100.0, 4) == LEAST_KEPT
    assert compute_kept_share(np.zeros(4), 1.0, 4) == 1.0


@pytest.mark.parametrize("sigma", [1e-6, 5.0])
def test_a_moment_whitens_what_sticks_out_of_its_noise(sigma):
    features, users = 30, 10_000
    variances = np.r_[0.4, 0.2, np.full(features - 2, 0.4 / (features - 2))]
    turned = np.linalg.qr(np.random.default_rng(2).normal(size=(features, features)))[0]
    moment = users * turned * variances @ turned.T
    noise = sigma * np.random.default_rng(3).normal(size=features**2)
    found = estimate_whitening(Release(moment.ravel() + noise, sigma, 1.0, sigma), features, users)
    after = np.array([np.linalg.norm(found.map_weights(turned[:, [place]].T)) for place in range(features)])
    assert after**2 * variances == pytest.approx(np.ones(features), rel=0.35 if sigma > 1 else 0.2)


def test_a_moment_that_is_noise_alone_whitens_nothing():
    features = 30
    noise = 1e4 * np.random.default_rng(3).normal(size=features**2)
    found = estimate_whitening(Release(noise, 1e4, 1.0, 1e4), features, 100)
    assert found.directions.shape[1] <= 2


def test_the_noise_of_a_moment_is_the_one_said():
    features, users, mu_squared = 60, 500, 0.3
    sigma = math.sqrt(2 / mu_squared)
    noise = sigma * np.random.default_rng(4).normal(size=features**2)
    largest = np.linalg.eigvalsh(symmetrise(noise))[-1] / users
    assert largest == pytest.approx(compute_moment_noise(features, users, mu_squared), rel=0.15)
