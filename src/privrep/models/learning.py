"""Learning the representation of a table: lists of categories and classes first, where they are not declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from privrep.data.categories import MOST_CLASSES, Categories
from privrep.errors import InputError
from privrep.linear.alternation import FOR_NUMBERS
from privrep.local.cores import one_core
from privrep.models.description import Columns, Config, make_loss
from privrep.models.folder import Described, ModelFolder
from privrep.models.model import CLASSES_PAGE, TABLE, Model, describe
from privrep.privacy.ledger import Budget
from privrep.privacy.population import Account
from privrep.privacy.protocol import Step, Users
from privrep.privacy.run import OnPage, Run
from privrep.users.holders import KeyHolders

KEYS_SHARE = 0.05  # of mu^2, and of delta: for all lists of categories and classes that are not declared together
KEYS_PAGE = "keys-"  # and a number: where a list of categories is selected


@dataclass(frozen=True)
class PendingColumns:
    """Users whose rows wait for lists of categories or classes, which are private until they are selected.

    `holders` tells, for each column without a declared list, which users hold which category. `labels` tells which
    users have which label, where no classes were declared. `make` makes the users once all lists are known, in the
    order of `Columns.categorical`.
    """

    holders: dict[str, KeyHolders]
    make: Callable[[Columns], Users]
    labels: KeyHolders | None = None


def learn(
    users: Users | PendingColumns,
    config: Config,
    *,
    folder: Path | None = None,
    columns: Columns | None = None,
    on_page: OnPage | None = None,
    public_map: Described | None = None,
    account: Account | None = None,
) -> Model:
    """Learn the representation privately. With a folder every charge and page is on disk before it is used.

    Calling it again on the same folder continues a run that was stopped: pages that stand are read, not asked again.
    `public_map` are the facts of the map that made the features, if one did. `on_page` is told each page that stands
    and the epsilon spent so far.
    Formal guarantee: the returned model without heads, and the folder, are (epsilon, delta)-DP as its ledger states.

    Args:
        users: who are asked, or users whose lists are not known yet.
        config: settings of the fit.
        folder: of the run; None: nothing is written.
        columns: of the table; None: there are no names.
        on_page: is called with the name of each page; None: nobody is told.
        public_map: facts of the map that made the features; None: columns are features.
        account: with the population ledger that the budget is reserved from; None: with none.
    """
    columns = columns or Columns()
    config.check()
    config.check_columns(columns)
    if not isinstance(users, PendingColumns):
        config.check(users.facts.features)
        config.check_users(users)
    if not isinstance(users, PendingColumns) or users.labels is None:
        make_loss(config, columns)  # refuses labels whose classes are neither there nor to be selected
    if folder is not None:
        claim(folder, config, columns, users, public_map)
    budget = Budget(config.epsilon, config.delta, config.relation)
    known = None if isinstance(users, PendingColumns) else users

    def on_release(page: str, step: Step | None) -> None:
        if on_page is not None:
            on_page(page, run.ledger.epsilon)

    opened = Run.open(known, budget, seed=config.seed, folder=folder, on_release=on_release, account=account)
    with one_core(), opened as run:
        if isinstance(users, PendingColumns):
            columns = _select(users, columns, run, may_be_empty=config.ratings)
            run = run.with_users(users.make(columns))
            config.check(run.users.facts.features)
            config.check_users(run.users)
        loss = make_loss(config, columns)
        representation = config.learner.learn(run, config.problem(run.users.facts.features, loss))
    return Model(config, representation, run.ledger.report(), run.ledger, run.billboard, columns, None, public_map)


def claim(
    folder: Path,
    config: Config,
    columns: Columns,
    users: Users | PendingColumns,
    public_map: Described | None = None,
) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run.

    Args:
        folder: of the run.
        config: settings of the fit.
        columns: of the table.
        users: who are asked, whose public sizes are compared.
        public_map: facts of the map that made the features; None: columns are features.
    """
    wanted = describe(config, columns, public_map)
    if not isinstance(users, PendingColumns):
        wanted["feature_count"] = users.facts.features
        if config.relation == "replace-one-user":
            wanted["user_count"] = users.facts.users  # a public fact under this relation only
    ModelFolder(folder).claim(TABLE, wanted)


def _select(users: PendingColumns, columns: Columns, run: Run, may_be_empty: bool) -> Columns:
    """Return the columns with all their lists; select the lists privately that were not declared.

    Lists may be empty where there is something to learn without them: ratings have levels.
    """
    share, budget = KEYS_SHARE / max(len(users.holders) + (users.labels is not None), 1), run.ledger.budget
    mu_squared, delta = share * budget.mu**2, share * budget.delta
    if users.labels is not None:
        columns = replace(columns, classes=_check_classes(run.select(CLASSES_PAGE, users.labels, mu_squared, delta)))
    lists = dict(zip(columns.categorical, columns.categories, strict=True))
    for number, (column, holders) in enumerate(users.holders.items(), start=1):
        lists[column] = run.select(f"{KEYS_PAGE}{number}", holders, mu_squared, delta)
    if users.holders and not columns.features and not any(lists.values()) and not may_be_empty:
        listed = ", ".join(map(repr, lists))
        raise InputError(
            f"no value of column {listed} is held by enough users to be named at this epsilon: declare the "
            "list of its values if it is public. What was spent on finding out is spent."
        )
    return replace(columns, categories=tuple(lists[name] for name in columns.categorical))


def _check_classes(classes: Categories) -> Categories:
    """Return the classes; raise InputError unless there are between two and MOST_CLASSES of them."""
    if 2 <= len(classes) <= MOST_CLASSES:
        return classes
    what = (
        "fewer than two classes are held by enough users to be named at this epsilon: declare them"
        if len(classes) < 2
        else f"there are {len(classes):,} classes, more than {MOST_CLASSES:,}: merge some, or declare those that matter"
    )
    raise InputError(f"{what} (--classes, classes=) if they are public. What was spent on finding out is spent.")


PAGES = FOR_NUMBERS.rounds + 8
"""About the most pages a fit asks for: what a progress bar counts to."""
