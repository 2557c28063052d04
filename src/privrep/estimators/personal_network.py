"""One user's own network, as `Centaur.personalize` returns it: the public part, and a head of that user's rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError, needed

with needed("torch", "PersonalNetwork needs PyTorch", "torch"):
    from torch import nn

from privrep.heads.neural import OwnHeads
from privrep.models.folder import ModelFolder
from privrep.models.networks import is_personal
from privrep.neural.features import FeatureMap
from privrep.typing import Singles

if TYPE_CHECKING:
    from privrep.estimators.network import Centaur


@dataclass(frozen=True, eq=False)
class PersonalNetwork:
    """One user's own model: the public part and a head that this user alone has. It belongs to that user."""

    model: Centaur
    head: OwnHeads

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of each row of this user, (rows,)."""
        return np.asarray(self.model.classes_[self._scores(X).argmax(axis=1)])

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return how likely each class is, (rows, classes), in the order of `model.classes_`."""
        return softmax(self._scores(X))

    def _scores(self, X: Any) -> Singles:
        rows = self.model.prepared(X)
        return self.head.scores(self.model.learned_, rows, np.zeros(len(rows), dtype=np.int64))

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder with the public part and, in private/, this user's head, which its owner alone can read.

        Modules that were passed to the fit are not in it.
        """
        self.model.write_personal(folder, self.head, overwrite=overwrite)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        representation: nn.Module | None = None,
        features: FeatureMap | None = None,
        *,
        cache: str | Path | None = None,
    ) -> Self:
        """Read what `save` wrote; modules are passed again as `Centaur.load` takes them.

        Args:
            folder: of the network.
            representation: the module of the fit, where one was passed.
            features: the frozen map of the fit, where one was passed.
            cache: where features of a frozen network are kept.
        """
        from privrep.estimators.network import Centaur  # which imports this module

        where = ModelFolder(Path(folder))
        if where.finished and not is_personal(where):
            raise InputError(f"{folder} is not the network of one user; read it with Centaur.load, then personalize.")
        model = Centaur._read(folder, representation, None, features, cache)
        head, model.heads_ = model.heads_, None
        if head is None:
            raise InputError(f"{folder} has no head: its private/ is not there. Copy it from where it was saved.")
        return cls(model, head)


def softmax(scores: Singles) -> NDArray[np.float64]:
    """Return the probabilities of classes, (rows, classes), of scores of the same shape."""
    shifted = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))
