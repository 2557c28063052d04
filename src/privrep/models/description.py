"""The description of a fit in public facts: settings, and the columns of a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from privrep.data import categories as one_hot
from privrep.data.categories import Categories, check_classes, check_lists
from privrep.data.missing import Missing, make_indicator_names
from privrep.errors import InputError
from privrep.linear.method import Method, Problem
from privrep.linear.registry import DEFAULT, METHODS, check_accepted, find_method
from privrep.linear.starts import INITIALISERS
from privrep.linear.transform import make_declared_transform
from privrep.local.losses import LOSSES, Loss, LossName
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget
from privrep.privacy.protocol import Users
from privrep.schema.sent import read_some_fields

CONFIGURATIONS = ("default", "paper")


@dataclass(frozen=True)
class Config:
    """Settings of a fit. Only public facts; stored with the model and compared when a run is resumed."""

    rank: int | None  # None: read off the released spectrum
    epsilon: float
    delta: float
    relation: Relation = "replace-one-user"
    intercept: bool = True
    safety_net: bool = True
    scale: tuple[float, ...] | None = None  # declared public scale of each feature; None: found by a charged release
    covariance: tuple[tuple[float, ...], ...] | None = None  # declared public covariance of the features, instead
    seed: int | None = None  # None: cryptographic noise. A number: a simulation
    method: str = DEFAULT
    configuration: str = "default"  # or "paper": the method as published, for comparison
    start: str | None = None  # the initialiser; None: the method's own
    ratings: bool = False  # rows are (user, item, rating): items have means, and factors are all there is to learn
    loss: str | None = None  # of labels, which stand in place of numbers; None: numbers, and their squares

    @property
    def learner(self) -> Method:
        """Return the method that learns the representation."""
        return find_method(self.method, self.ratings)

    def problem(self, features: int, loss: Loss | None) -> Problem:
        """Return the problem that the method is asked to solve.

        Args:
            features: how many there are.
            loss: what `make_loss` returns for these settings; None: of numbers.
        """
        return Problem(
            rank=self.rank,
            intercept=self.intercept,
            transform=make_declared_transform(self.scale, self.covariance, features),
            start=None if self.start is None else INITIALISERS[self.start],
            loss=loss,
            configuration=self.configuration,
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Config:
        """Return the settings that a file holds. Raise ValueError or TypeError if one of them is of another type."""
        return cls(**read_some_fields(cls, fields, "config", ()))

    def check(self, features: int | None = None) -> None:
        """Raise InputError if settings cannot work, in one sentence; without `features`, only if they never can."""
        Budget(self.epsilon, self.delta, self.relation)
        if not self.delta:
            raise InputError(
                "delta must be above 0 for Gaussian noise; PrivateMarginSelector, of two classes, needs none."
            )
        for name, value, known in (
            ("method", self.method, METHODS),
            ("configuration", self.configuration, CONFIGURATIONS),
            ("start", self.start, (None, *INITIALISERS)),
            ("loss", self.loss, (None, *LOSSES)),
        ):
            if value not in known:
                listed = ", ".join(str(choice) for choice in known if choice)
                raise InputError(f"{name} must be one of {listed}. Got {value!r} instead.")
        check_accepted(self.learner, self._asked())
        if self.loss is not None and self.configuration == "paper":
            raise InputError("the configuration paper is for numbers, as the papers are; for labels use the default.")
        least = 0 if self.configuration == "default" and "rank 0" in self.learner.accepts else 1
        bounded = features is not None and not self.ratings  # of ratings it is the most that is kept
        if self.rank is not None and not least <= self.rank <= (
            features if bounded and features is not None else self.rank
        ):
            most = "" if features is None else f", {features}"
            raise InputError(
                f"rank must lie between {least} and the number of features{most}. Got {self.rank} instead."
            )
        if self.configuration == "paper":
            self._check_paper()
        if features is not None:
            self.learner.check(Problem(rank=self.rank, configuration=self.configuration), features)
        if self.start == "random" and self.rank is None:
            raise InputError("a random start cannot tell how many directions there are; give a rank.")
        self._check_ratings()
        if features is not None:
            make_declared_transform(self.scale, self.covariance, features)

    def _check_ratings(self) -> None:
        """Raise InputError if a fit of ratings has settings of other tables."""
        plain = Config(self.rank, self.epsilon, self.delta, self.relation, seed=self.seed, ratings=True)
        if self.ratings and self != plain:
            raise InputError(
                "ratings take a rank and a budget; methods, starts, scales, losses, intercepts and the safety net are "
                "for other tables."
            )

    def _asked(self) -> list[str]:
        """Return the words of `Method.accepts` that these settings need, whoever the users are."""
        wanted = {
            "classes": self.loss is not None,
            "paper": self.configuration == "paper",
            "start": self.start is not None,
            self.relation: self.relation != "replace-one-user",
        }
        return [] if self.ratings else [word for word, needed in wanted.items() if needed]

    def check_users(self, users: Users) -> None:
        """Raise InputError if the settings cannot do with such users."""
        if self.configuration == "paper" and users.facts.targets > 1:
            raise InputError("the configuration paper takes one target; fit each by itself, or use the default.")
        if self.loss is not None and users.facts.targets > 1:
            raise InputError("labels are one target; fit each of several by itself.")
        if self.covariance is not None and users.facts.sparse:
            raise InputError("a declared covariance would make sparse features dense; declare feature_scale instead.")
        self._check_rows(users.facts.targets, users.facts.sparse)

    def check_columns(self, columns: Columns) -> None:
        """Raise InputError if the settings cannot do with such columns, before anything is spent on lists of their
        values."""
        self._check_rows(len(columns.targets), bool(columns.categorical) and not self.dense)

    @property
    def dense(self) -> bool:
        """Return whether features must be dense, one-hot features of categories too."""
        return "sparse" not in self.learner.accepts

    def _check_rows(self, targets: int, sparse: bool) -> None:
        """Raise InputError if the method does not accept this number of targets, or sparse rows."""
        wanted = {"several targets": targets > 1, "sparse": sparse}
        check_accepted(self.learner, [word for word, needed in wanted.items() if needed])

    def _check_paper(self) -> None:
        """Raise InputError if the settings do not suit the configuration of a paper."""
        if self.rank is None or self.intercept or self.scale is not None or self.covariance is not None or self.start:
            raise InputError(
                "the configuration paper takes a rank, has a start of its own and has neither intercepts nor feature "
                "scales; leave them out."
            )
        if self.relation != "replace-one-user":
            raise InputError("the configuration paper takes the number of users as public; use replace-one-user.")


@dataclass(frozen=True)
class Columns:
    """Names of the columns of the table a model was fitted on; empty where it was fitted on arrays."""

    user: str = ""
    targets: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # of numbers
    categorical: tuple[str, ...] = ()
    categories: tuple[Categories, ...] = ()  # of each categorical column: declared, or selected privately
    classes: Categories = ()  # of labels: declared, or selected privately; empty where targets are numbers
    missing: str = "impute"  # what is done about missing features, see `data.missing`
    indicators: tuple[int, ...] = ()  # positions in `features` of columns with an indicator of missing values
    weight: str = ""  # the column of weights, see `data.weights`; empty: none

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a file. Fields that later versions added are left out at their default."""
        plain = {name: default for name, default in _PLAIN.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name not in plain}

    @property
    def policy(self) -> Missing:
        """Return what is done about missing values."""
        return Missing(self.missing, self.indicators)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of all features: numbers, indicators of missing ones, values of categories."""
        return (
            *self.features,
            *make_indicator_names(self.features, self.indicators),
            *one_hot.list_names(self.by_category),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Columns:
        """Return the columns that a file holds; raise ValueError if they do not belong together."""
        classes = tuple(fields.get("classes", ()))  # models of numbers may come without
        if classes:
            check_classes(classes)
        others = {name: value for name, value in fields.items() if name != "classes"}
        columns = cls(**read_some_fields(cls, others, "columns", ()), classes=classes)
        if len(check_lists(columns.by_category, selected=True)) < len(columns.categorical):
            raise ValueError("it names a column twice")
        known = len(columns.features) or max(columns.policy.indicators, default=0) + 1  # refuses what is no policy
        if any(not 0 <= place < known for place in columns.indicators):
            raise ValueError("its indicators are of other columns")
        return columns

    @property
    def by_category(self) -> dict[str, Categories]:
        """Return the columns of categories with their lists."""
        return dict(zip(self.categorical, self.categories, strict=True))

    @property
    def named(self) -> dict[str, Categories]:
        """Return the columns of categories whose lists are not empty, with their lists."""
        return {name: listed for name, listed in self.by_category.items() if listed}


_PLAIN: dict[str, Any] = {"missing": "impute", "indicators": (), "weight": ""}


def make_loss(config: Config, columns: Columns) -> Loss | None:
    """Return what heads minimise, given the classes; None: squares.

    Args:
        config: the settings, which name the loss.
        columns: the columns, which list the classes.
    """
    if config.loss is None:
        return None
    if len(columns.classes) < 2:
        raise InputError("labels need a list of two or more classes, declared or selected privately.")
    return Loss(cast(LossName, config.loss), len(columns.classes))  # `check` looks at the name
