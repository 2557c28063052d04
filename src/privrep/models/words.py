"""Sentences of a table's model folder about itself, for people who have not read the papers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from privrep.local.prior import HeadPrior, LabelPrior
from privrep.local.representation import Representation
from privrep.models.description import Columns, Config
from privrep.models.folder import Described
from privrep.models.gains import describe_heads, find_family, make_heads_json
from privrep.models.model import CLASSES_PAGE
from privrep.models.promise import describe_rest
from privrep.models.rating_words import describe_ratings, make_ratings_json
from privrep.models.sections import COVERED, Section, describe_unprotected, make_privacy_sections, say_classes
from privrep.privacy.events import Selection
from privrep.privacy.report import PrivacyReport

OTHER_LABELS = "Other labels are ignored; the features of those rows still count for scales and users' means."


@dataclass(frozen=True)
class TableFacts:
    """Facts of a folder of tables, finished or not. All are public, except for `users`."""

    folder: str
    finished: bool
    config: Config
    columns: Columns
    privacy: PrivacyReport
    representation: Representation | None  # None: the run is not finished
    users: int | None  # users with heads in private/; None where there are none
    public_map: Described | None = None  # how features were made of rows; None: columns are features

    @property
    def selections(self) -> int:
        """Return how many lists of values of features were selected privately."""
        events = [event for name, event in self.privacy.events if not name.startswith(f"{CLASSES_PAGE}/")]
        return sum(isinstance(event, Selection) for event in events)


def make_table_sections(found: TableFacts) -> tuple[Section, ...]:
    """Return what is protected, against whom, under which relation, what is not, and what was learned."""
    classes = [Section("The classes", tuple(describe_classes(found)))] if found.config.loss is not None else []
    learned, heads = found.representation, []
    if learned is not None and learned.prior is not None and learned.gains is not None:
        heads = [Section("The heads", tuple(describe_heads(learned, found.columns, found.privacy)))]
    elif learned is not None and learned.serves_newcomers and learned.gains is not None:
        heads = [Section("The heads", tuple(describe_ratings(learned)))]
    rest = describe_rest(found.privacy) if found.finished else ""
    return (
        *make_privacy_sections(found.privacy, found.folder, COVERED, more=(rest,) if rest else ()),
        describe_unprotected(found.privacy, _describe_declared(found)),
        Section("The method", tuple(describe_method(found))),
        *classes,
        Section("The representation", tuple(describe_representation(found))),
        *heads,
    )


def make_table_json(found: TableFacts) -> dict[str, Any]:
    """Return the facts of a table's model for machines."""
    learned = found.representation
    heads = None
    if learned is not None:
        heads = (
            make_heads_json(learned, found.columns, found.privacy)
            if learned.ratings is None
            else make_ratings_json(learned)
        )
    return {
        "config": asdict(found.config),
        "columns": found.columns.to_json(),
        "representation": None
        if learned is None
        else {
            "rank": learned.basis.shape[1],
            "features": learned.basis.shape[0],
            "scale": learned.scale.tolist(),
            "error": learned.error,
            "mean_squared_sine": learned.mean_error,
        },
        **({} if heads is None else {"heads": heads}),
        **({} if found.public_map is None else {"public_map": found.public_map}),
        "users_with_heads": found.users,
    }


def describe_shared(found: TableFacts) -> str:
    """Return what was learned for all, in a few words; the empty string where the run is not finished."""
    learned = found.representation
    if learned is None:
        return ""
    if found.config.ratings:
        return f"offsets of {learned.basis.shape[0]:,} items, and {learned.basis.shape[1]:,} factors of them"
    prior = ", and the prior of heads" if learned.prior is not None else ""
    return f"a representation of rank {learned.basis.shape[1]:,}{prior}"


def describe_sizes(found: TableFacts) -> str:
    """Return how many users and features there are, as far as the folder tells, in a few words."""
    columns, learned = found.columns, found.representation
    users = "no heads of users here" if found.users is None else describe_users(found)
    if learned is None:
        return f"{users}; {len(columns.feature_names):,} features so far"
    return f"{users}; {len(learned.basis):,} {'items' if found.config.ratings else 'features'}"


def describe_users(found: TableFacts) -> str:
    """Return how many users have heads in the folder, in words."""
    private = "" if found.privacy.relation == "replace-one-user" else " (not private: for your eyes)"
    return f"heads of {found.users:,} users in private/{private}"


def _describe_declared(found: TableFacts) -> list[str]:
    """Return a sentence for each public fact that the fit was given."""
    items = []
    if found.config.scale is not None:
        items.append("The declared feature scales: they were taken as public facts, not computed from the users.")
    if found.config.covariance is not None:
        items.append("The declared covariance: it was taken as a public fact, not computed from the users.")
    if declared := _name_declared_lists(found):
        items.append(f"The declared {declared}: taken as public facts, not computed from the users.")
    return items


def _name_declared_lists(found: TableFacts) -> str:
    """Return the lists of values that were not selected privately, in words; the empty string if there are none."""
    names = found.columns.categorical
    if not found.finished:
        names = tuple(name for name, listed in found.columns.by_category.items() if listed)
    elif found.selections:  # the billboard says which of several were selected
        count = len(names) - found.selections
        return "" if not count else "list of values" if count == 1 else "lists of values"
    if not names:
        return ""
    if found.config.ratings:
        return "list of items"
    return f"{'list' if len(names) == 1 else 'lists'} of values of {', '.join(names)}"


def describe_method(found: TableFacts) -> list[str]:
    """Return sentences about what was fitted, to which columns."""
    c, columns = found.config, found.columns
    lines = [c.learner.title]
    if c.configuration == "paper":
        lines.append("In the configuration of its paper, with its constants: for comparison.")
    if c.start is not None:
        lines.append(f"Start: {c.start}, as asked for.")
    if found.public_map is not None:
        map_ = found.public_map
        lines.append(f"Features of rows of {int(map_['width']):,} numbers, by a public map: {map_['words']}.")
    if len(columns.targets) > 1:
        lines.append(f"A head for each of the targets {', '.join(columns.targets)}, on one representation for all.")
    return [*lines, *_describe_lists(found), *_describe_rows(columns)]


def _describe_rows(columns: Columns) -> list[str]:
    """Return sentences about missing values and weights of rows, where they are not what every model has."""
    lines, named = [], columns.feature_names[len(columns.features) :][: len(columns.indicators)]
    if columns.missing == "drop":
        lines.append("Rows of the fit that missed a feature were left out; rows to predict are filled.")
    elif columns.missing == "refuse":
        lines.append("Missing features are refused.")
    if named:
        lines.append(f"Features that say where a value was missing: {', '.join(named)}.")
    if columns.weight:
        lines.append(f"Weights of rows: column {columns.weight}; rows are thinned by them, inside each user.")
    return lines


def _describe_lists(found: TableFacts) -> list[str]:
    """Return a sentence about the lists of values and where they came from."""
    columns = found.columns
    if not columns.categorical:
        return []
    lists = columns.by_category.items()
    known = found.finished
    sizes = [f"{name} ({len(listed):,})" if listed or known else f"{name} (not declared)" for name, listed in lists]
    if not found.finished:
        how = "those that are not declared are selected privately"
    elif not found.selections:
        how = "they were declared"
    elif found.selections == len(columns.categorical):
        how = "selected privately, from those that enough users hold"
    else:
        how = "some declared, the others selected privately, from values that enough users hold"
    other = "An item that is not listed" if found.config.ratings else "A value that is not listed"
    effect = "is predicted with the user's level." if found.config.ratings else "has no feature."
    return [f"Lists of values are public: {', '.join(sizes)}; {how}. {other} {effect}"]


def describe_classes(found: TableFacts) -> list[str]:
    """Return sentences about the classes and how they were found."""
    classes, c = found.columns.classes, found.config
    selected = any(name.startswith(f"{CLASSES_PAGE}/") for name, _ in found.privacy.events)
    if not classes:
        return ["Not declared: they are selected privately, from the labels that enough users have."]
    how = (
        "Selected privately, from the labels that enough users have: which others occur stays private."
        if selected and found.finished
        else "Declared (a column of booleans declares False and True): taken as a public fact, not computed from the "
        "users, and so not protected."
    )
    shape = (
        "Outputs: one, whose sign decides."
        if len(classes) == 2
        else "Outputs: one for each class; the largest decides."
    )
    return [f"{say_classes(classes)}.", how, f"Loss: {c.loss}. {shape} {OTHER_LABELS}"]


def describe_representation(found: TableFacts) -> list[str]:
    """Return sentences about the rank, the coordinates and the error of the representation."""
    if found.representation is None:
        return [
            "Not there yet: the run was not finished. Repeat the same `privrep fit` command to continue it; what was "
            "spent is not spent again."
        ]
    learned = found.representation
    d, k = learned.basis.shape
    asked = found.config.rank
    chosen = (
        found.config.learner.automatic_rank
        if asked is None
        else "as asked for"
        if asked == k
        else f"of {asked} at most"
    )
    heads = "no heads here" if found.users is None else describe_users(found)
    return [
        f"Rank {k} ({chosen}), {d:,} {'items' if found.config.ratings else 'features'}, {heads}.",
        *_describe_frame(found, learned),
        _judge(learned),
    ]


def _describe_frame(found: TableFacts, learned: Representation) -> list[str]:
    """Return sentences about the coordinates in which features were seen."""
    c, transform = found.config, learned.transform
    if c.ratings:
        return ["Offsets and factors are in units of a user's own spread of ratings; no range of ratings was assumed."]
    if c.configuration == "paper":
        return ["Features as they come: the paper's method looks for neither scales nor correlations."]
    declared = c.scale is not None or c.covariance is not None
    origin = "declared as public" if declared else "found by a charged release"
    lines = [f"Feature scales from {transform.scale.min():.4g} to {transform.scale.max():.4g}, {origin}."]
    if transform.whitening is not None:
        origin = "the declared covariance" if declared else "a charged release of their second moments"
        lines.append(
            f"Correlations of the features were taken out (whitening) by {origin}, so that noise of one size does the "
            "same harm in every direction."
        )
    elif any(name.startswith("covariance/") for name, _ in found.privacy.events):
        lines.append("Correlations of the features were looked for; what was seen of them is small or within noise.")
    elif any(name == "frequencies/frequencies" for name, _ in found.privacy.events):
        lines.append("Scales allow for how often a feature occurs, so that rare ones count as much as common ones.")
    if transform.target_scale is not None:
        lines.append("Targets were brought to a common size, found by the same release as the feature scales.")
    return lines


def _judge(learned: Representation) -> str:
    """Return how far the representation was found; for heads with a prior, whether they use it at all."""
    if learned.serves_newcomers and learned.ratings is not None and not learned.basis.shape[1]:
        return "Users' tastes were not asked for, or not seen: rank 0. What factors cost was spent on offsets."
    if learned.prior is not None and (unused := _explain_unused(learned, learned.prior)):
        return unused
    error = (
        f"Estimated error: mean squared sine {learned.mean_error:.2g} (0 is exact, 1 is nothing learned), from the "
        "noise of the releases alone."
    )
    if learned.gains is not None and learned.learned_nothing:
        return f"{error} That users gain by it was not seen."
    if learned.gains is None and learned.mostly_noise:
        alone = "what they can do alone" if learned.ratings is None else "their means and the items' offsets"
        return f"{error} It is mostly noise: users fall back on {alone}. It takes more users or a larger epsilon."
    if learned.mean_error < 0.03:
        return f"{error} The representation was found."
    return f"{error} It was found roughly: more users or a larger epsilon would help."


def _explain_unused(learned: Representation, prior: HeadPrior | LabelPrior) -> str:
    """Return why heads do not use the representation; the empty string where they do."""
    family = find_family(learned, prior)
    if family == 0 and not learned.basis.shape[1]:
        return "Users' slopes were not seen to differ: rank 0."
    if family == 0:
        return "Users' slopes were not seen to differ along it: heads do not use it."
    if family == 2 and not learned.basis.shape[1]:
        return "Users' slopes differ in all features, not along a few directions: rank 0."
    return "Heads do not use it: slopes of users' own in all features did better." if family == 2 else ""
