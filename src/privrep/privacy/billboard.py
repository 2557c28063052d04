"""The public record of a run: releases, and values computed from releases and public facts. Append-only.

It is saved, shown, resumed from, and safe to publish. Posting is atomic: a file is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from privrep.boundary import parse_json, refusing, writing
from privrep.errors import InputError
from privrep.typing import Array


@dataclass(frozen=True)
class Release:
    """A noisy sum and how noisy it is. Every field is public."""

    value: Array
    sigma: float  # standard deviation of the noise in each coordinate
    sensitivity: float
    noise_multiplier: float


@dataclass(frozen=True)
class Selected:
    """Keys that may be named, sorted, and their noisy counts. Every field is public."""

    keys: tuple[int | str, ...]
    counts: Release
    threshold: float  # every count is above it


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and how. Every field is public; nothing of the losses is here."""

    index: int
    candidates: int
    epsilon: float
    scale: float  # of the exponential mechanism, in losses: larger is noisier


@dataclass(frozen=True)
class Iterated:
    """The state in which an iteration ended, and how noisy each statistic was at a step.

    `noise` holds, for each statistic, `size` (coordinates), `sigma`, `sensitivity` and `noise_multiplier`. Every field
    is public. The steps themselves are not here.
    """

    steps: int
    state: Mapping[str, Array]
    noise: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Post:
    """One page of the billboard: the releases of one pass over the users, or values derived from earlier pages."""

    name: str
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]  # JSON: sigmas of releases, or public facts

    @property
    def digest(self) -> str:
        """Return a hash of all that the page says."""
        found = hashlib.blake2b(f"{self.name}\n{json.dumps(self.facts, sort_keys=True)}".encode(), digest_size=16)
        for key in sorted(self.arrays):
            value = np.ascontiguousarray(self.arrays[key], dtype=np.float64)
            found.update(f"\n{key} {value.shape}\n".encode() + value.tobytes())
        return found.hexdigest()


class Billboard:
    """Pages in order. With a folder every page is a file there and survives the process."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open a billboard, with the pages that stand in the folder.

        Drafts of pages that were never posted are deleted. A folder of None keeps pages in memory.
        """
        self._pages: dict[str, Post] = {}
        self._folder = folder
        self._lock = threading.RLock()  # a page is given its number and written by one thread at a time
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in _drafts_folder(folder).glob("*" + UNPOSTED):
                leftover.unlink()
            self._load(folder)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: the pages, which stay in memory."""
        return {"_pages": dict(self._pages), "_folder": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @classmethod
    def read(cls, folder: Path) -> Billboard:
        """Return the pages of a folder without touching it: pages posted to this billboard stay in memory."""
        billboard = cls()
        billboard._load(folder)
        return billboard

    def _load(self, folder: Path) -> None:
        """Read all pages of a folder, in the order of their numbers."""
        for path in sorted(folder.glob("*.safetensors")):
            page = _read_page(path)
            self._pages[page.name] = page

    def __contains__(self, name: str) -> bool:
        return name in self._pages

    def __getitem__(self, name: str) -> Post:
        return self._pages[name]

    def __iter__(self) -> Iterator[Post]:
        return iter(self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)

    def releases(self, name: str) -> dict[str, Release]:
        """Return the releases of a page, by statistic."""
        page = self._pages[name]
        return {key: Release(page.arrays[key], **facts) for key, facts in page.facts["releases"].items()}

    def post_releases(self, name: str, releases: Mapping[str, Release], *, simulation: bool = False) -> None:
        """Publish the releases that `release` made. Called by `Run.release` and nothing else.

        Args:
            name: of the page.
            releases: by statistic.
            simulation: whether the run is seeded, so that the page is marked as not private.
        """
        facts = {k: {f: v for f, v in asdict(r).items() if f != "value"} for k, r in releases.items()}
        marked = {"releases": facts, **({"simulation": True} if simulation else {})}
        self._post(Post(name, {k: r.value for k, r in releases.items()}, marked))

    def read_selection(self, name: str) -> Selected:
        """Return the keys that the selection of this page kept."""
        page = self._pages[name]
        facts = page.facts["selection"]
        return Selected(tuple(facts["keys"]), Release(page.arrays["counts"], **facts["counts"]), facts["threshold"])

    def post_selection(self, name: str, selected: Selected, *, simulation: bool = False) -> None:
        """Publish the keys that `select` kept. Called by `Run.select` and nothing else.

        Arguments are as in `post_releases`.
        """
        counts = {f: v for f, v in asdict(selected.counts).items() if f != "value"}
        facts = {"keys": list(selected.keys), "counts": counts, "threshold": selected.threshold}
        marked = {"selection": facts, **({"simulation": True} if simulation else {})}
        self._post(Post(name, {"counts": selected.counts.value}, marked))

    def read_choice(self, name: str) -> Choice:
        """Return the choice of a page."""
        return Choice(**self._pages[name].facts["choice"])

    def post_choice(self, name: str, choice: Choice, *, simulation: bool = False) -> None:
        """Publish the index that `choose` drew. Called by `Run.choose` and nothing else.

        Arguments are as in `post_releases`.
        """
        self._post(Post(name, {}, {"choice": asdict(choice), **({"simulation": True} if simulation else {})}))

    def read_iterated(self, name: str) -> Iterated:
        """Return the end of the iteration of a page. A page of another kind is an iteration of no steps."""
        page = self._pages[name]
        facts = page.facts.get("walk", {"steps": 0, "noise": {}})  # another page is a walk of no steps
        return Iterated(int(facts["steps"]), page.arrays, facts["noise"])

    def post_iterated(self, name: str, walk: Iterated, *, simulation: bool = False) -> None:
        """Publish the end of an iteration. Called by `Run.iterate` and nothing else.

        Arguments are as in `post_releases`.
        """
        noise = {key: dict(facts) for key, facts in walk.noise.items()}
        marked = {"walk": {"steps": walk.steps, "noise": noise}, **({"simulation": True} if simulation else {})}
        self._post(Post(name, dict(walk.state), marked))

    def post_derived(
        self, name: str, arrays: Mapping[str, Array], facts: Mapping[str, Any], *, simulation: bool = False
    ) -> Post:
        """Publish values computed from earlier pages and public facts alone. A page that stands is not rewritten.

        Args:
            name: of the page.
            arrays: public arrays of any shapes, by name.
            facts: public facts, JSON.
            simulation: whether the run is seeded, so that the page is marked as not private.

        Returns:
            the page that stands.
        """
        with self._lock:
            if name in self._pages:
                return self._pages[name]
            marked = {"derived": dict(facts), **({"simulation": True} if simulation else {})}
            self._post(Post(name, dict(arrays), marked))
        return self._pages[name]

    def write(self, folder: Path) -> None:
        """Write a copy of all pages to a new folder."""
        copy = Billboard(folder)
        for page in self:
            copy._post(page)

    def _post(self, page: Post) -> None:
        """Write a page to the folder, if there is one, then add it. Raise InputError if a page of its name stands."""
        with self._lock:
            if page.name in self._pages:
                raise InputError(f"the billboard has a page {page.name!r} already; pages are never rewritten.")
            if self._folder is not None:
                _write_page(page, self._folder / f"{len(self._pages):04d}-{page.name}.safetensors")
            self._pages[page.name] = page


UNPOSTED = ".page.tmp"


def _drafts_folder(folder: Path) -> Path:
    """Return the folder where a page is written before it is posted: only the owner can read it.

    A process killed while it writes leaves a draw there that was not posted. It is drawn anew when the run goes on, so
    nobody may see the first.
    """
    return folder.parent / "private"


def _write_page(page: Post, path: Path) -> None:
    """Write a page to a draft, sync it, and move it to its path. The page is then on disk, complete."""
    arrays = {key: np.ascontiguousarray(value, dtype=np.float64) for key, value in page.arrays.items()}
    with writing(path):
        _drafts_folder(path.parent).mkdir(mode=0o700, exist_ok=True)
        temporary = _drafts_folder(path.parent) / f"{path.stem}{UNPOSTED}"
        save_file(arrays, str(temporary), metadata={"name": page.name, "facts": json.dumps(page.facts)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # it lies in a folder for the owner alone until it is posted, and then it is public
        os.replace(temporary, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _read_page(path: Path) -> Post:
    """Return the page in a file. Raise InputError if it cannot be read."""
    with refusing(lambda why: f"{path} is not a readable billboard page ({why}). Restore it from a copy."):
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata()
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if metadata is None or metadata.keys() != {"name", "facts"}:
            raise ValueError("it has no name, or no facts")
        facts = parse_json(metadata["facts"])
        if not isinstance(facts, dict) or any(value.dtype != np.float64 for value in arrays.values()):
            raise ValueError("its facts are no object, or its numbers are not of double precision")
        return Post(metadata["name"], arrays, facts)
