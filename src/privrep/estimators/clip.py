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
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from privrep.boundary import refusing
from privrep.errors import InputError, needed
from privrep.estimators.accounts import check_account, open_account, warn_if_again
from privrep.privacy.population import PopulationLedger

with needed("torch", "DPClip needs PyTorch", "torch"):
    from torch import nn

from privrep.estimators.base import warn_of_budget
from privrep.estimators.progress import Bar, watch
from privrep.models.folder import BILLBOARD, MODEL, ModelFolder
from privrep.models.pairs import PAIRS
from privrep.models.promise import find_weaknesses
from privrep.multimodal.description import SavedPairs, describe, prints_of
from privrep.multimodal.encoders import Encoder
from privrep.multimodal.pairs import Pairs
from privrep.multimodal.towers import Centred, Layout, Towers, layout_of, make_towers, release_centre
from privrep.multimodal.training import ClipSettings, Mechanism, Question, choose_settings, plan_step_noise, train
from privrep.privacy.ledger import Budget
from privrep.privacy.protocol import EVERYONE
from privrep.privacy.report import PrivacyReport
from privrep.privacy.run import Run
from privrep.typing import Singles
from privrep.users.memory import InMemoryUsers


@dataclass(frozen=True)
class ClipPlan:
    """Public facts of a fit to come."""

    users: int
    mechanism: Mechanism
    settings: ClipSettings
    budget: Budget
    noise_multiplier: float

    @property
    def words(self) -> str:
        """Return the plan in a sentence."""
        asked = "everyone"
        if self.settings.choose_audience(self.users) != EVERYONE:
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


class DPClip(BaseEstimator):
    """Train two encoders contrastively under user-level differential privacy, replace-one-user.

    Parameters
    ----------
    image_encoder, text_encoder : torch modules from rows to embeddings of one length, or `Encoder`s
        What has requires_grad=False is frozen. Weights at the start are public.
    epsilon, delta : float
        The whole budget of `fit`. By default delta is 1/(2 users).
    mechanism : "bank", "batch" or "inside"
        "bank" contrasts with public captions, each user clipped alone. "batch" clips the gradient of a batch as one, as
        the paper does. "inside" has private negatives, and clips every similarity by itself.
    settings : `privrep.multimodal.training.ClipSettings`, optional
        Of the steps. By default chosen from public numbers.
    temperature, learn_temperature : float, bool
        Of similarities, and whether it is learned from there.
    cosine : bool
        Whether an image's embedding counts by its direction alone, as in CLIP.
    centre : float
        The share of the budget (of mu^2) for a mean of the images' features, which is taken off them. For cached
        features of a frozen network 0.03 is plenty.
    pairs_per_user : int
        How many pairs of a user take part, the first ones. A public number.
    random_state : None or int
        None: cryptographic noise. An integer: a reproducible simulation, which is not private and says so.
    run_folder : path, optional
        Keep ledger and billboard there while fitting, so that a killed fit can be continued without spending twice.
    population : path or PopulationLedger, optional
        The population ledger that the budget is reserved from: all fits on these users together keep to its budget.
    on_step, on_plan : functions, optional
        Are told how many steps are done, and the plan before anything is spent.
    verbose : bool
        Show a progress bar on standard error, where that is a terminal, or in a notebook. Releases are the same.

    Attributes
    ----------
    weights_ : array, the trained weights of both encoders, public
    settings_ : ClipSettings, what steps did
    noise_multiplier_ : float, the noise of a step over the most that one user can change
    privacy_ : PrivacyReport

    Formal guarantee: `weights_`, `privacy_` and the billboard are (epsilon, delta)-DP at the level of the pairs' unit.
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
        population: str | Path | PopulationLedger | None = None,
        on_step: Callable[[int], None] | None = None,
        on_plan: Callable[[ClipPlan], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.epsilon, self.delta = epsilon, delta
        self.mechanism, self.settings = mechanism, settings
        self.temperature, self.learn_temperature, self.cosine = temperature, learn_temperature, cosine
        self.centre, self.pairs_per_user = centre, pairs_per_user
        self.random_state, self.run_folder, self.population = random_state, run_folder, population
        self.on_step, self.on_plan, self.verbose = on_step, on_plan, verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False  # `fit` takes pairs
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "weights_")

    def fit(self, pairs: Pairs) -> Self:
        """Learn from users' pairs. All that leaves them is noisy sums, charged to one ledger.

        With a `run_folder`, a fit of the same arguments that was killed is continued: what stands is read, nothing is
        spent twice. Rows are not compared: they must be the same.
        """
        question, budget = self._question(pairs)
        check_account(self, budget)
        weak = find_weaknesses(budget.epsilon, budget.delta, budget.relation, question.users, pairs.unit)
        warn_of_budget(weak, stacklevel=2)
        self.described_ = {"format": PAIRS.format, **describe(self, question, budget, pairs.unit)}
        if self.run_folder is not None:
            ModelFolder(Path(self.run_folder)).claim(PAIRS, self.described_)
        self.settings_ = question.settings
        with watch(self.verbose, question.settings.steps) as bar:
            self._train(pairs, question, budget, bar)
        if self.run_folder is not None:
            ModelFolder(Path(self.run_folder)).finish(self.described_)
        warn_if_again(self, lambda: pairs.table.ids, self.privacy_)
        return self

    def planned(self, pairs: Pairs) -> ClipPlan:
        """Return what a fit of these pairs would do, from public sizes alone. Costs nothing."""
        question, budget = self._question(pairs)
        with Run.open(InMemoryUsers(pairs.table), budget) as run:
            multiplier = plan_step_noise(run, question.settings, self.centre * run.ledger.capacity)
        return ClipPlan(question.users, self.mechanism, question.settings, budget, multiplier)

    def settings_of(self, pairs: Pairs) -> ClipSettings:
        """Return the settings that were passed, or what is chosen from public numbers."""
        return self._question(pairs)[0].settings

    def _question(self, pairs: Pairs) -> tuple[Question, Budget]:
        """Return what is asked in a step, before features are centred, and the budget."""
        self._check()
        users, layout = pairs.table.n_users, layout_of(pairs)
        budget = Budget(self.epsilon, min(1 / (2 * max(users, 1)), 0.01) if self.delta is None else self.delta)
        model = self.towers_of(layout, np.zeros(layout.image_numbers, np.float32))
        mu = budget.mu * math.sqrt(1 - self.centre)
        settings = self.settings or choose_settings(self.mechanism, model, users, mu, self.temperature, layout)
        if settings.mechanism != self.mechanism:
            raise InputError(f"settings are for {settings.mechanism!r} and the mechanism is {self.mechanism!r}.")
        question = Question(model, layout, settings, self.temperature, self.pairs_per_user, users)
        question.check()
        return question, budget

    def _train(self, pairs: Pairs, question: Question, budget: Budget, bar: Bar | None) -> None:
        """Make all releases. With a folder every charge and page is there before it is used."""
        hooks = [hook for hook in (self.on_step, None if bar is None else bar.at) if hook is not None]

        def told(done: int) -> None:
            for hook in hooks:
                hook(done)

        folder, seed = None if self.run_folder is None else Path(self.run_folder), self.random_state
        account = open_account(self, lambda: pairs.table.ids)
        with Run.open(InMemoryUsers(pairs.table), budget, seed=seed, folder=folder, account=account) as run:
            before = self.centre * run.ledger.capacity
            multiplier = plan_step_noise(run, question.settings, before)
            if self.on_plan is not None:
                self.on_plan(ClipPlan(question.users, self.mechanism, question.settings, budget, multiplier))
            if before:
                mean = release_centre(run, question.layout, question.rows_per_user, before)
                question = replace(question, towers=self.towers_of(question.layout, mean))
            self.weights_: Singles = train(run, question, question.towers.weights(self.temperature), multiplier, told)
        self.towers_, self.noise_multiplier_ = question.towers, multiplier
        self.ledger_, self.billboard_ = run.ledger, run.billboard
        self.privacy_: PrivacyReport = replace(run.ledger.report(), unit=pairs.unit)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the trained weights, the ledger and every release to a folder, all of which may be published."""
        check_is_fitted(self)
        ModelFolder(Path(folder)).save(self.described_, self.ledger_, self.billboard_, overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path, image_encoder: nn.Module | Encoder, text_encoder: nn.Module | Encoder) -> Self:
        """Read a model folder; the trained weights come from there.

        Args:
            folder: of the model.
            image_encoder, text_encoder: of the fit, with the same frozen weights.
        """
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
        with refusing(where.tell_damage(MODEL)):
            model.towers_ = model.towers_of(layout, mean)
        with where.damage(BILLBOARD):
            model.weights_, model.noise_multiplier_ = saved.weights(model.towers_.size), saved.noise_multiplier
        model.ledger_, model.billboard_ = found.ledger, found.billboard
        model.privacy_ = replace(found.ledger.report(), unit=found.described["unit"])
        return model

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """Return the two modules that were passed."""
        image, text = (e.module if isinstance(e, Encoder) else e for e in (self.image_encoder, self.text_encoder))
        return image, text

    def images(self, rows: NDArray[Any]) -> Singles:
        """Return embeddings (rows, numbers) of images (rows, image_numbers), of length one."""
        check_is_fitted(self)
        return _unit(self.towers_.embed_images(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def texts(self, rows: NDArray[Any]) -> Singles:
        """Return embeddings (rows, numbers) of texts (rows, text_numbers), of length one."""
        check_is_fitted(self)
        return _unit(self.towers_.embed_texts(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def trained(self) -> tuple[nn.Module, nn.Module]:
        """Put the trained weights into the two modules that were passed, and return them.

        Where features are centred, the image module expects rows less the mean.
        """
        check_is_fitted(self)
        image, text = self.towers_.image, self.towers_.text
        image.load(self.weights_[: image.size])
        text.load(self.weights_[image.size : image.size + text.size])
        return image.module, text.module

    def towers_of(self, layout: Layout, mean: Singles) -> Towers:
        """Return both encoders, checked against the sizes of rows.

        Args:
            layout: the sizes.
            mean: of the images' features, (image_numbers,); taken off them where `centre` asks for it.
        """
        image, text = self.modules
        if self.centre:
            image = nn.Sequential(Centred(mean), image)
        numbers = (layout.image_numbers, layout.bank.shape[1])
        return make_towers(image, text, *numbers, learn_scale=self.learn_temperature, cosine=self.cosine)

    def _check(self) -> None:
        """Raise InputError for parameters that need no data to be refused."""
        if not 0.01 <= self.temperature <= 100:
            raise InputError(f"temperature must lie between 0.01 and 100. Got {self.temperature} instead.")
        if not 0 <= self.centre < 1:
            raise InputError(f"centre is a share of the budget, 0 or more and below 1. Got {self.centre} instead.")
        if isinstance(self.pairs_per_user, bool) or not isinstance(self.pairs_per_user, int) or self.pairs_per_user < 1:
            raise InputError(f"pairs_per_user is a whole number of 1 or more. Got {self.pairs_per_user!r} instead.")


def _unit(rows: Singles) -> Singles:
    """Return rows (rows, numbers) brought to length one."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
