"""Learning the representation of a table: lists of categories and classes first, where they are not declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from privrep.data.categories import MOST_CLASSES, Categories
from privrep.errors import InputError
from privrep.linear.alternation import AlternationSettings
from privrep.linear.methods.factorization import private_factorization
from privrep.linear.registry import METHODS
from privrep.linear.starts import INITIALISERS
from privrep.linear.transform import declared_frame
from privrep.local.losses import Loss
from privrep.local.representation import Representation
from privrep.models.description import Columns, Config, loss_of
from privrep.models.folder import ModelFolder
from privrep.models.model import CLASSES_PAGE, TABLE, Model, describe
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource, secure_noise, simulated_noise
from privrep.privacy.release import Run, select_page
from privrep.users.holders import KeyHolders
from privrep.users.summing import Users

KEYS_SHARE = 0.05  # of mu^2, and of delta: for all lists of categories and classes that are not declared together


@dataclass(frozen=True)
class PendingColumns:
    """Users whose rows wait for lists of categories or classes, which are private until they are selected.

    `holders` has, by column, who holds which category, where no list was declared; `labels` who has which label, where
    no classes were. `make` makes the users once all lists are known, in the order of `Columns.categorical`.
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
    on_page: Callable[[str], None] | None = None,
) -> Model:
    """Learn the representation privately. With a folder every charge and page is on disk before it is used.

    Calling it again on the same folder continues a run that was stopped: pages that stand are read, not asked again.
    Formal guarantee: the returned model without heads, and the folder, are (epsilon, delta)-DP as its ledger states.
    """
    columns = columns or Columns()
    config.check()
    if not isinstance(users, PendingColumns):
        config.check(users.features)
        config.check_users(users)
    if not isinstance(users, PendingColumns) or users.labels is None:
        loss_of(config, columns)  # refuses labels whose classes are neither there nor to be selected
    if folder is not None:
        claim(folder, config, columns, users)
    ledger = Ledger(
        Budget(config.epsilon, config.delta, config.relation),
        seeded=config.seed is not None,
        path=folder / "ledger.jsonl" if folder else None,
    )
    try:
        billboard = Billboard(folder / "billboard" if folder else None)
        noise = secure_noise if config.seed is None else simulated_noise(config.seed)
        page_done = on_page or (lambda page: None)
        if isinstance(users, PendingColumns):
            columns = _select(users, columns, ledger, billboard, noise, page_done)
            users = users.make(columns)
            config.check(users.features)
            config.check_users(users)
        loss = loss_of(config, columns)
        representation = _represent(Run(users, ledger, billboard, noise, page_done), config, loss)
    finally:
        ledger.close()
    return Model(config, representation, ledger.report(), ledger, billboard, columns)


def claim(folder: Path, config: Config, columns: Columns, users: Users | PendingColumns) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run."""
    wanted = describe(config, columns)
    if not isinstance(users, PendingColumns):
        wanted["feature_count"] = users.features
        if config.relation == "replace-one-user":
            wanted["user_count"] = users.count  # a public fact under this relation only
    ModelFolder(folder).claim(TABLE, wanted)


def _select(
    users: PendingColumns,
    columns: Columns,
    ledger: Ledger,
    billboard: Billboard,
    noise: NoiseSource,
    on_page: Callable[[str], None],
) -> Columns:
    """Return the columns with all their lists; select those privately that were not declared."""
    share = KEYS_SHARE / max(len(users.holders) + (users.labels is not None), 1)
    mu_squared, delta = share * ledger.budget.mu**2, share * ledger.budget.delta

    def selected(page: str, holders: KeyHolders) -> Categories:
        listed = select_page(page, holders, mu_squared, delta, ledger, billboard, noise)
        on_page(page)
        return listed

    if users.labels is not None:
        columns = replace(columns, classes=_enough(selected(CLASSES_PAGE, users.labels)))
    lists = dict(zip(columns.categorical, columns.categories, strict=True))
    for number, (column, holders) in enumerate(users.holders.items(), start=1):
        lists[column] = selected(f"keys-{number}", holders)
        if not lists[column]:
            raise InputError(
                f"no value of column {column!r} is held by enough users to be named at this epsilon: declare the "
                "list of its values if it is public. What was spent on finding out is spent."
            )
    return replace(columns, categories=tuple(lists[name] for name in columns.categorical))


def _enough(classes: Categories) -> Categories:
    if 2 <= len(classes) <= MOST_CLASSES:
        return classes
    what = (
        "fewer than two classes are held by enough users to be named at this epsilon: declare them"
        if len(classes) < 2
        else f"there are {len(classes):,} classes, more than {MOST_CLASSES:,}: merge some, or declare those that matter"
    )
    raise InputError(f"{what} (--classes, classes=) if they are public. What was spent on finding out is spent.")


def _represent(run: Run, config: Config, loss: Loss | None) -> Representation:
    method = METHODS[config.method]
    if config.ratings:
        return private_factorization(run, config.rank)
    if config.configuration == "paper":
        return method.paper(run, config.rank)
    frame = declared_frame(config.scale, config.covariance, run.users.features)
    start = None if config.start is None else INITIALISERS[config.start]
    labels = {} if loss is None else {"loss": loss}
    return method.default(run, config.rank, intercept=config.intercept, frame=frame, initialiser=start, **labels)


PAGES = AlternationSettings().rounds + 4
"""About the most pages a fit asks for: what a progress bar counts to."""
