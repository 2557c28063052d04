"""`privrep fit-clip`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.accounts import open_account
from privrep.cli.config import files_are_missing, note_weakness
from privrep.cli.console import Bar, note, progress, say, shout, show, tell, tell_privacy
from privrep.cli.ending import stoppable
from privrep.cli.fit_table import how_to_go_on
from privrep.cli.options import ConfigFile, Population, flag
from privrep.errors import InputError, WeakPrivacy, missing_package

if TYPE_CHECKING:
    from privrep.estimators.clip import ClipPlan, DPClip
    from privrep.estimators.clip_assembly import Prepared
    from privrep.multimodal.sources import Inputs
    from privrep.schema.clip import PairsConfig

_NOT_PRIVATE = "(not private: for your eyes)"


def fit_multimodal(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the model; else output.folder. Continues a stopped fit.")
    ] = None,
    population: Population = None,
    check: Annotated[bool, flag("--check", help="Say what would be done, and spend nothing.")] = False,
) -> None:
    """Learn to match images and texts privately (DP-CLIP)."""
    from privrep.privacy.ledger import Budget
    from privrep.schema.clip import PairsConfig

    asked = PairsConfig.read(config)
    if check and files_are_missing(config, asked):
        return
    folder = out or asked.out
    if folder is None and not check:
        raise InputError("say where the model goes: --out FOLDER, or output.folder in the config.")
    if folder is not None and not check and (folder / "model.json").is_file():
        raise InputError(f"{folder} holds a finished model: use it, or choose another folder and spend another budget.")
    chosen, privacy = population or asked.privacy.population, asked.privacy
    budget = None if privacy.delta is None else Budget(privacy.epsilon, privacy.delta)
    open_account(chosen, "", budget, folder, seeded=privacy.seed is not None)  # no image is read in vain
    with progress() as bar:
        made, test = _prepared(asked, bar)
        if check:
            _say_plan(made.model.planned(made.pairs), asked, made.model, show)
            show("Nothing was spent.")
            return
        assert folder is not None
        made.model.population = chosen
        _fit(made, folder, bar, asked)
    _summarise(made, folder, test)


def _prepared(asked: PairsConfig, bar: Bar) -> tuple[Prepared, Inputs | None]:
    from privrep.multimodal.sources import read_inputs

    try:
        from privrep.estimators.clip_assembly import prepared
    except ModuleNotFoundError as error:
        raise missing_package(f"this needs {error.name}", "multimodal") from None
    inputs, test = read_inputs(asked.data)
    bar.begin("encoding", len(inputs.images))
    return prepared(asked, inputs, bar.at), test


def _fit(made: Prepared, folder: Path, bar: Bar, asked: PairsConfig) -> None:
    from privrep.estimators.clip_assembly import keep_texts

    begun = (folder / "run.json").is_file()

    def on_plan(plan: ClipPlan) -> None:
        if begun:
            note(f"Continuing the run in {folder}: pages that stand are read, and nothing is spent twice.")
        _say_plan(plan, asked, made.model, say)
        bar.begin("training", plan.settings.steps)

    model = made.model
    model.run_folder, model.on_plan, model.on_step = folder, on_plan, bar.at
    with stoppable(lambda: how_to_go_on(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakPrivacy)  # a note said it
        model.fit(made.pairs)
        keep_texts(folder, model.modules[1])


def _say_plan(plan: ClipPlan, asked: PairsConfig, model: DPClip, out: Callable[[str], None]) -> None:
    """Say what is learned and who is protected, and remark on a budget that promises little.

    Args:
        plan: of the fit.
        asked: the configuration.
        model: that learns.
        out: says a sentence.
    """
    several = f"a user, of whom the first {model.pairs_per_user:,} pairs take part"
    unit = "a pair" if asked.data.unit == "pair" else several
    note_weakness(
        plan.budget.epsilon, plan.budget.delta, users=plan.users, unit="pair" if asked.data.unit == "pair" else "user"
    )
    tell(plan=plan.words, unit=asked.data.unit, users=plan.users)
    out(f"Plan: {plan.words}.")
    out(f"The unit of privacy is {unit}; the public texts ({made_of(asked)}) are not protected.")


def made_of(asked: PairsConfig) -> str:
    """Return what the public texts are made of, in words."""
    if asked.data.classes is not None:
        return f"prompts of {len(asked.data.classes):,} classes"
    return "none" if asked.data.bank is None else asked.data.bank.name


def _summarise(made: Prepared, folder: Path, test: Inputs | None) -> None:
    report = made.model.privacy_
    tell_privacy(report)
    say(f"Model: {folder}", model=folder)
    say(f"Privacy: {report}")
    if test is not None:
        words, facts = _measured(made, test)
        say(f"{words} {_NOT_PRIVATE}", not_private=facts)
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {folder} but {folder / 'private'} may be published; cached features may not.")
    say(f"To use it: privrep.estimators.clip_assembly.load(CONFIG.toml). What it means: privrep inspect {folder}")


def _measured(made: Prepared, test: Inputs) -> tuple[str, dict[str, Any]]:
    """Return what test images say of a model: in words, and as numbers."""
    from privrep.estimators.clip_assembly import caption_rows
    from privrep.multimodal.evaluation import retrieval, zero_shot

    images = made.model.images(made.sides.image_rows(test.images))
    if test.labels is not None:
        assert made.class_of_text is not None
        found = zero_shot(images, made.model.texts(made.pairs.bank), made.class_of_text, test.labels)
        words = f"Zero-shot accuracy on {len(images):,} test images: {found.accuracy:.3f}"
        return words, {"test_images": len(images), "zero_shot_accuracy": found.accuracy}
    texts = made.model.texts(caption_rows(made.sides, test))
    image_of = range(len(images)) if test.image_of is None else test.image_of
    recall = retrieval(images, texts, image_of)
    both = (recall.image_to_text, recall.text_to_image)
    texts_of, images_of = ("/".join(f"{share:.3f}" for share in found.values()) for found in both)
    words = f"Recall at 1/5/10 on {len(images):,} test images: of texts {texts_of}, of images {images_of}"
    return words, {"test_images": len(images), "recall_of_texts": both[0], "recall_of_images": both[1]}
