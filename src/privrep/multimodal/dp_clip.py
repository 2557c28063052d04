"""DP-CLIP: two encoders whose embeddings of an image and its caption meet, learned privately.

model = DPClip(Projection(1280, 16, seed=1), text_encoder, epsilon=1.0).fit(pairs)
zero_shot(model.images(test_rows), model.texts(prompt_rows), class_of_prompt, labels)
print(model.privacy_)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from privrep.engines.in_memory import InMemoryUsers
from privrep.errors import InputError
from privrep.multimodal.defaults import settings_for
from privrep.multimodal.encoders import Encoder
from privrep.multimodal.pairs import Floats, Pairs
from privrep.multimodal.towers import Towers, layout_of, towers
from privrep.multimodal.training import Mechanism, Question, Settings, planned_multiplier, train
from privrep.neural.split import Weights
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger, PrivacyReport
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.release import Run


class DPClip:
    """Contrastive training of two encoders under user-level differential privacy, replace-one-user.

    image_encoder, text_encoder   torch modules from rows to embeddings of one length, or `Encoder`s; what has
                                  requires_grad=False is frozen. Weights at the start are public: say so only if they are
    epsilon, delta                the budget; delta is 1/(2 users) if not said
    mechanism                     "bank": contrast with public captions, each user clipped alone; "batch": the paper's,
                                  the gradient of a batch clipped as one; "inside": private negatives, every similarity
                                  clipped by itself
    settings                      of the steps, `multimodal.training.Settings`; by default chosen from public numbers
    temperature                   of similarities; with `learn_temperature` where it starts
    cosine                        whether an image's embedding counts by its direction alone, as in CLIP
    pairs_per_user                of each user the first so many pairs take part: a public number
    random_state                  a seed makes the run a simulation, which is not private and says so
    run_folder                    where charges and pages are kept, so that the same call continues a fit that was killed
    on_step                       is told how many steps are done
    """

    def __init__(
        self,
        image_encoder: nn.Module | Encoder,
        text_encoder: nn.Module | Encoder,
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        mechanism: Mechanism = "bank",
        settings: Settings | None = None,
        temperature: float = 0.1,
        learn_temperature: bool = False,
        cosine: bool = True,
        pairs_per_user: int = 1,
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.epsilon, self.delta = epsilon, delta
        self.mechanism, self.settings = mechanism, settings
        self.temperature, self.learn_temperature, self.cosine = temperature, learn_temperature, cosine
        self.pairs_per_user = pairs_per_user
        self.random_state, self.run_folder, self.on_step = random_state, run_folder, on_step

    def fit(self, pairs: Pairs) -> DPClip:
        """Learn from users' pairs. All that leaves them is noisy sums, charged to one ledger."""
        self._check()
        users = pairs.table.n_users
        delta = min(1 / (2 * max(users, 1)), 0.01) if self.delta is None else self.delta
        budget = Budget(self.epsilon, delta)
        model = self.towers_of(pairs)
        settings = self.settings or settings_for(
            self.mechanism, model, layout_of(pairs), users, budget.mu, self.temperature
        )
        if settings.mechanism != self.mechanism:
            raise InputError(f"settings are for {settings.mechanism!r} and the mechanism is {self.mechanism!r}.")
        question = Question(model, layout_of(pairs), settings, self.temperature, self.pairs_per_user, users)
        question.check()
        self.settings_, self.towers_ = settings, model
        self._train(pairs, question, budget)
        return self

    def _train(self, pairs: Pairs, question: Question, budget: Budget) -> None:
        folder, seed = None if self.run_folder is None else Path(self.run_folder), self.random_state
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(budget, seeded=seed is not None, path=None if folder is None else folder / "ledger.jsonl")
        try:
            billboard = Billboard(None if folder is None else folder / "billboard")
            noise = secure_noise if seed is None else simulated_noise(seed)
            run = Run(InMemoryUsers(pairs.table), ledger, billboard, noise)
            start = question.towers.weights(self.temperature)
            multiplier = planned_multiplier(run, question.settings)
            told = self.on_step if self.on_step is not None else lambda done: None
            self.weights_: Weights = train(run, question, start, multiplier, told)
        finally:
            ledger.close()
        self.noise_multiplier_ = multiplier
        self.ledger_, self.billboard_ = ledger, billboard
        self.privacy_: PrivacyReport = ledger.report()

    def images(self, rows: NDArray[Any]) -> Floats:
        """Embeddings of images, of length one, as the encoder was trained."""
        return _unit(self.towers_.of_images(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def texts(self, rows: NDArray[Any]) -> Floats:
        """Embeddings of texts, of length one, as the encoder was trained."""
        return _unit(self.towers_.of_texts(self.weights_, np.ascontiguousarray(rows, np.float32)))

    def trained(self) -> tuple[nn.Module, nn.Module]:
        """The two modules that were passed, with the trained weights put into them."""
        image, text = self.towers_.image, self.towers_.text
        image.load(self.weights_[: image.size])
        text.load(self.weights_[image.size : image.size + text.size])
        return image.module, text.module

    def towers_of(self, pairs: Pairs) -> Towers:
        """Both encoders, checked against rows as these pairs have them."""
        modules = [e.module if isinstance(e, Encoder) else e for e in (self.image_encoder, self.text_encoder)]
        return towers(*modules, pairs.image_numbers, pairs.bank.shape[1], self.learn_temperature, self.cosine)

    def _check(self) -> None:
        if not 0.01 <= self.temperature <= 100:
            raise InputError(f"temperature must lie between 0.01 and 100. Got {self.temperature} instead.")
        if isinstance(self.pairs_per_user, bool) or not isinstance(self.pairs_per_user, int) or self.pairs_per_user < 1:
            raise InputError(f"pairs_per_user is a whole number of 1 or more. Got {self.pairs_per_user!r} instead.")


def _unit(rows: Floats) -> Floats:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
