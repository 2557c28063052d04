"""The accounts of a node's runs with the population ledger of its own people.

With noise of its own, a node reserves what the server may learn, and its own charges count. Where the server adds the
noise, the node reserves the budget of the run, and believes the charges that come with the model.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.federated.agreement import Agreement
from privrep.federated.task import Task
from privrep.federated.wire.messages import Question
from privrep.privacy.bounds import LossBound
from privrep.privacy.ledger import Budget, Ledger, read_ledger
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers


@dataclass(frozen=True)
class NodeAccounts:
    """The accounts of all runs of one node.

    Args:
        folder: of the node.
        agreed: the only run to take part in; None trusts the server.
        population: the ledger of the node's people; None: there is none, and nothing is reserved.
    """

    folder: Path
    agreed: Agreement | None
    population: PopulationLedger | None

    def make_budget(self, task: Task, noise: Any) -> Budget:
        """Return what a run may spend here: all of its budget, or what this node's own noise may let the server learn.

        Args:
            task: of the run.
            noise: the server's plan; None: the server adds the noise.
        """
        if noise is not None and self.agreed is not None and self.agreed.noise is not None:
            noise = self.agreed.noise
        return Budget(task.epsilon if noise is None else float(noise["epsilon"]), task.delta, task.relation)

    def check_room(self, task: Task, run: str, noise: Any) -> None:
        """Raise BudgetExceeded if the population ledger has no room for a run, before a row is read.

        Args:
            task: of the run.
            run: its name.
            noise: the server's plan; None: the server adds the noise.
        """
        account = self.open(run)
        if account is not None:
            if noise is None:
                _refuse_samples(task)
            account.check(self.make_budget(task, noise), self._find_ledger(run), seeded=task.seed is not None)

    def open(self, run: str, users: Any = None) -> Account | None:
        """Return the account of a run; None where the node has no population ledger.

        Args:
            run: its name.
            users: of the node, once they are open.
        """
        if self.population is None:
            return None
        ids = users.table.ids if isinstance(users, InMemoryUsers) else None
        what = f"federated run {run}, node folder {self.folder}"
        return Account(self.population, what, None if ids is None else lambda: ids, lasts=True)

    def reserve(self, task: Task, run: str, account: Account) -> None:
        """Reserve the budget of a run that the server adds the noise to, and is trusted to keep to.

        Raise InputError if the run asks secret samples, or is over, so that its rows stay closed.

        Args:
            task: of the run.
            run: its name.
            account: as `open` returned it.
        """
        _refuse_samples(task)
        path = self._find_ledger(run)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        with closing(
            Ledger(self.make_budget(task, None), seeded=task.seed is not None, path=path, account=account)
        ) as own:
            if own.over:
                raise InputError(f"the run {run} is over: what it had not spent went back to the population ledger.")

    def check_question(self, question: Question) -> None:
        """Raise InputError if a server that adds the noise asks for more than the population ledger counts: plain sums.

        Args:
            question: as it came.
        """
        if question.chosen is not None or any(isinstance(bound, LossBound) for bound in question.bounds.values()):
            raise InputError(
                "a node's population ledger counts sums over all users or groups. Samples and choices of the server "
                "are refused; join without --population to take part."
            )

    def settle(self, run: str, model: Path, own: Run | None) -> None:
        """Return what a run has not spent to the population ledger: its own noise, or the charges of its model.

        Args:
            run: its name.
            model: the folder of the model that came.
            own: the run of this node's own noise, if it is open.
        """
        if self.population is None:
            return
        if own is not None:
            own.ledger.finish()
            return
        path = self._find_ledger(run)
        told = read_ledger(model / "ledger.jsonl").entries.charges if path.parent.name == "accounts" else None
        self.population.settle(read_ledger(path), told)

    def _find_ledger(self, run: str) -> Path:
        """Return the file of this node's own ledger of a run, which may not be there yet."""
        own = self.folder / "noise" / run / "ledger.jsonl"
        return own if own.is_file() else self.folder / "accounts" / f"{run}.jsonl"


def _refuse_samples(task: Task) -> None:
    """Raise InputError if the server of a task draws secret samples of users."""
    if task.rate < 1:
        raise InputError(
            "a node's population ledger cannot count secret samples that the server draws: join without --population, "
            "or ask the server for a rate of 1."
        )
