"""DP-CLIP from end to end: plain descent without noise and clipping, what is charged, resuming, learning, mistakes."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import runs
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.protocol import EVERYONE
from runs import Silence

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from privrep.errors import InputError, PrivrepError  # noqa: E402
from privrep.estimators import clip as dp_clip  # noqa: E402
from privrep.estimators.clip import DPClip  # noqa: E402
from privrep.multimodal.encoders import Projection, blank  # noqa: E402
from privrep.multimodal.pairs import captioned, labelled  # noqa: E402
from privrep.multimodal.towers import layout_of, make_towers  # noqa: E402
from privrep.multimodal.training import (  # noqa: E402
    CAREFUL,
    LOGIT_NOISE,
    ClipSettings,
    Question,
    choose_settings,
    move_weights,
    plan_step_noise,
    start_state,
    train,
)
from privrep.privacy.bounds import BATCH_SLACK, NORM_SLACK  # noqa: E402
from privrep.privacy.events import Batched, Gaussian, Sampled  # noqa: E402
from privrep.privacy.grid import grid_step  # noqa: E402
from privrep.privacy.sampling import Poisson  # noqa: E402

IMAGE, TEXT, DIM, CLASSES, USERS = 8, 6, 3, 4, 40
RNG = np.random.default_rng(4)
MEANS = RNG.normal(size=(CLASSES, IMAGE))
PROMPTS = np.repeat(RNG.normal(size=(CLASSES, TEXT)), 2, axis=0)
BANK = (PROMPTS + 0.1 * RNG.normal(size=PROMPTS.shape)).astype(np.float32)
CAPTIONS_OF = [[2 * label, 2 * label + 1] for label in range(CLASSES)]
OFTEN = 1e3  # a noise multiplier, where no noise is added


def images(count, seed, spread=0.3):
    rng = np.random.default_rng([50, seed])
    labels = rng.integers(0, CLASSES, count)
    return (MEANS[labels] + spread * rng.normal(size=(count, IMAGE))).astype(np.float32), labels


def of_classes(count=USERS, pairs=1):
    """Users with so many pairs each, of any classes."""
    X, labels = images(count * pairs, 0)
    return labelled(X, labels, BANK, CAPTIONS_OF, np.repeat(np.arange(count), pairs))


def of_captions(count=USERS):
    X, labels = images(count, 1)
    return captioned(X, PROMPTS[2 * labels] + 0.2 * np.random.default_rng(5).normal(size=(count, TEXT)), BANK)


def encoders():
    return Projection(IMAGE, DIM, 1), Projection(TEXT, DIM, 2)


def question(pairs, settings, *, learn=True, slots=1, temperature=0.5):
    model = make_towers(*encoders(), IMAGE, TEXT, learn)
    return Question(model, layout_of(pairs), settings, temperature, slots, pairs.table.n_users)


def run_on(pairs, noise=None, epsilon=3.0, **options):
    return runs.run_on(pairs.table, epsilon, 1e-3, workers=1, noise=noise or Silence(), **options)


def silent(pairs, settings, **options):
    asked = question(pairs, settings, **options)
    return train(run_on(pairs), asked, asked.towers.weights(asked.temperature), OFTEN), asked


def plain_losses(asked, pairs, flat):
    """Of each user the mean loss of its pairs, as one function of all weights."""
    towers_, table, log_scale = asked.towers, pairs.table, flat[-1]
    image, text = flat[: towers_.image.size], flat[towers_.image.size : -1]
    bank = functional.normalize(towers_.text(text, torch.tensor(pairs.bank)))
    losses = []
    for user in range(table.n_users):
        rows = slice(table.offsets[user], min(table.offsets[user + 1], table.offsets[user] + asked.rows_per_user))
        X, y = torch.tensor(table.X[rows]), torch.tensor(table.y[rows], dtype=torch.int64)
        logits = functional.normalize(towers_.image(image, X[:, :IMAGE])) @ bank.T * log_scale.exp()
        losses.append(functional.cross_entropy(logits, y))
    return torch.stack(losses)


def plain_clip_loss(asked, pairs, flat):
    towers_, X = asked.towers, torch.tensor(pairs.table.X)
    u = functional.normalize(towers_.image(flat[: towers_.image.size], X[:, :IMAGE]))
    v = functional.normalize(towers_.text(flat[towers_.image.size : -1], X[:, IMAGE:]))
    logits, own = u @ v.T * flat[-1].exp(), torch.arange(len(X))
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2


def descended(asked, pairs, loss, make, steps):
    """The weights after each step of a plain loop."""
    flat = torch.tensor(asked.towers.weights(asked.temperature), requires_grad=True)
    descent, found = make([flat]), []
    for _ in range(steps):
        descent.zero_grad()
        loss(asked, pairs, flat).mean().backward()
        descent.step()
        found.append(flat.detach().numpy().copy())
    return found


def apart(found, expected, asked):
    """How far from what is expected, relative to how far that is from the start: the latter must be some way."""
    way = np.linalg.norm(expected - asked.towers.weights(asked.temperature))
    return np.linalg.norm(found - expected) / way if way > 0.05 else np.inf


# Training


@pytest.mark.parametrize(("pairs", "slots"), [(1, 1), (4, 3)])
@pytest.mark.parametrize("optimiser", ["sgd", "momentum", "adam"])
def test_without_clipping_and_noise_the_bank_is_plain_descent(optimiser, pairs, slots):
    data = of_classes(12, pairs)
    settings = ClipSettings(steps=5, clip=1e4, rate=0.05, optimiser=optimiser, page=2)
    found, asked = silent(data, settings, slots=slots)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05),
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.05, (0.9, 0.98), 1e-6),
    }[optimiser]
    expected = descended(asked, data, plain_losses, make, 5)[-1]
    assert apart(found, expected, asked) < 1e-3


def test_without_clipping_and_noise_the_batch_is_plain_descent():
    data = of_captions(12)
    settings = ClipSettings("batch", steps=4, clip=1e4, rate=0.2, optimiser="sgd", page=3, chunk=5)
    found, asked = silent(data, settings)
    expected = descended(asked, data, plain_clip_loss, lambda p: torch.optim.SGD(p, 0.2), 4)[-1]
    assert apart(found, expected, asked) < 1e-3


def test_the_last_weights_are_averaged():
    data = of_classes(12)
    settings = ClipSettings(steps=4, clip=1e4, rate=0.2, optimiser="sgd", average=0.5, page=3)
    found, asked = silent(data, settings)
    ways = descended(asked, data, plain_losses, lambda p: torch.optim.SGD(p, 0.2), 4)
    assert apart(found, (ways[2] + ways[3]) / 2, asked) < 1e-3


@pytest.mark.parametrize(("steps", "average", "last"), [(10, 0.9, 9), (10, 1.0, 10), (100, 0.07, 7), (5, 0.01, 1)])
def test_so_many_weights_are_averaged(steps, average, last):
    settings = ClipSettings(steps=steps, average=average, rate=1.0, optimiser="sgd")
    state = start_state(np.zeros(1, np.float32))
    for step in range(steps):
        state = move_weights(state, np.array([-float(step)]), settings)
    weights = np.cumsum(np.arange(steps))
    assert state["average"] == pytest.approx(weights[-last:].mean())


def test_a_sample_is_averaged_by_its_expected_size():
    """Not by its own size, which is a secret."""
    data = of_classes()
    settings = ClipSettings(steps=1, batch=20, clip=1e4, rate=1.0, optimiser="sgd")
    found, asked = silent(data, settings)
    members = Poisson(0.5).sample(Silence().draw_key("steps-1/0")).members(USERS)
    assert members.sum() not in (0, 20, USERS)
    flat = torch.tensor(asked.towers.weights(0.5), requires_grad=True)
    plain_losses(asked, data, flat)[torch.from_numpy(members)].sum().backward()
    expected = asked.towers.weights(0.5) - flat.grad.numpy() / 20
    assert apart(found, expected, asked) < 1e-3


def test_pages_hear_their_steps_and_stand_one_after_the_other():
    data, heard = of_classes(12), []
    run = run_on(data)
    asked = question(data, ClipSettings(steps=5, page=2))
    train(run, asked, asked.towers.weights(0.5), OFTEN, heard.append)
    assert sorted(set(heard)) == [1, 2, 3, 4, 5]
    assert heard == sorted(heard)
    pages = ["steps-1", "steps-2", "steps-3"]
    assert [run.billboard.read_iterated(page).steps for page in pages] == [2, 2, 1]
    assert [event.count for _, event in run.ledger.report().events] == [2, 2, 1]


def test_another_relation_is_refused():
    data = of_captions(6)
    asked = question(data, ClipSettings("batch", steps=1))
    with pytest.raises(InputError, match="replace-one-user"):
        train(run_on(data, relation="add-or-remove-one-user"), asked, asked.towers.weights(0.5), OFTEN)


# What is charged


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize(("mechanism", "sampling"), [("bank", "poisson"), ("batch", "poisson"), ("batch", "fixed")])
def test_noise_is_the_charged_multiplier_times_twice_the_bound(mechanism, sampling, batch):
    """Of the gradient of a batch, too: noise of sigma c has a multiplier of sigma/2, not sigma."""
    data, clip, noise = of_captions(), 0.25, Silence()
    settings = ClipSettings(mechanism, steps=3, batch=batch, sampling=sampling, clip=clip)
    asked = question(data, settings)
    run = run_on(data, noise, 50.0)
    train(run, asked, asked.towers.weights(0.5), 1.7)
    ((_, event),) = run.ledger.report().events
    kind = {("bank", "poisson"): Sampled}.get((mechanism, sampling), Batched)
    assert type(event) is (Gaussian if batch is None else kind)
    sigmas = [sigma * grid_step(clip) for _, sigma, _ in noise.asked]
    slack = NORM_SLACK if mechanism == "bank" else BATCH_SLACK
    assert len(sigmas) == 3
    for sigma in sigmas:
        assert event.noise_multiplier == pytest.approx(sigma / (2 * clip * (1 + slack)), rel=1e-6)
        assert event.noise_multiplier == pytest.approx((sigma / clip) / 2, rel=0.003)
    assert batch is None or event.rate == batch / USERS


@pytest.mark.parametrize(
    ("mechanism", "batch", "sampling"),
    [
        ("bank", None, "poisson"),
        ("bank", 8, "poisson"),
        ("batch", None, "poisson"),
        ("batch", 8, "poisson"),
        ("inside", USERS, "fixed"),
    ],
)
def test_a_plan_spends_the_budget_and_no_more(mechanism, batch, sampling):
    data = of_captions()
    settings = ClipSettings(mechanism, steps=5, batch=batch, sampling=sampling, page=5)
    run, asked = run_on(data, epsilon=2.0), question(data, settings, learn=False)
    multiplier = plan_step_noise(run, settings)
    train(run, asked, asked.towers.weights(0.5), multiplier)
    report = run.ledger.report()
    assert 1.99 < report.epsilon <= 2.0
    assert sum(event.count for _, event in report.events) == 5
    again = compute_epsilon([event for _, event in report.events], 1e-3)
    assert again == pytest.approx(report.epsilon)
    with pytest.raises(PrivrepError, match="budget"):
        train(run, replace(asked, settings=replace(settings, steps=6)), asked.towers.weights(0.5), multiplier)


@pytest.fixture
def planned(monkeypatch):
    """Noise of steps that is said and not planned, which takes a second or two; ledgers look at it all the same."""
    monkeypatch.setattr(dp_clip, "plan_step_noise", lambda *_: 0.3)


def simulated(**options):
    common = {"epsilon": 2.0, "random_state": 3, "settings": ClipSettings(steps=5, rate=0.1, page=2)}
    return DPClip(*encoders(), **(common | options))


def test_the_delta_is_one_over_twice_the_users():
    model = simulated().fit(of_classes(300))
    assert model.privacy_.delta == 1 / 600
    assert model.privacy_.epsilon <= 2.0
    assert model.privacy_.relation == "replace-one-user"
    assert model.privacy_.seeded
    assert "not private" in str(model.privacy_)
    assert simulated(delta=1e-5).fit(of_classes(12)).privacy_.delta == 1e-5


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(("at", "batch"), [(2, None), (3, 10)])
def test_a_fit_that_was_stopped_goes_on_and_spends_once(tmp_path, at, batch, planned):
    """Between two pages, and within one."""
    data, charges, settings = of_classes(), [], ClipSettings(steps=5, batch=batch, rate=0.1, page=2)

    def stop(done):
        if done == at:
            raise StoppedError

    same = {"settings": settings, "epsilon": 200.0}
    whole = simulated(**same).fit(data)
    with pytest.raises(StoppedError):
        simulated(**same, run_folder=tmp_path, on_step=stop).fit(data)
    charges.append((tmp_path / "ledger.jsonl").read_text().count('"charge"'))
    again = simulated(**same, run_folder=tmp_path).fit(data)
    charges.append((tmp_path / "ledger.jsonl").read_text().count('"charge"'))
    assert np.array_equal(again.weights_, whole.weights_)
    assert charges == [at - 1, 3]
    assert again.privacy_.epsilon == whole.privacy_.epsilon <= 200.0
    assert again.privacy_.events == whole.privacy_.events


def test_seeds_decide_simulations_and_nothing_else_does():
    data = of_classes()
    one, two, other = (simulated(random_state=seed).fit(data).weights_ for seed in (3, 3, 4))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    private = simulated(random_state=None).fit(data)
    assert not private.privacy_.seeded
    assert not np.array_equal(private.weights_, one)


# Learning


def accuracy(model):
    X, labels = images(400, 7)
    scores = model.images(X) @ model.texts(PROMPTS[::2]).T
    return float((scores.argmax(axis=1) == labels).mean())


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("bank", {}),
        ("bank", {"batch": 100, "sampling": "fixed"}),
        ("batch", {"batch": 100}),
        ("inside", {"batch": 100, "sampling": "fixed"}),
    ],
)
def test_much_budget_learns_a_toy(mechanism, options, planned):
    """Four classes; chance is a quarter."""
    data = of_classes(400) if mechanism == "bank" else of_captions(400)
    settings = ClipSettings(mechanism, steps=30, rate=0.1, clip=1.0, **options)
    model = DPClip(*encoders(), epsilon=1000.0, mechanism=mechanism, settings=settings, random_state=1)
    start = DPClip(*encoders(), epsilon=30.0, settings=ClipSettings(steps=1, rate=1e-9), random_state=1)
    assert accuracy(model.fit(data)) > 0.8
    assert accuracy(start.fit(data)) < 0.6


def test_users_with_several_pairs_learn_and_a_temperature_is_learned():
    data = of_classes(100, 3)
    settings = ClipSettings(steps=30, rate=0.1, optimiser="adam")
    model = DPClip(
        *encoders(),
        epsilon=300.0,
        settings=settings,
        pairs_per_user=3,
        learn_temperature=True,
        temperature=0.5,
        random_state=1,
    ).fit(data)
    assert accuracy(model) > 0.8
    assert len(model.weights_) == DIM * (IMAGE + TEXT) + 1
    assert model.weights_[-1] > -math.log(0.5) + 0.2  # colder
    assert model.privacy_.delta == 1 / 200


@pytest.mark.parametrize("mechanism", ["bank", "batch", "inside"])
def test_settings_are_chosen_from_public_numbers(mechanism):
    model = make_towers(*encoders(), IMAGE, TEXT)
    for users in (2, 24, 100_000):
        found = choose_settings(mechanism, model, users, 1.0, 0.1)
        assert found.mechanism == mechanism
        assert found.choose_audience(users) == EVERYONE or 2 <= found.batch <= 1024
    assert (found.clip, found.sampling) == {
        "bank": (1.0, "poisson"),
        "batch": (0.1, "poisson"),
        "inside": (1.0, "fixed"),
    }[mechanism]


def test_a_convex_loss_is_descended_on_everyone_as_far_as_the_budget_goes():
    image, text = encoders()
    text.requires_grad_(False)
    for start, noise in ((image, CAREFUL), (blank(IMAGE, int(text(torch.zeros(1, TEXT)).shape[1])), LOGIT_NOISE)):
        model = make_towers(start, text, IMAGE, TEXT, cosine=False)
        small, large = (choose_settings("bank", model, 1000, mu, 0.1) for mu in (0.01, 100.0))
        assert small.choose_audience(1000) == EVERYONE
        assert small.rate < large.rate
        assert small.clip * small.rate * small.steps * 2 / (1000 * 0.01) == pytest.approx(noise * 0.1)
    found = DPClip(image, text, epsilon=20.0, cosine=False, random_state=1).fit(of_classes(400))
    assert accuracy(found) > 0.8
    assert found.settings_.optimiser == "sgd"


def test_features_are_centred_within_the_budget():
    model = simulated(centre=0.1, settings=ClipSettings(steps=3)).fit(of_classes())
    assert [name for name, _ in model.privacy_.events] == ["centre/sum", "steps-1/gradient"]
    assert 1.98 < model.privacy_.epsilon <= 2.0


def test_trained_modules_embed_as_the_model_does():
    image, text = encoders()
    before = image.weight.detach().clone()
    model = DPClip(image, text, epsilon=5.0, settings=ClipSettings(steps=2, rate=0.1), random_state=1).fit(
        of_classes(12)
    )
    assert torch.equal(image.weight, before)  # a fit leaves modules as they were
    X = images(5, 3)[0]
    trained, words = model.trained()
    for found, plain in ((model.images(X), trained(torch.tensor(X))), (model.texts(BANK), words(torch.tensor(BANK)))):
        assert found == pytest.approx(functional.normalize(plain).detach().numpy(), abs=1e-6)
        assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert not torch.equal(trained.weight, before)


# Mistakes


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mechanism": "other"}, "bank, batch or inside"),
        ({"sampling": "some"}, "poisson or fixed"),
        ({"steps": 0}, "whole numbers"),
        ({"steps": 2.5}, "whole numbers"),
        ({"batch": 0}, "whole numbers"),
        ({"batch": 1.5}, "whole numbers"),
        ({"page": True}, "whole numbers"),
        ({"chunk": 0}, "whole numbers"),
        ({"clip": 0.0}, "positive"),
        ({"clip": math.inf}, "finite"),
        ({"rate": math.nan}, "positive"),
        ({"average": 1.5}, "between 0 and 1"),
        ({"betas": (1.0, 0.9)}, "momentum"),
        ({"optimiser": "lion"}, "sgd, momentum or adam"),
        ({"mechanism": "inside", "batch": 4}, "fixed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        ClipSettings(**wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.001}, "temperature must lie"),
        ({"pairs_per_user": 0}, "pairs_per_user"),
        ({"pairs_per_user": 1.5}, "pairs_per_user"),
        ({"mechanism": "batch"}, "settings are for 'bank'"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.5}, "delta"),
        ({"centre": 1.0}, "centre"),
        (
            {"mechanism": "inside", "settings": ClipSettings("inside", batch=4, sampling="fixed"), "cosine": False},
            "two trainable linear projections",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_spent(options, words):
    model = simulated(**options)
    with pytest.raises(InputError, match=words):
        model.fit(of_classes(12))
    assert not hasattr(model, "ledger_")


def test_a_bank_of_one_caption_and_pairs_of_nobody_are_refused():
    X, labels = images(12, 0)
    with pytest.raises(InputError, match="fewer than two public captions"):
        simulated().fit(captioned(X, PROMPTS[labels], BANK[:1]))
    with pytest.raises(InputError, match="no users"):
        simulated().fit(labelled(X[:0], labels[:0], BANK, CAPTIONS_OF))


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = "import sys, privrep, privrep.cli; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
