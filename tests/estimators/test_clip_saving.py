"""A DP-CLIP model in a folder: it comes back as it was, with its own encoders alone, and a killed fit goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from privrep.errors import InputError, ResumeError  # noqa: E402
from privrep.estimators.clip import DPClip  # noqa: E402
from privrep.models.inspection import inspect_folder  # noqa: E402
from privrep.multimodal.encoders import Projection  # noqa: E402
from privrep.multimodal.pairs import Pairs, captioned, labelled  # noqa: E402
from privrep.multimodal.training import ClipSettings  # noqa: E402

BANK = np.eye(3, 6, dtype=np.float32)


def made_up(users: int = 60) -> Pairs:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, users)
    return labelled((rng.normal(size=(users, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, BANK, [0, 1, 2])


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def small(image: nn.Module | None = None, text: nn.Module | None = None, **options: Any) -> DPClip:
    settings = ClipSettings("bank", steps=5, page=2, rate=0.5, optimiser="sgd", average=0.5)
    given: dict[str, Any] = {"epsilon": 4.0, "random_state": 0, "settings": settings, "cosine": False, **options}
    return DPClip(image or Projection(5, 4, 1), text or frozen(Projection(6, 4, 2)), **given)


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "centred": {"centre": 0.1},
    "both learn, with a temperature": {"text": Projection(6, 4, 2), "learn_temperature": True, "cosine": True},
    "the last weights": {"settings": ClipSettings("bank", steps=3, page=3)},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_model_comes_back_as_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    pairs = made_up()
    model = small(**options).fit(pairs)
    model.save(tmp_path / "m")
    again = DPClip.load(tmp_path / "m", Projection(5, 4, 9), options.get("text") or frozen(Projection(6, 4, 2)))
    rows = pairs.table.X
    np.testing.assert_array_equal(again.images(rows), model.images(rows))
    np.testing.assert_array_equal(again.texts(BANK), model.texts(BANK))
    np.testing.assert_array_equal(again.weights_, model.weights_)
    assert (again.weights_ != small(**options).towers_of(*place(pairs)).weights(0.1)).any()
    assert again.privacy_ == model.privacy_
    assert again.noise_multiplier_ == pytest.approx(model.noise_multiplier_, rel=1e-6)
    assert again.settings_ == model.settings_
    assert (again.delta, again.random_state) == (pytest.approx(1 / 120), 0)


def place(pairs: Pairs) -> tuple[Any, np.ndarray]:
    from privrep.multimodal.towers import layout_of

    return layout_of(pairs), np.zeros(5, np.float32)


def test_other_encoders_are_refused_by_name(tmp_path: Path) -> None:
    small().fit(made_up()).save(tmp_path / "m")
    for image, text, side in (
        (Projection(5, 3, 1), frozen(Projection(6, 4, 2)), "image"),
        (nn.Linear(5, 4), frozen(Projection(6, 4, 2)), "image"),
        (frozen(Projection(5, 4, 1)), frozen(Projection(6, 4, 2)), "image"),
        (Projection(5, 4, 1), frozen(Projection(6, 4, 3)), "text"),
        (Projection(5, 4, 1), Projection(6, 4, 2), "text"),
    ):
        with pytest.raises(InputError, match=f"the {side} encoder of .* pass the one of the fit"):
            DPClip.load(tmp_path / "m", image, text)


class Stopped(Exception):
    pass


def stop_at(step: int) -> Any:
    def told(done: int) -> None:
        if done == step:
            raise Stopped

    return told


def test_a_stopped_fit_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    pairs, folder = made_up(), tmp_path / "run"
    wanted = small(centre=0.1).fit(pairs)
    with pytest.raises(Stopped):
        small(centre=0.1, run_folder=folder, on_step=stop_at(3)).fit(pairs)
    found = inspect_folder(folder)
    assert not found.finished
    assert [spent.name for spent in found.releases] == ["centre/sum", "steps-1/gradient", "steps-2/gradient"]
    with pytest.raises(InputError, match="not finished"):
        DPClip.load(folder, Projection(5, 4, 1), frozen(Projection(6, 4, 2)))
    model = small(centre=0.1, run_folder=folder).fit(pairs)
    np.testing.assert_array_equal(model.weights_, wanted.weights_)
    assert model.privacy_ == wanted.privacy_
    again = DPClip.load(folder, Projection(5, 4, 1), frozen(Projection(6, 4, 2)))
    np.testing.assert_array_equal(again.weights_, wanted.weights_)
    with pytest.raises(InputError, match="finished model"):
        small(centre=0.1, run_folder=folder).fit(pairs)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": ({"epsilon": 5.0}, "config.epsilon"),
    "settings": ({"settings": ClipSettings("bank", steps=6, page=2)}, "config.settings.steps"),
    "start": ({"image": Projection(5, 4, 8)}, "modules.image.all"),
    "frozen": ({"text": frozen(Projection(6, 4, 8))}, "modules.text.all"),
    "seed": ({"random_state": None}, "config.seed"),
    "temperature": ({"temperature": 0.2}, "config.temperature"),
}


@pytest.mark.parametrize(("options", "where"), OTHERS.values(), ids=OTHERS)
def test_another_fit_does_not_go_on_with_a_run(options: dict[str, Any], where: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        small(run_folder=tmp_path / "run", on_step=stop_at(1)).fit(made_up())
    with pytest.raises(ResumeError, match=rf"other settings, weights, texts or users \({where}\)"):
        small(run_folder=tmp_path / "run", **options).fit(made_up())
    with pytest.raises(ResumeError, match="user_count"):
        small(run_folder=tmp_path / "run").fit(made_up(61))
    other = made_up()
    bank = Pairs(other.table, other.image_numbers, 0, BANK + 1, other.unit)
    with pytest.raises(ResumeError, match=r"bank\.hash"):
        small(run_folder=tmp_path / "run").fit(bank)


def test_the_description_says_nothing_of_rows(tmp_path: Path) -> None:
    """Two populations of equal sizes: all that is written is the same, but for pages and their hashes."""
    said = []
    for name, seed in (("a", 1), ("b", 2)):
        rng = np.random.default_rng(seed)
        pairs = captioned(rng.normal(size=(9, 5)), rng.normal(size=(9, 6)), BANK)
        small(text=Projection(6, 4, 2)).fit(pairs).save(tmp_path / name)
        described = json.loads((tmp_path / name / "model.json").read_text())
        lines = [json.loads(line) for line in (tmp_path / name / "ledger.jsonl").read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if key not in ("chain", "says")} for line in lines]
        said.append(({**described, "books": described["books"]["lines"]}, kept))
    assert said[0] == said[1]


def test_a_bank_or_a_centre_that_is_lost_is_explained(tmp_path: Path) -> None:
    small(centre=0.1).fit(made_up()).save(tmp_path / "m")
    for number, (part, change) in enumerate(
        (
            ("model.json", lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "bank": 3}))),
            ("billboard", lambda path: next(path.glob("*centre*")).unlink()),
        )
    ):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "m", copy)
        change(copy / part)
        with pytest.raises(InputError, match=f"{copy}.* is damaged"):
            DPClip.load(copy, Projection(5, 4, 1), frozen(Projection(6, 4, 2)))


def test_inspection_says_unit_mechanism_and_shares(tmp_path: Path) -> None:
    small(centre=0.1).fit(made_up()).save(tmp_path / "m")
    found = inspect_folder(tmp_path / "m")
    assert [(spent.name, spent.remark) for spent in found.releases] == [
        ("centre/sum", ""),
        ("steps-1/gradient", "2 steps"),
        ("steps-2/gradient", "2 steps"),
        ("steps-3/gradient", ""),
    ]
    assert [spent.share for spent in found.releases] == pytest.approx([0.1, 0.36, 0.36, 0.18], rel=1e-4)
    assert all(spent.purpose for spent in found.releases)
    text = "\n".join(line for lines in found.words.values() for line in lines)
    for said in ("public captions of a bank", "a bank of 3 texts", "5 steps", "6 releases so far", "NOT PRIVATE"):
        assert said in text, said
    assert "heads" not in text
    assert found.to_json()["share_spent"] == pytest.approx(1, rel=1e-4)


def test_a_plan_costs_nothing_and_is_what_is_done() -> None:
    pairs, heard = made_up(), []
    model = small(centre=0.1, on_plan=heard.append)
    plan = model.planned(pairs)
    assert not hasattr(model, "ledger_")
    assert model.fit(pairs).noise_multiplier_ == plan.noise_multiplier
    assert heard == [plan]
    assert "60 users, mechanism bank, 5 steps, each asking everyone, noise of " in plan.words


def test_a_fit_in_batches_does_as_planned_and_says_so(tmp_path: Path) -> None:
    pairs, heard = made_up(), []
    settings = ClipSettings("batch", steps=3, page=2, batch=20, sampling="fixed")
    model = small(mechanism="batch", settings=settings, on_plan=heard.append, on_step=lambda done: None)
    model.fit(pairs).save(tmp_path / "m")
    (plan,) = heard
    assert plan.noise_multiplier == model.noise_multiplier_
    assert "60 users, mechanism batch, 3 steps, each asking a secret batch of 20, noise of " in plan.words
    again = DPClip.load(tmp_path / "m", Projection(5, 4, 9), frozen(Projection(6, 4, 2)))
    np.testing.assert_array_equal(again.weights_, model.weights_)
    found = inspect_folder(tmp_path / "m")
    assert sum(spent.share for spent in found.releases) == pytest.approx(found.share_spent)
    assert found.releases[0].share == pytest.approx(2 * found.releases[1].share)
    text = "\n".join(line for lines in found.words.values() for line in lines)
    assert "always the part 0.3333" in text
    assert "twice the clip" in text
