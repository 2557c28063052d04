"""Check that ledger and billboard agree: pages were paid for at their price, and say what they said when posted.

Formal guarantee. Let all findings of `check_books` be good, and the ledger chained. Then every release on the billboard
* has a charge whose noise multiplier is that of the page, which is its sigma over its sensitivity,
* says to the last bit what it said when it was posted, and is a sum of the shape that goes with it.
So the ledger's epsilon is that of all that the billboard shows. A charge without a page is counted, too.

Whoever can write both files can write other ones that agree. The books tell of damage, and of edits by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.accounting import within_budget
from privrep.privacy.billboard import Billboard, Post
from privrep.privacy.calibration import check_name
from privrep.privacy.events import Batched, Event, Gaussian, Pure, Sampled, Selection
from privrep.privacy.ledger import Ledger

ALIKE = 1e-9  # relative difference of two numbers that should be one


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what was found: `good`, or else what to do is in the words."""

    name: str
    good: bool
    words: str


def check_books(ledger: Ledger, billboard: Billboard, *, finished: bool = True) -> list[Finding]:
    """Return what is found of a ledger and the billboard that belongs to it.

    Args:
        ledger: of the run.
        billboard: of the run.
        finished: whether the run is over. If not, its last page may stand without being on record.
    """
    entries, pages = ledger.entries, {page.name: page for page in billboard}
    unposted = sorted({_page_of(name) for name in entries.charges} - pages.keys())
    faults = {
        "pages": list(_list_page_faults(entries.charges, pages.values(), ledger.seeded)),
        "says": list(_list_changed(entries.posted, pages, ledger.chained, finished)),
        "charges": [],
        "budget": _list_budget_faults(ledger),
    }
    words = {
        "pages": f"{len(pages)} pages: every release has a charge of its noise multiplier, no value is lacking",
        "says": "pages say what they said when they were posted"
        if ledger.chained
        else "the ledger is of before and has no hashes of pages: changes to them are not seen",
        "charges": _count_charges(len(entries.charges), unposted, entries.abandoned),
        "budget": f"epsilon {ledger.epsilon:.4g} is within the budget of {ledger.budget.epsilon:g}",
    }
    chain = "each line is chained to all before it" if ledger.chained else "the ledger is of before: it is unchained"
    return [
        Finding("chain", True, chain),
        *(Finding(name, not found, "; ".join(found[:3]) or words[name]) for name, found in faults.items()),
    ]


def find_fault(ledger: Ledger, billboard: Billboard, *, finished: bool = True) -> str:
    """Return the first fault of the books in words, empty if there is none; arguments as in `check_books`."""
    faults = (each.words for each in check_books(ledger, billboard, finished=finished) if not each.good)
    return next(faults, "")


def _count_charges(count: int, unposted: list[str], abandoned: set[str]) -> str:
    """Return in words how many charges there are, and which have no page."""
    lost = [page for page in unposted if page not in abandoned]
    told = f"; unposted: {', '.join(lost[:5])}" if lost else ""
    return f"{count} charges{told}" + (f"; abandoned: {', '.join(sorted(abandoned)[:5])}" if abandoned else "")


def _page_of(charge: str) -> str:
    return charge.partition("/")[0]


def _list_budget_faults(ledger: Ledger) -> list[str]:
    """Return what is wrong with the sum of all charges."""
    events, budget = list(ledger.entries.charges.values()), ledger.budget
    if not budget.delta and any(not isinstance(event, Pure) for event in events):
        return ["the budget has no delta, and noise was charged"]
    within = within_budget(events, budget.epsilon, budget.delta)
    return [] if within else [f"the charges are over the budget of epsilon {budget.epsilon:g}"]


def _list_changed(posted: Mapping[str, str], pages: Mapping[str, Post], chained: bool, finished: bool) -> Iterator[str]:
    """Yield which pages do not say what they said, are missing, or are on no record."""
    if not chained:
        return
    for name, digest in posted.items():
        if name not in pages:
            yield f"page {name!r} is missing"
        elif pages[name].digest != digest:
            yield f"page {name!r} does not say what it said when it was posted"
    unknown = [name for name in pages if name not in posted]
    allowed = 0 if finished else 1  # a process may have died between posting a page and taking note of it
    if len(unknown) > allowed or (unknown and unknown[0] != list(pages)[-1]):
        yield f"page {unknown[0]!r} is on no record"


def _list_page_faults(charges: Mapping[str, Event], pages: Iterable[Post], seeded: bool) -> Iterator[str]:
    """Yield what is wrong with each page by itself, and with its charges."""
    for page in pages:
        try:
            check_name(page.name)
            if bool(page.facts.get("simulation", False)) != seeded:
                raise ValueError("says of the noise what the ledger does not")
            wanted = _is_number if "derived" in page.facts else np.isfinite
            if not all(wanted(value).all() for value in page.arrays.values()):
                raise ValueError("has a value that is no number")
            _check_page(page, charges)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            yield f"page {page.name!r} {f'lacks {error}' if isinstance(error, KeyError) else error}"


def _is_number(value: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are numbers; a computed one may be infinite, such as the precision of what does not vary."""
    return ~np.isnan(value)


def _check_page(page: Post, charges: Mapping[str, Event]) -> None:
    """Raise ValueError unless a page was charged at the price of what it says."""
    kinds = {"releases": _check_releases, "selection": _check_selection, "choice": _check_choice, "walk": _check_walk}
    found = [kind for kind in (*kinds, "derived") if kind in page.facts]
    if len(found) != 1:
        raise ValueError("is of no kind that is known")
    of_page = {name: event for name, event in charges.items() if _page_of(name) == page.name}
    if found[0] == "derived":
        if of_page:
            raise ValueError("is computed from others, and was charged")
        return
    kinds[found[0]](page, of_page)


def _check_releases(page: Post, charges: Mapping[str, Event]) -> None:
    facts = page.facts["releases"]
    if facts.keys() != page.arrays.keys() or not facts:
        raise ValueError("has other numbers than it says")
    for key, value in page.arrays.items():
        if value.ndim != 1 or not value.size:
            raise ValueError("has numbers of another shape than a sum's")
        _check_noise(facts[key])
    multipliers = {key: float(each["noise_multiplier"]) for key, each in facts.items()}
    event = charges.get(f"{page.name}/{'+'.join(facts)}")
    if isinstance(event, Sampled | Batched):
        together = math.fsum(each**-2 for each in multipliers.values()) ** -0.5
        _check_charged(charges, {f"{page.name}/{'+'.join(facts)}"}, {"": (event.noise_multiplier, together)})
        return
    wanted = {f"{page.name}/{key}": each for key, each in multipliers.items()}
    gaussian = {name: event for name, event in charges.items() if isinstance(event, Gaussian) and event.count == 1}
    _check_charged(gaussian, wanted.keys(), {n: (gaussian[n].noise_multiplier, wanted[n]) for n in wanted}, True)
    _check_charged(charges, wanted.keys(), {})


def _check_selection(page: Post, charges: Mapping[str, Event]) -> None:
    facts, counts = page.facts["selection"], page.arrays["counts"]
    if counts.shape != (len(facts["keys"]),) or page.arrays.keys() != {"counts"}:
        raise ValueError("has other numbers than it says")
    _check_noise(facts["counts"])
    event = charges.get(f"{page.name}/keys")
    if not isinstance(event, Selection):
        raise ValueError("was not charged")
    if counts.size and not float(counts.min()) > float(facts["threshold"]):
        raise ValueError("names keys below its threshold")
    both = float(event.noise_multiplier), float(facts["counts"]["noise_multiplier"])
    _check_charged(charges, {f"{page.name}/keys"}, {"": both})


def _check_choice(page: Post, charges: Mapping[str, Event]) -> None:
    facts, event = page.facts["choice"], charges.get(f"{page.name}/choice")
    if not isinstance(event, Pure):
        raise ValueError("was not charged")
    if page.arrays or not 0 <= int(facts["index"]) < int(facts["candidates"]):
        raise ValueError("chose none of its candidates")
    _check_charged(charges, {f"{page.name}/choice"}, {"": (event.epsilon, float(facts["epsilon"]))})


def _check_walk(page: Post, charges: Mapping[str, Event]) -> None:
    facts = page.facts["walk"]
    (name,) = charges or ("",)
    event = charges.get(name)
    if event is None or isinstance(event, Pure | Selection) or event.count != int(facts["steps"]):
        raise ValueError("was charged for another number of steps")
    if set(name.partition("/")[2].split("+")) != facts["noise"].keys():
        raise ValueError("was charged for other statistics")
    for each in facts["noise"].values():
        _check_noise(each)
    together = math.fsum(float(each["noise_multiplier"]) ** -2 for each in facts["noise"].values()) ** -0.5
    _check_charged(charges, {name}, {"": (event.noise_multiplier, together)})


def _check_noise(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless sigma is the noise multiplier times the sensitivity, all of them positive."""
    sigma, sensitivity, multiplier = (float(facts[name]) for name in ("sigma", "sensitivity", "noise_multiplier"))
    if not (0 < sigma < math.inf and 0 < sensitivity < math.inf):
        raise ValueError("states noise that is none")
    if not math.isclose(sigma / sensitivity, multiplier, rel_tol=ALIKE):
        raise ValueError("states another noise multiplier than sigma over sensitivity")


def _check_charged(
    charges: Mapping[str, Event], names: Iterable[str], pairs: Mapping[str, tuple[float, float]], more: bool = False
) -> None:
    """Raise ValueError unless there are these charges and no others, and each pair of numbers is one.

    Args:
        charges: of the page.
        names: that the page asks for.
        pairs: a number of the charge, and of the page.
        more: whether the page may have more noise than was charged: nodes that add it may add more.
    """
    if charges.keys() != set(names):
        raise ValueError("has other charges than releases")
    for charged, said in pairs.values():
        if not (math.isclose(charged, said, rel_tol=ALIKE) or (more and said > charged)):
            raise ValueError("was charged at another noise multiplier than it states")
