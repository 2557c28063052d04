"""Folders of runs under way and of models: claimed by one run, written as a whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from privrep.errors import InputError, ResumeError
from privrep.models import model as models


def claim_folder(folder: Path, wanted: dict[str, Any], what: str) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run; `what` might differ."""
    if (folder / "model.json").is_file():
        raise InputError(
            f"{folder} holds a finished model: load it, or choose another folder and spend another budget."
        )
    path = folder / "run.json"
    if path.is_file():
        with models.damage_explained(folder, "run.json"):
            stands = json.loads(path.read_text())
        if stands != wanted:
            raise ResumeError(
                f"{folder} holds a run with other {what} ({_differs(stands, wanted)}). Continue it with the same "
                "arguments, or choose another folder."
            )
        return
    others = [] if not folder.is_dir() else [file.name for file in folder.iterdir() if file.name != "run.tmp"]
    if others or (folder.exists() and not folder.is_dir()):  # run.tmp: whoever wrote run.json was killed
        raise InputError(f"{folder} is not an empty folder and holds no run of privrep. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    models.write_json(path, wanted)


def finish_folder(folder: Path, described: dict[str, Any]) -> None:
    """Write model.json into the folder of a run: from then on it is a model."""
    models.write_json(folder / "model.json", described)
    (folder / "run.json").unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to that becomes `folder` when all went well; what stood there stays when not.
    Only a model is overwritten, and only if that is asked for."""
    if folder.exists() and not overwrite:
        raise InputError(f"{folder} exists already. Choose another folder, or pass overwrite=True.")
    if folder.exists() and not (folder / "model.json").is_file():
        raise InputError(f"{folder} is not a model folder, so it is not overwritten. Choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:  # for the owner only
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        new.mkdir(mode=0o755)
        yield new
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except BaseException:
            if old.exists():
                os.replace(old, folder)
            raise


def _differs(stands: Any, wanted: Mapping[str, Any], within: str = "") -> str:
    """The first place where two descriptions differ."""
    if not isinstance(stands, dict):
        return within or "run.json"
    for key in (*wanted, *stands):
        if key not in stands or key not in wanted:
            return f"{within}{key}"
        if stands[key] != wanted[key]:
            inner = isinstance(wanted[key], dict) and isinstance(stands[key], dict)
            return _differs(stands[key], wanted[key], f"{within}{key}.") if inner else f"{within}{key}"
    return "nothing"
