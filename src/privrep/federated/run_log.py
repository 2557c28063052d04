"""Files that the operator of a server keeps beside a run: its name, who takes part, and what happened."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privrep.boundary import read_json, refusing, writing
from privrep.errors import InputError
from privrep.federated.config import FederationSettings
from privrep.federated.task import Task
from privrep.federated.wire.users import read_facts
from privrep.privacy.protocol import Facts

Say = Callable[[str], None]


class RunLog:
    """The operator's files of one run, in MODEL.federation/: run.json, roster.json and the log."""

    def __init__(self, folder: Path, say: Say) -> None:
        """Make the folder beside the model's, readable by its owner alone.

        Args:
            folder: the folder of the model.
            say: called with every line of the log, for the operator's screen.
        """
        self._said = say
        self.place = folder.with_name(folder.name + ".federation")
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.place, 0o700)
        self._model = folder
        self.run = ""

    def claim(self, task: Task, settings: FederationSettings) -> None:
        """Name a new run of this folder, or continue the run that stands there.

        A run stands for one task and one plan for the noise. InputError says if the folder holds a run with others.
        """
        path = self.place / "run.json"
        asked = json.loads(
            json.dumps({"task": task.to_json(), "noise": settings.noise, "noise_nodes": settings.noise_nodes})
        )
        if path.is_file():
            with refusing(lambda why: f"{path} is damaged ({why}); restore it from a copy."):
                stands = dict(read_json(path))
                stands["run"], known = str(stands["run"]), {name: stands[name] for name in asked}
            if known != asked:
                raise InputError(
                    f"{self._model} holds a run with other settings. Continue it with the same configuration, or "
                    "choose another folder."
                )
            self.run = stands["run"]
            self.say("going on with the run that stands")
            return
        seed = f"{time.time_ns()} {os.getpid()} {self._model.resolve()}"  # a name, not a secret
        self.run = hashlib.sha256(seed.encode()).hexdigest()[:16]
        write_private(path, {"run": self.run, **asked})

    def read_roster(self) -> dict[str, Facts]:
        """Return the facts of each node that takes part, by name; nothing if no roster was kept yet."""
        path = self.place / "roster.json"
        if not path.is_file():
            return {}
        with refusing(lambda why: f"{path} is damaged ({why}); restore it from a copy."):
            return {name: read_facts(fields) for name, fields in read_json(path).items()}

    def keep_roster(self, roster: Mapping[str, Facts]) -> None:
        """Write the facts of each node that takes part, so that a restarted server goes on with the same nodes."""
        write_private(self.place / "roster.json", {name: asdict(facts) for name, facts in sorted(roster.items())})

    def say(self, what: str) -> None:
        """Append a line to the log with the time, and show it to the operator."""
        with open(self.place / "log", "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n")
        self._said(what)


def write_private(path: Path, data: Mapping[str, Any]) -> None:
    """Write data as JSON for the owner's eyes alone, whole and synced to the disk, or not at all."""
    temporary = path.with_suffix(".tmp")
    with (
        writing(path),
        open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file,
    ):
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
