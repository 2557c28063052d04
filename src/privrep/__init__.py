"""Private model personalisation: one shared representation under user-level differential privacy, personal heads.

from privrep import PrivateFedRep
model = PrivateFedRep(rank=2, epsilon=1.0, delta=1e-6).fit(X, y, groups=users)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from privrep.linear.registry import ESTIMATORS

if TYPE_CHECKING:
    from privrep.data.synthetic import ClassPopulation, Population, make_class_population, make_population
    from privrep.errors import (
        BudgetExceeded,
        ColumnNote,
        InputError,
        MissingValues,
        NothingLearned,
        PrivrepError,
        ResumeError,
        UnknownLabels,
        UnknownUsers,
        WeakPrivacy,
    )
    from privrep.estimators.classification import PrivateFedRepClassifier
    from privrep.estimators.clip import DPClip as DPClip
    from privrep.estimators.margin import PrivateMarginSelector
    from privrep.estimators.network import Centaur as Centaur
    from privrep.estimators.network_regression import CentaurRegressor
    from privrep.estimators.personal_network import PersonalNetwork as PersonalNetwork
    from privrep.estimators.ratings import PrivateFactorization
    from privrep.estimators.regression import CentaurLinear, PrivAltMin, PrivateFedRep
    from privrep.heads.personal import PersonalClassifier, PersonalHead, Taste
    from privrep.privacy.ledger import PrivacyReport

__version__ = "0.1.0"

_WHERE = {
    "BudgetExceeded": "privrep.errors",
    "Centaur": "privrep.estimators.network",  # needs PyTorch, so it is not in __all__
    "CentaurLinear": "privrep.estimators.regression",
    "CentaurRegressor": "privrep.estimators.network_regression",  # needs PyTorch for frozen networks alone
    "ClassPopulation": "privrep.data.synthetic",
    "ColumnNote": "privrep.errors",
    "DPClip": "privrep.estimators.clip",  # needs PyTorch, too
    "InputError": "privrep.errors",
    "NothingLearned": "privrep.errors",
    "PersonalClassifier": "privrep.heads.personal",
    "PersonalHead": "privrep.heads.personal",
    "PersonalNetwork": "privrep.estimators.personal_network",  # needs PyTorch
    "Population": "privrep.data.synthetic",
    "PrivAltMin": "privrep.estimators.regression",
    "PrivacyReport": "privrep.privacy.ledger",
    "PrivateFactorization": "privrep.estimators.ratings",
    "PrivateFedRep": "privrep.estimators.regression",
    "PrivateFedRepClassifier": "privrep.estimators.classification",
    "PrivateMarginSelector": "privrep.estimators.margin",
    "PrivrepError": "privrep.errors",
    "ResumeError": "privrep.errors",
    "Taste": "privrep.heads.personal",
    "MissingValues": "privrep.errors",
    "UnknownLabels": "privrep.errors",
    "UnknownUsers": "privrep.errors",
    "WeakPrivacy": "privrep.errors",
    "make_class_population": "privrep.data.synthetic",
    "make_population": "privrep.data.synthetic",
}
__all__ = [
    "BudgetExceeded",
    "CentaurLinear",
    "CentaurRegressor",
    "ClassPopulation",
    "ColumnNote",
    "InputError",
    "MissingValues",
    "NothingLearned",
    "PersonalClassifier",
    "PersonalHead",
    "Population",
    "PrivAltMin",
    "PrivacyReport",
    "PrivateFactorization",
    "PrivateFedRep",
    "PrivateFedRepClassifier",
    "PrivateMarginSelector",
    "PrivrepError",
    "ResumeError",
    "Taste",
    "UnknownLabels",
    "UnknownUsers",
    "WeakPrivacy",
    "make_class_population",
    "make_population",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `import privrep` itself stays fast."""
    where = _WHERE.get(name) or ("privrep.estimators.regression" if name in ESTIMATORS else None)
    if where is None:
        raise AttributeError(f"module 'privrep' has no attribute {name!r}")
    try:
        return getattr(import_module(where), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        extra = "multimodal" if name == "DPClip" else "torch"
        raise ImportError(f"{name} needs PyTorch: pip install 'privrep[{extra}]'.") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *ESTIMATORS, "__version__"})
