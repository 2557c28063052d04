"""Inspection of a folder of any kind of model, finished or not. It needs no PyTorch, and changes nothing in the
folder."""

from __future__ import annotations

from pathlib import Path

from privrep.boundary import read_json
from privrep.errors import InputError
from privrep.models.description import Columns, Config
from privrep.models.folder import MODEL, RUN, ModelFolder
from privrep.models.margin import inspect_margin
from privrep.models.model import load
from privrep.models.networks import inspect_network
from privrep.models.pairs import inspect_pairs
from privrep.models.sections import Inspection
from privrep.models.spending import find_share_spent, list_releases
from privrep.models.words import TableFacts, describe_shared, describe_sizes, make_table_json, make_table_sections
from privrep.privacy.accounting import total_mu
from privrep.privacy.events import event_to_json
from privrep.privacy.ledger import Budget

_BY_FORMAT = {  # all others are tables
    "privrep-neural": inspect_network,
    "privrep-clip": inspect_pairs,
    "privrep-margin": inspect_margin,
}


def inspect_folder(path: Path) -> Inspection:
    """Return what a model folder, or the folder of a run that was not finished, says about itself."""
    folder = ModelFolder(path)
    with folder.damage(MODEL if folder.finished else RUN):
        return _BY_FORMAT.get(folder.format.partition("/")[0], _inspect_table)(folder)


def _inspect_table(folder: ModelFolder) -> Inspection:
    """Return what a folder of tables says about itself."""
    found = read_table_facts(folder.path)
    report, spent = found.privacy, list_releases(found.privacy)
    events = [
        {"name": each.name, **event_to_json(event), "share": each.share}
        for each, (_, event) in zip(spent, report.events, strict=True)
    ]
    return Inspection(
        found.folder,
        found.finished,
        report,
        find_share_spent(report),
        spent,
        make_table_sections(found),
        events,
        make_table_json(found),
        mu=total_mu(event for _, event in report.events),
        shared=describe_shared(found),
        sizes=describe_sizes(found),
    )


def read_table_facts(path: Path) -> TableFacts:
    """Return the facts of a folder of tables, finished or not; raise InputError if it is none."""
    folder = ModelFolder(path)
    if folder.finished:
        model = load(path)
        users = None if model.heads is None else len(model.heads.ids)
        facts = (model.config, model.columns, model.privacy, model.representation, users, model.public_map)
        return TableFacts(str(path), True, *facts)
    if not folder.begun:
        missing = "is a file" if path.exists() else "does not exist"
        what = "has no model.json and no run.json" if path.is_dir() else missing
        raise InputError(f"{path} is not a folder of privrep: it {what}.")
    with folder.damage(RUN):
        described = read_json(path / RUN)
        config, columns = Config.from_json(described["config"]), Columns.from_json(described["columns"])
    budget = Budget(config.epsilon, config.delta, config.relation)
    ledger = folder.read_ledger_so_far(budget, seeded=config.seed is not None)
    return TableFacts(str(path), False, config, columns, ledger.report(), None, None, described.get("public_map"))
