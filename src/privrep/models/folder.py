"""The folder of a model or of a run under way, the same for all kinds of models.

folder/run.json          what is asked for, while a run is under way: what a run must agree in to be continued
folder/model.json        settings and sizes, and the seal; written last, so a folder without it is a run under way
folder/ledger.jsonl      every charge
folder/billboard/        every release and what was computed from it
folder/private/          the heads, readable by the owner only; all the rest is safe to publish
Some kinds add a file: federation.json says who added the noise, texts.safetensors holds the public texts of pairs.

The seal in model.json holds the lines and the last chain of the ledger, and a hash of all else that model.json says.
The ledger holds a hash of every page. So a change to any of these files shows. private/ is not under the seal: a hash
of heads would tell of users' rows, and a copy that is published has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.boundary import read_json, refusing, say_why, writing
from privrep.errors import InputError, ResumeError
from privrep.heads.store import write_heads
from privrep.privacy.billboard import Billboard
from privrep.privacy.books import find_fault
from privrep.privacy.ledger import Budget, Ledger, read_ledger

if TYPE_CHECKING:
    from privrep.heads.heads import Heads
    from privrep.heads.margin_fitting import MarginHeads
    from privrep.heads.neural import OwnHeads

Described = dict[str, Any]
MODEL, RUN, LEDGER, BILLBOARD = "model.json", "run.json", "ledger.jsonl", "billboard"
SEAL = "books"  # in model.json: lines and last chain of the ledger as the model was finished, and a hash of the rest
_LEFT_OVER = "run.tmp"  # left by a claim that was killed before run.json had its name


@dataclass(frozen=True)
class ModelKind:
    """The differences between folders of one kind of model and another.

    `check` takes the content of model.json or run.json, and the file. It raises an InputError for another format, and
    ValueError, LookupError or TypeError where a part is missing or is something else.
    """

    format: str
    check: Callable[[Any, Path], None]
    compared: str  # what two runs may differ in, for a refusal
    names_difference: bool = True  # whether a refusal says where
    occupied: str = "is not an empty folder"
    completed: Callable[[Described], Described] = dict  # a run.json with the fields that later versions added


@dataclass(frozen=True)
class Contents:
    """The content of a model folder outside private/."""

    described: Described
    ledger: Ledger
    billboard: Billboard


@dataclass(frozen=True)
class ModelFolder:
    """A folder that is claimed by one run, and that holds its model once the run is finished."""

    path: Path

    @property
    def ledger(self) -> Path:
        """Return the path of the ledger."""
        return self.path / LEDGER

    @property
    def finished(self) -> bool:
        """Return whether there is a model.json: the folder holds a model."""
        return (self.path / MODEL).is_file()

    @property
    def begun(self) -> bool:
        """Return whether there is a run.json: the run is under way, or was stopped."""
        return (self.path / RUN).is_file()

    @property
    def empty(self) -> bool:
        """Return whether nothing is there but what a claim leaves behind when it is killed."""
        if not self.path.exists():
            return True
        return self.path.is_dir() and all(_is_left_over(file) for file in self.path.iterdir())

    @property
    def format(self) -> str:
        """Return the format that model.json names, else run.json; the empty string if neither does."""
        for name in (MODEL, RUN):
            try:
                described = read_json(self.path / name)
            except (OSError, ValueError):
                continue
            return str(described.get("format", "")) if isinstance(described, dict) else ""
        return ""

    def claim(self, kind: ModelKind, wanted: Mapping[str, Any]) -> None:
        """Make the folder of a run, or go on with the run that stands there.

        Raise ResumeError if that is another run. Raise InputError if the folder holds a model, or files of something
        else.

        Args:
            kind: of the model.
            wanted: the public facts of the run, as JSON has them.
        """
        if self.finished:
            raise InputError(
                f"{self.path} holds a finished model: load it, or choose another folder and spend another budget."
            )
        wanted = json.loads(json.dumps(wanted))
        if self.begun:
            with self.damage(RUN):
                stands = kind.completed(read_json(self.path / RUN))
            if stands != wanted:
                where = f" ({_find_difference(stands, wanted)})" if kind.names_difference else ""
                raise ResumeError(
                    f"{self.path} holds a run with other {kind.compared}{where}. Continue it with the same arguments, "
                    "or choose another folder."
                )
            return
        if not self.empty:
            raise InputError(f"{self.path} {kind.occupied} and holds no run of privrep. Choose another folder.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / RUN, wanted)

    def finish(self, described: Mapping[str, Any], heads: Heads | MarginHeads | OwnHeads | None = None) -> None:
        """Write the heads and, last, model.json into the folder of a run: from then on it is a model."""
        if heads is not None:
            write_heads(heads, self.path)
        seal = _make_seal(read_ledger(self.ledger), described)
        write_json(self.path / MODEL, {**described, **({} if seal is None else {SEAL: seal})})
        (self.path / RUN).unlink(missing_ok=True)

    def save(
        self,
        described: Mapping[str, Any],
        ledger: Ledger,
        billboard: Billboard,
        heads: Heads | MarginHeads | OwnHeads | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a model, all of it or nothing. Only a model is overwritten, and only if that is asked for.

        Args:
            described: the content of model.json.
            ledger: every charge.
            billboard: every release.
            heads: of the users; None: none are kept.
            overwrite: whether a model that stands there is replaced.
        """
        if self.path.exists() and not overwrite:
            raise InputError(f"{self.path} exists already. Choose another folder, or pass overwrite=True.")
        if self.path.exists() and not self.finished:
            raise InputError(f"{self.path} is not a model folder, so it is not overwritten. Choose another folder.")
        with self.replace() as new:
            ledger.write(new / LEDGER)
            billboard.write(new / BILLBOARD)
            ModelFolder(new).finish(described, heads)

    @contextmanager
    def replace(self) -> Iterator[Path]:
        """Yield a folder to write to that takes this one's place when all went well. Otherwise the old folder stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent))  # for the owner only
        new, old = temporary / "new", temporary / "old"
        try:
            new.mkdir()
            yield new
            os.chmod(new, 0o755)
            if self.path.exists():
                os.replace(self.path, old)
            os.replace(new, self.path)
        except BaseException:
            if old.exists() and not self.path.exists():
                os.replace(old, self.path)  # should even this fail, the old model stays where it is now
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(temporary, ignore_errors=True)

    def read(self, kind: ModelKind, page: str | None = None) -> Contents:
        """Read a model folder without its heads; raise InputError if it is damaged.

        Args:
            kind: the one that the folder must hold.
            page: of the billboard, which must be there; None: none in particular.
        """
        described = self.read_description(kind)
        billboard = self.read_billboard(page)
        return Contents(described, self.read_ledger(billboard), billboard)

    def read_description(self, kind: ModelKind) -> Described:
        """Read model.json, all of whose parts must be there."""
        if self.finished:
            return self.read_json(MODEL, kind)
        raise InputError(
            f"{self.path} holds a run that was not finished; call fit again with the same arguments to continue it."
            if self.begun
            else f"{self.path} is not a model folder: it has no model.json."
        )

    def read_json(self, name: str, kind: ModelKind) -> Described:
        """Read model.json or run.json, as a folder of this kind has them, without the seal."""
        with self.damage(name):
            described: Described = read_json(self.path / name)
            kind.check(described, self.path / name)
        return {key: value for key, value in described.items() if key != SEAL}

    def read_ledger(self, billboard: Billboard | None = None) -> Ledger:
        """Read the ledger; raise InputError if it is damaged, or does not agree with the billboard.

        Args:
            billboard: of this folder; None: it is read.
        """
        with self.damage(LEDGER):
            ledger = read_ledger(self.ledger)
            self.check_seal(ledger)
        billboard = self.read_billboard() if billboard is None else billboard
        with self.damage(BILLBOARD):
            if fault := find_fault(ledger, billboard, finished=self.finished):
                raise ValueError(fault)
        return ledger

    def check_seal(self, ledger: Ledger) -> None:
        """Raise ValueError unless model.json, if there is one, is what it was, and was written for this ledger."""
        if not self.finished:
            return
        described = read_json(self.path / MODEL)
        found, wanted = described.get(SEAL), _make_seal(ledger, described)
        if found != wanted and wanted and isinstance(found, dict) and {**found, _SAYS: wanted[_SAYS]} == wanted:
            raise InputError(
                f"{self.path} is damaged ({MODEL}: it does not say what it said when the model was finished); restore "
                "it from a copy."
            )
        if found != wanted:
            raise ValueError("it is not the ledger that the model was finished with")

    def read_ledger_so_far(self, budget: Budget, *, seeded: bool) -> Ledger:
        """Read the ledger; for a run that has not begun to spend, return an empty one of this budget.

        Args:
            budget: of the run.
            seeded: whether the run's noise is seeded.
        """
        return Ledger(budget, seeded=seeded) if self.unspent else self.read_ledger()

    @property
    def unspent(self) -> bool:
        """Return whether the run was stopped before it spent anything: it has neither a ledger nor a page."""
        begun = self.finished or (self.ledger.is_file() and self.ledger.stat().st_size > 0)
        return not begun and not any((self.path / BILLBOARD).glob("*"))

    def read_billboard(self, page: str | None = None) -> Billboard:
        """Read every page; `page` must be among them."""
        with self.damage(BILLBOARD):
            billboard = Billboard.read(self.path / BILLBOARD)
            if page is not None and page not in billboard:
                raise ValueError(f"there is no page {page!r} in it")
        return billboard

    @contextmanager
    def damage(self, part: str) -> Iterator[None]:
        """Turn whatever goes wrong in reading a part of the folder into one sentence that names both."""

        tell = self.tell_damage(part)
        try:
            with refusing(tell, (PermissionError,)):
                yield
        except InputError as error:
            if str(self.path) in str(error):
                raise  # says it already
            raise InputError(tell(say_why(error))) from None

    def tell_damage(self, part: str) -> Callable[[str], str]:
        """Return a function that makes a sentence about damage to a part of the folder, of the reason for it."""
        return lambda why: f"{self.path} is damaged ({part}: {why}); restore it from a copy."


_SAYS = "says"  # in the seal: a hash of what model.json says beside it


def _make_seal(ledger: Ledger, described: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what model.json holds of its ledger and of itself; None for a ledger without chains."""
    if ledger.seal is None:
        return None
    said = json.dumps(
        {name: json.loads(json.dumps(value)) for name, value in described.items() if name != SEAL}, sort_keys=True
    )
    return {**ledger.seal, _SAYS: hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}


def _is_left_over(file: Path) -> bool:
    """Return whether a file is what a killed claim leaves: a plain file of that name, and no link to another."""
    return file.name == _LEFT_OVER and file.is_file() and not file.is_symlink()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file as a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        os.replace(temporary, path)


def _find_difference(stands: Any, wanted: Mapping[str, Any], within: str = "") -> str:
    """Return the name of the first place where two descriptions differ.

    Args:
        stands: the description in the folder.
        wanted: the description of the run.
        within: begins the name: the keys around both.
    """
    if not isinstance(stands, dict):
        return within or RUN
    for key in (*wanted, *stands):
        if key not in stands or key not in wanted:
            return f"{within}{key}"
        if stands[key] != wanted[key]:
            inner = isinstance(wanted[key], dict) and isinstance(stands[key], dict)
            return _find_difference(stands[key], wanted[key], f"{within}{key}.") if inner else f"{within}{key}"
    return "nothing"
