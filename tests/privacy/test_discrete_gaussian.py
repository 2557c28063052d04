"""Exact draws: what the proof in `privacy.discrete_gaussian` says of tables and decisions, checked in exact numbers.

The bits are seeded, so a test of a random quantity comes out the same every time; each threshold has a false-alarm rate
of ALARM over seeds. `tests/statistical/test_noise.py` tests what the operating system's bits make of it.
"""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal, localcontext

import numpy as np
import pytest
from scipy.stats import binom, chi2, norm

from privrep.privacy import discrete_gaussian as module
from privrep.privacy.discrete_gaussian import SLOTS, Bits, Table, draw_discrete_gaussian, make_table

ALARM = 1e-6
SIGMAS = [1e-320, 0.02, 0.3, 1.0, 3.7, 15.99, 16.0, 20.5, 1000 / 3, 2.0**20, 1.99 * 2.0**39, 2.0**52, 2.0**56]


def seeded(seed: int) -> Bits:
    return np.random.default_rng(seed).bytes


def scripted(*words: int) -> Bits:
    """These words of 64 bits, and no more."""
    stock = b"".join(word.to_bytes(8, "little") for word in words)
    handed = [0]

    def bits(count: int) -> bytes:
        start, handed[0] = handed[0], handed[0] + count
        assert handed[0] <= len(stock)
        return stock[start : handed[0]]

    return bits


def curve(value: int, sigma: float) -> Decimal:
    ratio = Decimal(value) / Decimal(sigma)
    return (ratio * ratio / -2).exp()


def accepts(draws: np.ndarray, sigma: float) -> bool:
    """Pearson's test against the probabilities of the integers; cells that expect fewer than 20 draws are pooled."""
    reach = int(45 * sigma) + 2
    support = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (support / sigma) ** 2)
    expected = weights / weights.sum() * draws.size
    observed = np.bincount(draws + reach, minlength=len(support))
    kept = expected >= 20
    expected = np.append(expected[kept], expected[~kept].sum() + 1e-9)
    observed = np.append(observed[kept], observed[~kept].sum())
    return bool(((observed - expected) ** 2 / expected).sum() < chi2.isf(ALARM, len(expected) - 1))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_slots_cover_the_curve_and_those_before_the_edge_are_below_it(sigma: float) -> None:
    """In 50 digits: no bucket ends below height * f, no slot that is kept unseen reaches above it, none is there twice.

    The largest and smallest f of a bucket are at its ends, nearest to zero and farthest from it.
    """
    table = make_table(sigma)
    width, half = 1 << table.shift, int(table.buckets.max()) + 1
    crossed = table.layers[table.edge :] <= table.height  # the others are left over
    numbers, layers = table.buckets[table.edge :][crossed].astype(int), table.layers[table.edge :][crossed].astype(int)
    below = np.bincount(table.buckets[: table.edge].astype(int) + half, minlength=2 * half)
    tops = below + np.bincount(numbers + half, minlength=2 * half)
    assert half * Decimal(width) > 40 * Decimal(sigma)
    assert len(below) == len(tops) == 2 * half
    assert crossed[: len(numbers)].all()
    assert len(table.buckets) == len(table.layers) == SLOTS
    there = set(zip(numbers.tolist(), layers.tolist(), strict=True))
    assert len(there) == len(numbers)
    with localcontext() as context:
        context.prec = 50
        for k, top, under in zip(range(-half, half), tops.tolist(), below.tolist(), strict=True):
            ends = sorted((abs(k * width), abs((k + 1) * width - 1)))
            assert table.height * curve(ends[0], sigma) <= top
            assert table.height * curve(ends[1], sigma) >= under
            assert there.issuperset((k, layer) for layer in range(under, top))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.7, 50.0])
def test_the_probability_of_every_integer_is_exact(sigma: float) -> None:
    """Summed over all slots, in 50 digits, as the machine decides: proportional to f at every x within 12 sigma."""
    table = make_table(sigma)
    unseen = np.bincount(table.buckets[: table.edge].astype(int) + 4000, minlength=8000)
    with localcontext() as context:
        context.prec = 50
        for x in range(-int(12 * sigma) - 1, int(12 * sigma) + 2):
            k, top = x >> table.shift, table.height * curve(x, sigma)
            edges = table.layers[table.edge :][table.buckets[table.edge :] == k].tolist()
            kept = int(unseen[k + 4000]) + sum(min(max(top - layer, Decimal(0)), Decimal(1)) for layer in edges)
            assert abs(kept - top) < Decimal("1e-44")


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.7, 20.5])
def test_a_million_draws_fit_the_probabilities_of_the_integers(sigma: float) -> None:
    draws = draw_discrete_gaussian(sigma, 1_000_000, seeded(1))
    assert draws.shape == (1_000_000,)
    assert draws.dtype == np.int64
    assert accepts(draws, sigma)
    assert not accepts(draws, sigma * 1.01)
    assert not accepts(draws, sigma / 1.01)
    assert not accepts(np.where(draws == 0, np.arange(draws.size) % 4 == 0, draws), sigma)  # some zeros moved


@pytest.mark.parametrize("sigma", [0.3, 2.3, 50.0, 2.0**20, 1.99 * 2.0**39, 2.0**56])
def test_decimal_numbers_decide_as_floating_point_does(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and every decision left to `_is_below_curve`: the same draws, bit for bit."""
    wanted = draw_discrete_gaussian(sigma, 3000, seeded(2))
    asked = []
    exact = module._is_below_curve

    def counting(table: Table, value: int, layer: int, uniform: int, bits: Bits) -> bool:
        asked.append(value)
        return exact(table, value, layer, uniform, bits)

    monkeypatch.setattr(module, "UNSURE", 1e9)
    monkeypatch.setattr(module, "_is_below_curve", counting)
    assert np.array_equal(draw_discrete_gaussian(sigma, 3000, seeded(2)), wanted)
    assert len(asked) > 100


def test_draws_decided_by_decimal_numbers_fit_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNSURE", 1e9)
    draws = draw_discrete_gaussian(0.7, 10_000, seeded(3))
    assert accepts(draws, 0.7)
    assert not accepts(draws, 0.7 * 1.1)
    monkeypatch.setattr(module, "_is_below_curve", lambda *_: True)  # a wrong decision is seen
    assert not accepts(draw_discrete_gaussian(0.7, 10_000, seeded(3)), 0.7)


@pytest.mark.parametrize(("sigma", "value"), [(2.0**40, 3 * 2**38 + 1), (3.7, -5), (2.0**56, 2**57 - 1), (1 / 3, 1)])
def test_a_decision_takes_as_many_bits_as_it_needs(sigma: float, value: int) -> None:
    """U shares 64 to 256 bits with height * f(x) - l, then goes below or above it by the next word."""
    table = make_table(sigma)
    with localcontext() as context:
        context.prec = 200
        top = table.height * curve(value, sigma)
        layer = int(top)
        first = int(((top - layer) * 2**320).to_integral_value(ROUND_FLOOR))
    words = [first >> (64 * place) & (2**64 - 1) for place in range(4, -1, -1)]
    for shared in range(1, 5):
        assert 0 < words[shared] < 2**64 - 1
        for move, wanted in ((-1, True), (1, False)):
            more = [*words[1:shared], words[shared] + move]
            bits = scripted(*more)
            assert module._is_below_curve(table, value, layer, words[0], bits) is wanted
            with pytest.raises(AssertionError):
                bits(1)  # all were needed
    assert module._is_below_curve(table, value, layer, 0, scripted())
    assert not module._is_below_curve(table, value, layer, 2**64 - 1, scripted())


def test_floating_point_within_its_error_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """U two grid points of 2^-53 beside the curve: too close for floating point, and decided rightly all the same."""
    table, value = make_table(2.0**40), np.array([3 * 2**38 + 1])
    with localcontext() as context:
        context.prec = 60
        top = table.height * curve(int(value[0]), table.sigma)
        uniform = int((top - int(top)) * 2**64)
    layer = np.array([int(top)], dtype=np.uint16)
    for move, wanted in ((-1, True), (1, False)):
        assert module._find_below_curve(table, value, layer, scripted(uniform + move)).tolist() == [wanted]
    monkeypatch.setattr(
        module, "_evaluate_curve", lambda values, sigma: np.exp(-0.5 * (values / sigma) ** 2) * (1 + 2.0**-41)
    )
    for move, wanted in ((-1, True), (1, False)):  # as wrong as the proof allows
        assert module._find_below_curve(table, value, layer, scripted(uniform + move)).tolist() == [wanted]


def test_a_decision_does_not_depend_on_the_caller_s_decimal_context() -> None:
    table, layers = make_table(3.7), range(0, make_table(3.7).height, 20)
    with localcontext() as context:
        context.prec = 3
        context.traps = dict.fromkeys(context.traps, True)
        decided = [module._is_below_curve(table, 4, layer, 2**63, seeded(0)) for layer in layers]
    assert decided == [layer + 0.5 < table.height * np.exp(-0.5 * (4 / 3.7) ** 2) for layer in layers]
    assert len(set(decided)) == 2


@pytest.mark.parametrize("sigma", [2.0**20, 1.37 * 2.0**41, 2.0**53, 2.0**56])
def test_moments_cells_and_bits_at_the_scale_of_a_release(sigma: float) -> None:
    """Mean, scale, 64 quantile cells, and every bit below sigma / 2^10, each at ALARM; 1% more sigma is rejected."""
    count = 400_000
    draws = draw_discrete_gaussian(sigma, count, seeded(4))
    ratios = draws / sigma
    assert abs(ratios.mean()) * np.sqrt(count) < norm.isf(ALARM / 2)
    low, high = chi2.ppf(ALARM / 2, count), chi2.isf(ALARM / 2, count)
    assert low < (ratios**2).sum() < high
    assert not low < ((ratios / 1.01) ** 2).sum() < high
    cells = np.bincount(np.searchsorted(norm.ppf(np.arange(1, 64) / 64), ratios), minlength=64)
    assert ((cells - count / 64) ** 2 / (count / 64)).sum() < chi2.isf(ALARM, 63)
    fair = range(int(np.log2(sigma)) - 10)
    least, most = binom.ppf(ALARM / 120, count, 0.5), binom.isf(ALARM / 120, count, 0.5)
    for bit in fair:
        assert least <= ((draws >> bit) & 1).sum() <= most
        assert least <= ((draws >> bit ^ draws >> 62) & 1).sum() <= most  # nor do they go with the sign
    rounded = np.rint(ratios).astype(np.int64) * int(sigma)
    assert not least <= (rounded & 1).sum() <= most


def test_positions_and_neighbouring_draws_are_independent() -> None:
    """Kept tries follow each other: correlations of draws, and of their squares, at lags 1 to 8 (8 + 8 at ALARM/16)."""
    ratios = draw_discrete_gaussian(2.0**40, 200_000, seeded(5)) / 2.0**40
    for values in (ratios, (ratios**2 - 1) / np.sqrt(2)):
        for lag in range(1, 9):
            assert abs((values[lag:] * values[:-lag]).sum()) / np.sqrt(len(values) - lag) < norm.isf(ALARM / 32)
    repeated = np.repeat(ratios[::64], 64)
    assert abs((repeated[1:] * repeated[:-1]).sum()) / np.sqrt(len(repeated)) > norm.isf(ALARM / 32)


def test_draws_are_a_function_of_their_bits() -> None:
    assert np.array_equal(draw_discrete_gaussian(9.5, 500, seeded(6)), draw_discrete_gaussian(9.5, 500, seeded(6)))
    assert not np.array_equal(draw_discrete_gaussian(9.5, 500, seeded(6)), draw_discrete_gaussian(9.5, 500, seeded(7)))
    assert draw_discrete_gaussian(9.5, 0, scripted()).shape == (0,)


def test_tables_are_shared_and_cannot_be_changed() -> None:
    table = make_table(12.5)
    assert make_table(12.5) is table
    with pytest.raises(ValueError, match="read-only"):
        table.buckets[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.layers[0] = 1
