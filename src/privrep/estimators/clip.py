"""DP-CLIP: two encoders whose embeddings of an image and its caption meet, learned privately.

model = DPClip(Projection(1280, 16, seed=1), text_encoder, epsilon=1.0).fit(pairs)
zero_shot(model.images(test_rows), model.texts(prompt_rows), class_of_prompt, labels)
print(model.privacy_)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError, needed

with needed("torch", "DPClip needs PyTorch", "torch"):
    from torch import nn

from privrep.models.folder import BILLBOARD, MODEL, ModelFolder
from privrep.models.pairs import PAIRS
from privrep.multimodal.description import SavedPairs, describe, prints_of
from privrep.multimodal.encoders import Encoder
from privrep.multimodal.pairs import Pairs
from privrep.multimodal.towers import Centred, Layout, Towers, centre, layout_of, towers
from privrep.multimodal.training import ClipSettings, Mechanism, Question, planned_multiplier, settings_for, train
from privrep.privacy.ledger import Budget, PrivacyReport
from privrep.privacy.protocol import EVERYONE
from privrep.privacy.run import Run
from privrep.typing import Singles
from privrep.users.memory import InMemoryUsers


@dataclass(frozen=True)
class ClipPlan:
    """What a fit will do: public facts."""

    users: int
    mechanism: Mechanism
    settings: ClipSettings
    budget: Budget
    noise_multiplier: float

    @property
    def words(self) -> str:
        asked = "everyone"
        if self.settings.asked(self.users) != EVERYONE:
            asked = (
                f"a secret batch of {'about ' if self.settings.sampling == 'poisson' else ''}{self.settings.batch:,}"
            )
        share = self.settings.moment
        whitened = f", of which {share:.0%} of what a centre leaves whitens features" if share else ""
        return (
            f"{self.users:,} users, mechanism {self.mechanism}, {self.settings.steps:,} steps, each asking {asked}, "
            f"noise of {self.noise_multiplier:.4g} times what one user can change, for a budget of epsilon "
            f"{self.budget.epsilon:g} at delta {self.budget.delta:.3g}{whitened}"
        )


class DPClip:
    """Contrastive training of two encoders under user-level differential privacy, replace-one-user.

    image_encoder, text_encoder   torch modules from rows to embeddings of one length, or `Encoder`s; what has
                                  requires_grad=False is frozen. Weights at the start are public
    epsilon, delta                the budget; delta is 1/(2 users) if not said
    mechanism                     "bank": contrast with public captions, each user clipped alone; "batch": the paper's,
                                  the gradient of a batch clipped as one; "inside": private negatives, every similarity
                                  clipped by itself
    settings                      of the steps, `training.ClipSettings`; by default chosen from public numbers
    temperature                   of similarities; with `learn_temperature` where it starts
    cosine                        whether an image's embedding counts by its direction alone, as in CLIP
    centre                        the share of the budget (of mu^2) that a mean of the images' features is released for,
                                  which is taken off them: for cached features of a frozen network 0.03 is plenty
    pairs_per_user                of each user the first so many pairs take part: a public number
    random_state                  a seed makes the run a simulation, which is not private and says so
    run_folder                    where charges and pages are kept, so that the same call continues a killed fit
    on_step                       is told how many steps are done
    on_plan                       is told the plan before anything is spent
    """

    def __init__(
        self,
        image_encoder: nn.Module | Encoder,
        text_encoder: nn.Module | Encoder,
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        mechanism: Mechanism = "bank",
        settings: ClipSettings | None = None,
        temperature: float = 0.1,
        learn_temperature: bool = False,
        cosine: bool = True,
        centre: float = 0.0,
        pairs_per_user: int = 1,
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        on_step: Callable[[int], None] | None = None,
        on_plan: Callable[[ClipPlan], None] | None = None,
    ) -> None:
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.epsilon, self.delta = epsilon, delta
        self.mechanism, self.settings = mechanism, settings
        self.temperature, self.learn_temperature, self.cosine = temperature, learn_temperature, cosine
        self.centre, self.pairs_per_user = centre, pairs_per_user
        self.random_state, self.run_folder = random_state, run_folder
        self.on_step, self.on_plan = on_step, on_plan

    def fit(self, pairs: Pairs) -> Self:
        """Learn from users' pairs. All that leaves them is noisy sums, charged to one ledger.

        With a `run_folder`, a fit of the same arguments that was killed is continued: what stands is read, nothing is
        spent twice. Rows are not compared: they must be the same.
        """
        question, budget = self._question(pairs)
        self.described_ = {"format": PAIRS.format, **describe(self, question, budget, pairs.unit)}
        if self.run_folder is not None:
            ModelFolder(Path(self.run_folder)).claim(PAIRS, self.described_)
        self.settings_ = question.settings
        self._train(pairs, question, budget)
        if self.run_folder is not None:
            ModelFolder(Path(self.run_folder)).finish(self.described_)
        return self

    def planned(self, pairs: Pairs) -> ClipPlan:
        """What a fit of such pairs would do: from public sizes alone. Costs nothing."""
        question, budget = self._question(pairs)
        with Run.open(InMemoryUsers(pairs.table), budget) as run:
            multiplier = planned_multiplier(run, question.settings, self.centre * run.ledger.capacity)
        return ClipPlan(question.users, self.mechanism, question.settings, budget, multiplier)

    def settings_of(self, pairs: Pairs) -> ClipSettings:
        """Those that were passed, or what is chosen from public numbers."""
        return self._question(pairs)[0].settings

    def _question(self, pairs: Pairs) -> tuple[Question, Budget]:
        """What is asked in a step, before features are centred, and the budget."""
        self._check()
        users, layout = pairs.table.n_users, layout_of(pairs)
        budget = Budget(self.epsilon, min(1 / (2 * max(users, 1)), 0.01) if self.delta is None else self.delta)
        model = self.towers_of(layout, np.zeros(layout.image_numbers, np.float32))
        mu = budget.mu * math.sqrt(1 - self.centre)
        settings = self.settings or settings_for(self.mechanism, model, users, mu, self.temperature, layout)
        if settings.mechanism != self.mechanism:
            raise InputError(f"settings are for {settings.mechanism!r} and the mechanism is {self.mechanism!r}.")
        question = Question(model, layout, settings, self.temperature, self.pairs_per_user, users)
        question.check()
        return question, budget

    def _train(self, pairs: Pairs, question: Question, budget: Budget) -> None:
        folder, seed = None if self.run_folder is None else Path(self.run_folder), self.random_state
        with Run.open(InMemoryUsers(pairs.table), budget, seed=seed, folder=folder) as run:
            before = self.centre * run.ledger.capacity
            multiplier = planned_multiplier(run, question.settings, before)
            if self.on_plan is not None:
                self.on_plan(ClipPlan(question.users, self.mechanism, question.settings, budget, multiplier))
            if before:
                mean = centre(run, question.layout, question.rows_per_user, before)
                question = replace(question, towers=self.towers_of(question.layout, mean))
            told = self.on_step if self.on_step is not None else lambda done: None
            self.weights_: Singles = train(run, question, question.towers.weights(self.temperature), multiplier, told)
        self.towers_, self.noise_multiplier_ = question.towers, multiplier
        self.ledger_, self.billboard_ = run.ledger, run.billboard
        self.privacy_: PrivacyReport = replace(run.ledger.report(), unit=pairs.unit)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the trained weights, the ledger and every release to a folder, all of which may be published."""
        ModelFolder(Path(folder)).save(self.described_, self.ledger_, self.billboard_, overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path, image_encoder: nn.Module | Encoder, text_encoder: nn.Module | Encoder) -> Self:
        """Read a model folder. The encoders of the fit must be passed again, with the same frozen weights; the trained
        ones come from the folder."""
        where = ModelFolder(Path(folder))
        found = where.read(PAIRS)
        saved = SavedPairs(found.described, found.billboard)
        with where.damage(MODEL):
            given, settings, layout = saved.arguments, saved.settings, saved.layout
        model = cls(image_encoder, text_encoder, **given)
        prints = prints_of(model.modules)
        with where.damage(MODEL):
            saved.check_modules(prints, where.path)
        with where.damage(BILLBOARD):
            mean = saved.mean
        model.described_, model.settings_ = saved.described, settings
        model.towers_ = model.towers_of(layout, mean)
        with where.damage(BILLBOARD):
            model.weights_, model.noise_multiplier_ = saved.weights(model.towers_.size), saved.noise_multiplier
        model.ledger_, model.billboard_ = found.ledger, found.billboard
        model.privacy_ = replace(found.ledger.report(), unit=found.described["unit"])
        return model

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """The two modules that were passed."""
        image, text = (e.module if isinstance(e, Encoder) else e for e in (self.image_encoder, self.text_encoder))
        return image, text

    def images(self, rows: NDArray[Any]) -> Singles:
        """Embeddings of images, of length one, as the encoder was trained."""
        return _unit(self.towers_.of_images(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def texts(self, rows: NDArray[Any]) -> Singles:
        """Embeddings of texts, of length one, as the encoder was trained."""
        return _unit(self.towers_.of_texts(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def trained(self) -> tuple[nn.Module, nn.Module]:
        """The two modules that were passed, with the trained weights put into them; centring is before the images'."""
        image, text = self.towers_.image, self.towers_.text
        image.load(self.weights_[: image.size])
        text.load(self.weights_[image.size : image.size + text.size])
        return image.module, text.module

    def towers_of(self, layout: Layout, mean: Singles) -> Towers:
        """Both encoders, checked against rows as these are; with the mean of features, where those are centred."""
        image, text = self.modules
        if self.centre:
            image = nn.Sequential(Centred(mean), image)
        numbers = (layout.image_numbers, layout.bank.shape[1])
        return towers(image, text, *numbers, learn_scale=self.learn_temperature, cosine=self.cosine)

    def _check(self) -> None:
        if not 0.01 <= self.temperature <= 100:
            raise InputError(f"temperature must lie between 0.01 and 100. Got {self.temperature} instead.")
        if not 0 <= self.centre < 1:
            raise InputError(f"centre is a share of the budget, 0 or more and below 1. Got {self.centre} instead.")
        if isinstance(self.pairs_per_user, bool) or not isinstance(self.pairs_per_user, int) or self.pairs_per_user < 1:
            raise InputError(f"pairs_per_user is a whole number of 1 or more. Got {self.pairs_per_user!r} instead.")


def _unit(rows: Singles) -> Singles:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
