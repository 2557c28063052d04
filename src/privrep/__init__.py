"""Private model personalisation: one shared representation under user-level differential privacy, personal heads.

from privrep import PrivateFedRep
model = PrivateFedRep(rank=2, epsilon=1.0, delta=1e-6).fit(X, y, groups=users)

The API is `privrep.__all__`, and nothing else: the estimators, the personal heads and the reports that they return, the
makers of populations, the errors and the warnings. Every other module is internal, and may change without a word.

A name is loaded when it is asked for. `import privrep` loads no PyTorch. Names that need PyTorch are in `__all__` where
PyTorch is installed; elsewhere asking for one raises `MissingPackage`, which says what to install.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from privrep.linear.registry import ESTIMATORS

if TYPE_CHECKING:  # what type checkers see of the table below
    from privrep.data.synthetic import ClassPopulation as ClassPopulation
    from privrep.data.synthetic import Population as Population
    from privrep.data.synthetic import make_class_population as make_class_population
    from privrep.data.synthetic import make_population as make_population
    from privrep.errors import BudgetExceeded as BudgetExceeded
    from privrep.errors import ColumnNote as ColumnNote
    from privrep.errors import DiskFull as DiskFull
    from privrep.errors import FittedAgain as FittedAgain
    from privrep.errors import InputError as InputError
    from privrep.errors import MissingPackage as MissingPackage
    from privrep.errors import MissingValues as MissingValues
    from privrep.errors import NothingLearned as NothingLearned
    from privrep.errors import OtherPeople as OtherPeople
    from privrep.errors import OutsideLedger as OutsideLedger
    from privrep.errors import OverLimit as OverLimit
    from privrep.errors import PrivrepError as PrivrepError
    from privrep.errors import ResumeError as ResumeError
    from privrep.errors import UnknownLabels as UnknownLabels
    from privrep.errors import UnknownUsers as UnknownUsers
    from privrep.errors import WeakPrivacy as WeakPrivacy
    from privrep.estimators.classification import PrivateFedRepClassifier as PrivateFedRepClassifier
    from privrep.estimators.clip import DPClip as DPClip
    from privrep.estimators.margin import PrivateMarginSelector as PrivateMarginSelector
    from privrep.estimators.network import Centaur as Centaur
    from privrep.estimators.network_regression import CentaurRegressor as CentaurRegressor
    from privrep.estimators.personal_network import PersonalNetwork as PersonalNetwork
    from privrep.estimators.ratings import PrivateFactorization as PrivateFactorization
    from privrep.estimators.regression import CentaurLinear as CentaurLinear
    from privrep.estimators.regression import DPFedAvg as DPFedAvg
    from privrep.estimators.regression import PrivAltMin as PrivAltMin
    from privrep.estimators.regression import PrivateFedRep as PrivateFedRep
    from privrep.estimators.splitting import WithinUserSplit as WithinUserSplit
    from privrep.heads.personal import MarginHead as MarginHead
    from privrep.heads.personal import PersonalClassifier as PersonalClassifier
    from privrep.heads.personal import PersonalHead as PersonalHead
    from privrep.heads.personal import Taste as Taste
    from privrep.privacy.population import PopulationLedger as PopulationLedger
    from privrep.privacy.report import PrivacyReport as PrivacyReport

__version__ = "0.1.0"

_OF_TORCH = {  # by name, the module that needs PyTorch to be imported
    "Centaur": "privrep.estimators.network",
    "DPClip": "privrep.estimators.clip",
    "PersonalNetwork": "privrep.estimators.personal_network",
}
_MODULES = {
    **_OF_TORCH,
    "BudgetExceeded": "privrep.errors",
    "CentaurRegressor": "privrep.estimators.network_regression",
    "ClassPopulation": "privrep.data.synthetic",
    "ColumnNote": "privrep.errors",
    "DiskFull": "privrep.errors",
    "InputError": "privrep.errors",
    "MarginHead": "privrep.heads.personal",
    "MissingPackage": "privrep.errors",
    "MissingValues": "privrep.errors",
    "NothingLearned": "privrep.errors",
    "PersonalClassifier": "privrep.heads.personal",
    "PersonalHead": "privrep.heads.personal",
    "Population": "privrep.data.synthetic",
    "PopulationLedger": "privrep.privacy.population",
    "PrivacyReport": "privrep.privacy.report",
    "PrivateFactorization": "privrep.estimators.ratings",
    "PrivateFedRepClassifier": "privrep.estimators.classification",
    "PrivateMarginSelector": "privrep.estimators.margin",
    "FittedAgain": "privrep.errors",
    "OtherPeople": "privrep.errors",
    "OutsideLedger": "privrep.errors",
    "OverLimit": "privrep.errors",
    "PrivrepError": "privrep.errors",
    "ResumeError": "privrep.errors",
    "Taste": "privrep.heads.personal",
    "UnknownLabels": "privrep.errors",
    "UnknownUsers": "privrep.errors",
    "WeakPrivacy": "privrep.errors",
    "WithinUserSplit": "privrep.estimators.splitting",
    "make_class_population": "privrep.data.synthetic",
    "make_population": "privrep.data.synthetic",
    **dict.fromkeys(ESTIMATORS, "privrep.estimators.regression"),  # of registered methods, such as PrivateFedRep
}
__all__ = sorted(_MODULES if find_spec("torch") else _MODULES.keys() - _OF_TORCH.keys())

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who listens says where to


def __getattr__(name: str) -> Any:
    """Load a name of the API when it is asked for: `import privrep` itself stays fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'privrep' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the names of the API, whether they are loaded or not."""
    return sorted({*_MODULES, "__version__"})
