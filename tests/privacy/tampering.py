"""Tamper with the books of a finished model: `python tests/privacy/tampering.py --cases 10000 [--seed 1]`.

Each case makes one change to a copy of the folder: to the ledger, to a page, to which pages there are, to the seal. It
is refused, or it is harmless: ledger and pages say to the last bit what they said. Anything else is a fault. Prints how
many of each kind were refused and harmless, and ends with 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from privrep.errors import InputError
from privrep.models.folder import ModelFolder
from privrep.models.verification import verify
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import read_report

Change = Callable[[Path, random.Random], None]


def make_model(folder: Path) -> None:
    """Fit a small table, with noise from the operating system."""
    from privrep import PrivateFedRep

    rng = np.random.default_rng(5)
    X, users = rng.normal(size=(1_200, 4)), np.repeat(np.arange(300), 4)
    y = X @ rng.normal(size=4) + rng.normal(size=300)[users]
    PrivateFedRep(epsilon=2.0, delta=1e-5, rank=1, run_folder=folder).fit(X, y, groups=users)


def said(folder: Path) -> tuple[object, ...]:
    """Everything that a folder reports of its privacy, and all that stands on its billboard."""
    pages = {page.name: page.digest for page in Billboard.read(folder / "billboard")}
    report = read_report(folder / "ledger.jsonl")
    return report.epsilon, report.delta, report.relation, report.seeded, report.epsilon_budget, report.events, pages


def _lines(folder: Path) -> list[bytes]:
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def _write_lines(folder: Path, lines: list[bytes]) -> None:
    (folder / "ledger.jsonl").write_bytes(b"".join(lines))


def delete_lines(folder: Path, rng: random.Random) -> None:
    lines = _lines(folder)
    first = rng.randrange(len(lines))
    del lines[first : first + rng.randint(1, 5)]
    _write_lines(folder, lines)


def cut_ledger(folder: Path, rng: random.Random) -> None:
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[: -rng.randint(1, 2_000)])


def repeat_line(folder: Path, rng: random.Random) -> None:
    lines = _lines(folder)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    _write_lines(folder, lines)


def swap_lines(folder: Path, rng: random.Random) -> None:
    lines = _lines(folder)
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    _write_lines(folder, lines)


def edit_line(folder: Path, rng: random.Random) -> None:
    """Change a number or a text of a line, which stays JSON."""
    lines = _lines(folder)
    place = rng.randrange(len(lines))
    data = json.loads(lines[place])
    name = rng.choice([name for name in data if name != "chain"])
    value = data[name]
    data[name] = value * rng.choice([0.5, 0.999999, 2]) if isinstance(value, float) else f"{value}x"
    lines[place] = json.dumps(data).encode() + b"\n"
    _write_lines(folder, lines)


def unchain(folder: Path, rng: random.Random) -> None:
    """Make a ledger of before of it, with a cheaper charge."""
    lines = [json.loads(line) for line in _lines(folder)]
    for line in lines:
        line.pop("chain")
        line.pop("says", None)
    lines[0]["format"] = "privrep-ledger/1"
    charged = [line for line in lines if "noise_multiplier" in line]
    rng.choice(charged)["noise_multiplier"] *= 2
    _write_lines(folder, [json.dumps(line).encode() + b"\n" for line in lines])


def flip_ledger(folder: Path, rng: random.Random) -> None:
    _flip(folder / "ledger.jsonl", rng)


def _pages(folder: Path) -> list[Path]:
    return sorted((folder / "billboard").glob("*.safetensors"))


def flip_page(folder: Path, rng: random.Random) -> None:
    _flip(rng.choice(_pages(folder)), rng)


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))


def delete_page(folder: Path, rng: random.Random) -> None:
    rng.choice(_pages(folder)).unlink()


def delete_page_and_charges(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_pages(folder))
    page = path.stem.partition("-")[2]
    path.unlink()
    _write_lines(folder, [line for line in _lines(folder) if f'"{page}'.encode() not in line])


def swap_pages(folder: Path, rng: random.Random) -> None:
    first, second = rng.sample(_pages(folder), 2)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def repeat_page(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_pages(folder))
    shutil.copy(path, path.with_name(f"{rng.randrange(100):04d}-{path.name[5:]}"))


def add_page(folder: Path, rng: random.Random) -> None:
    """A page of another name, with the numbers of one that stands."""
    arrays, metadata = _read(rng.choice(_pages(folder)))
    save_file(arrays, str(folder / "billboard" / "0099-more.safetensors"), metadata={**metadata, "name": "more"})


def edit_page(folder: Path, rng: random.Random) -> None:
    """Change what a page says of its noise, or one of its numbers."""
    path = rng.choice(_pages(folder))
    arrays, metadata = _read(path)
    if arrays and rng.random() < 0.5:
        chosen = rng.choice(sorted(arrays))
        arrays[chosen] = arrays[chosen].copy()
        if arrays[chosen].size:
            arrays[chosen].flat[rng.randrange(arrays[chosen].size)] += 1e-9
    else:
        facts = json.loads(metadata["facts"])
        for several in facts.get("releases", {}).values():
            several[rng.choice(["sigma", "noise_multiplier"])] *= 1.01
        facts["simulation"] = facts.get("simulation", False) ^ (rng.random() < 0.3)
        metadata["facts"] = json.dumps(facts)
    save_file(arrays, str(path), metadata=metadata)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(str(path), framework="numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata())  # noqa: SIM118


def edit_seal(folder: Path, rng: random.Random) -> None:
    path = folder / "model.json"
    described = json.loads(path.read_text())
    if rng.random() < 0.5:
        del described["books"]
    else:
        described["books"]["lines"] -= 1
    path.write_text(json.dumps(described))


CHANGES: tuple[Change, ...] = (
    delete_lines, cut_ledger, repeat_line, swap_lines, edit_line, unchain, flip_ledger, flip_page, delete_page,
    delete_page_and_charges, swap_pages, repeat_page, add_page, edit_page, edit_seal,
)  # fmt: skip


def try_change(
    model: Path, change: Change, seed: int, before: tuple[object, ...], scratch: Path, everything: bool = False
) -> str:
    """Return "refused", "harmless", or what is wrong. With `everything`, what `verify` says must agree."""
    folder = scratch / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("private"))
    change(folder, random.Random(seed))
    try:
        ModelFolder(folder).read_ledger()
    except InputError:
        return "refused" if not everything or not verify(folder).good else "is refused, and verifies"
    if everything and not verify(folder).good:
        return "is loaded, and does not verify"
    return "harmless" if said(folder) == before else "accepted, and says something else"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked, found, began = parser.parse_args(), Counter[tuple[str, str]](), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        model, scratch = Path(name) / "whole", Path(name)
        make_model(model)
        before = said(model)
        for number in range(asked.cases):
            change = CHANGES[number % len(CHANGES)]
            result = try_change(model, change, asked.seed * 1_000_003 + number, before, scratch)
            found[change.__name__, result] += 1
            if result not in ("refused", "harmless"):
                print(f"case {number}, {change.__name__}: {result}", flush=True)
    for (kind, result), count in sorted(found.items()):
        print(f"{kind:24s} {result:10s} {count:6,}")
    wrong = sum(count for (_, result), count in found.items() if result not in ("refused", "harmless"))
    print(f"{asked.cases:,} changes in {time.perf_counter() - began:.0f} s, {wrong} faults")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
