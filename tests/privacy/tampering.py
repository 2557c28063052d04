"""Tamper with the books of finished models: `make tampering`.

    python tests/privacy/tampering.py --cases 10000 --trials 1000 [--seed 1]

Each case makes one change to a published copy of a model: to the ledger, to a page, to which pages there are, to
model.json. It is refused, or it changes nothing: all that the folder reports is to the last bit what it was. Anything
else is a fault. The models are of every kind in `models/folders.py`. Then threads are let at one ledger (`threads`).
Prints how many changes of each kind were refused and how many change nothing; ends with 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from threads import draw_together, spend_together

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
    """Everything that a folder reports of its privacy, all that stands on its billboard, and what it says of itself."""
    pages = {page.name: page.digest for page in Billboard.read(folder / "billboard")}
    report, described = read_report(folder / "ledger.jsonl"), json.loads((folder / "model.json").read_text())
    described = {name: value for name, value in described.items() if name != "books"}
    spent = report.epsilon, report.delta, report.relation, report.seeded, report.epsilon_budget, report.events
    return *spent, pages, described


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


def edit_header(folder: Path, rng: random.Random) -> None:
    """Change the budget, the relation, or whether noise was simulated."""
    lines = _lines(folder)
    data = json.loads(lines[0])
    data |= rng.choice(
        [{"epsilon": data["epsilon"] / 2}, {"delta": data["delta"] / 2}, {"seeded": not data["seeded"]},
         {"relation": "add-or-remove-one-user"}, {"relation": "replace-one-user"}, {"format": "privrep-ledger/1"}]
    )  # fmt: skip
    lines[0] = json.dumps(data).encode() + b"\n"
    _write_lines(folder, lines)


def repeat_ledger(folder: Path, rng: random.Random) -> None:
    """Write some of the ledger's lines once more at its end, as a copy that went wrong might."""
    lines = _lines(folder)
    _write_lines(folder, lines + lines[rng.randrange(len(lines)) :])


def unchain(folder: Path, rng: random.Random) -> None:
    """Make a ledger of before of it, with a cheaper charge."""
    lines = [json.loads(line) for line in _lines(folder)]
    for line in lines:
        line.pop("chain")
        line.pop("says", None)
    lines[0]["format"] = "privrep-ledger/1"
    charged = [line for line in lines if "charge" in line]
    cheaper = rng.choice(charged)
    for name, factor in (("noise_multiplier", 2.0), ("epsilon", 0.5)):
        if name in cheaper:
            cheaper[name] *= factor
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


def cut_page(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_pages(folder))
    path.write_bytes(path.read_bytes()[: -rng.randint(1, 200)])


def delete_page(folder: Path, rng: random.Random) -> None:
    rng.choice(_pages(folder)).unlink()


def delete_page_and_charges(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_pages(folder))
    page = path.stem.partition("-")[2]
    path.unlink()
    _write_lines(folder, [line for line in _lines(folder) if f'"{page}'.encode() not in line])


def _sample_two(paths: list[Path], rng: random.Random) -> tuple[Path, Path]:
    return rng.choice(paths[: len(paths) // 2] or paths), rng.choice(paths[len(paths) // 2 :])


def swap_pages(folder: Path, rng: random.Random) -> None:
    first, second = _sample_two(_pages(folder), rng)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def repeat_page(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_pages(folder))
    path.with_name(f"{rng.randrange(100):04d}-{path.name[5:]}").write_bytes(path.read_bytes())


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


def edit_description(folder: Path, rng: random.Random) -> None:
    """Change one number, text or list of model.json, wherever it is."""
    path = folder / "model.json"
    described = json.loads(path.read_text())
    places = list(_list_places({name: value for name, value in described.items() if name != "books"}, described))
    holder, key = rng.choice(places)
    value = holder[key]
    if isinstance(value, bool) or value is None:
        holder[key] = not value
    else:
        holder[key] = value * rng.choice([0.5, 2]) if isinstance(value, int | float) else f"{value}x"
    path.write_text(json.dumps(described, indent=2))


def _list_places(shown: Any, holder: Any) -> Any:
    """Yield (mapping or list, key) of each value that is neither."""
    for key in shown if isinstance(shown, dict) else range(len(shown)):
        if isinstance(holder[key], dict | list) and holder[key]:
            yield from _list_places(holder[key], holder[key])
        else:
            yield holder, key


def flip_description(folder: Path, rng: random.Random) -> None:
    _flip(folder / "model.json", rng)


CHANGES: tuple[Change, ...] = (
    delete_lines, cut_ledger, repeat_line, repeat_ledger, swap_lines, edit_line, edit_header, unchain, flip_ledger,
    flip_page, cut_page, delete_page, delete_page_and_charges, swap_pages, repeat_page, add_page, edit_page, edit_seal,
    edit_description, flip_description,
)  # fmt: skip
HARMLESS = (swap_pages, repeat_page)  # the name of a page is in it: these change files' names alone


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
        return "refused" if not everything or not verify_quietly(folder) else "is refused, and verifies"
    if everything and not verify_quietly(folder):
        return "is loaded, and does not verify"
    return "harmless" if said(folder) == before else "accepted, and says something else"


def verify_quietly(folder: Path) -> bool:
    """Return whether a folder verifies; one without a model.json that can be read does not."""
    try:
        return verify(folder).good
    except InputError:
        return False


def make_models(place: Path) -> dict[str, Path]:
    """Return a model folder of each kind, by name: of private runs, but where a kind is a simulation always."""
    from models.folders import KINDS

    made = {"small": place / "small"}
    make_model(made["small"])
    for name, kind in KINDS.items():
        made[name] = place / name.replace(" ", "-").replace("'", "")
        kind.fit(made[name], **({"seed": None} if name == "a server" else {"random_state": None}))
    return made


def tamper(models: Mapping[str, Path], cases: int, seed: int, scratch: Path) -> Counter[tuple[str, str, str]]:
    """Return how often each kind of model, kind of change and result was seen; prints faults."""
    found = Counter[tuple[str, str, str]]()
    before = {name: said(model) for name, model in models.items()}
    names = list(models)
    for number in range(cases):
        change, name = CHANGES[number % len(CHANGES)], names[number // len(CHANGES) % len(names)]
        result = try_change(models[name], change, seed * 1_000_003 + number, before[name], scratch)
        found[name, change.__name__, result] += 1
        if result not in ("refused", "harmless"):
            print(f"FAULT: case {number}, {name}, {change.__name__}: {result}", flush=True)
    return found


def let_threads(trials: int, scratch: Path) -> Counter[str]:
    """Return how many trials of threads went wrong, by what is wrong; each trial is made of both kinds."""
    wrong = Counter[str]()
    for number in range(trials):
        wrong[spend_together(scratch / f"{number}.jsonl" if number % 10 == 0 else None)] += 1
        wrong[draw_together()] += 1
    del wrong[""]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=1_000, help="of threads")
    parser.add_argument("--seed", type=int, default=1)
    asked, began = parser.parse_args(), time.perf_counter()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = tamper(make_models(Path(folder)), asked.cases, asked.seed, Path(folder) / "scratch")
        threads = let_threads(asked.trials, Path(folder))
    for column, what in ((1, "changes"), (0, "models")):
        print(f"{what:24s} {'refused':>8s} {'changes nothing':>16s} {'ACCEPTED':>9s}")
        for kind in dict.fromkeys(key[column] for key in found):
            counts = Counter[str]()
            for key, count in found.items():
                counts[key[2]] += count * (key[column] == kind)
            wrong = counts.total() - counts["refused"] - counts["harmless"]
            print(f"{kind:24s} {counts['refused']:8,} {counts['harmless']:16,} {wrong:9,}")
    wrong = sum(count for key, count in found.items() if key[2] not in ("refused", "harmless"))
    print(f"{asked.cases:,} changes, {wrong} accepted that change what is reported")
    print(f"{asked.trials:,} trials of threads, {threads.total()} over budget or drawn twice {dict(threads) or ''}")
    print(f"{time.perf_counter() - began:.0f} s, seed {asked.seed}")
    return int(wrong > 0 or threads.total() > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it
    sys.exit(main())
