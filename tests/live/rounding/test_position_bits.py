"""The words that weights are rounded with: by the formula, on every path, and as random as they must be.

All is deterministic: a bound of five standard deviations is missed by none of these draws, or by all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

from ckptmap.live.rounding import position_bits
from ckptmap.live.rounding.position_bits import (
    BitsKey,
    key_of,
    mix_,
    round_at,
    rounded,
    signed,
    words_at,
)
from tests.support.paths import ROOT

COUNT = 1 << 18
"""Draws of a statistic: a correlation of independent ones has a standard deviation of 0.002."""


def words(step: int = 1, fqn: str = "layers.0.weight", seed: int = 0) -> torch.Tensor:
    """The words of the first COUNT elements."""
    start = torch.zeros(1, dtype=torch.int32)
    return words_at(start, COUNT, key_of(seed, step, fqn).tensors())[0]


def lowbias32(word: int) -> int:
    """The published function, on numbers without a sign."""
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word = word * 0x846CA68B % 2**32
    return word ^ word >> 16


def inverse(word: int) -> int:
    """The published inverse: only the right multipliers and shifts are undone by it."""
    word ^= word >> 16
    word = word * 0x43021123 % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * 0x1D69E2A5 % 2**32
    return word ^ word >> 16


def by_numbers(position: int, key: BitsKey) -> int:
    low, high = position % 2**32, position >> 32
    first, second = key.first % 2**32, key.second % 2**32
    return signed(lowbias32(lowbias32(low ^ first) ^ lowbias32(high ^ second)))


# ------------------------------------------------------------------------------- the formula


def test_the_mixer_is_the_published_one() -> None:
    numbers = [0, 1, 2**31, 2**32 - 1, 0xDEADBEEF, *range(12345, 12445)]
    made = mix_(torch.tensor([signed(number) for number in numbers], dtype=torch.int32))
    assert [inverse(word % 2**32) for word in made.tolist()] == numbers


@pytest.mark.parametrize("start", [0, 2**31 - 5, 2**32 - 9, 2**32, 3 * 2**32 - 5, 2**45 + 1])
def test_words_are_those_of_the_formula(start: int) -> None:
    """Positions of 64 bits, whatever the way: no tensor of that size is made."""
    key = key_of(7, 3, "a.weight")
    want = [by_numbers(start + number, key) for number in range(9)]
    rows = torch.tensor([start, start + 3])
    assert words_at(rows, 9, key.tensors())[0].tolist() == want
    assert words_at(rows, 6, key.tensors())[1].tolist() == want[3:]
    if start + 9 <= 2**32:
        narrow = torch.tensor([signed(start)], dtype=torch.int32)
        assert words_at(narrow, 9, key.tensors())[0].tolist() == want


def test_a_run_goes_on_with_the_same_bits_in_another_release() -> None:
    """Frozen: another formula is another `VERSION`."""
    assert position_bits.VERSION == 1
    key = key_of(7, 3, "a.weight")
    assert key == FROZEN_KEY
    assert words_at(torch.zeros(1, dtype=torch.int64), 4, key.tensors())[0].tolist() == FROZEN_WORDS


FROZEN_KEY = BitsKey(-1970104876, 1615391583, -521604165)
FROZEN_WORDS = [1848559566, -679151285, 1567979992, -2050930200]


def test_keys_differ_by_each_of_their_parts() -> None:
    keys = {key_of(*parts) for parts in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"))}
    assert len(keys) == 4
    assert len({key_of(seed, 1, "a") for seed in (0, -1, 2**63 - 1, -(2**63))}) == 4


# ------------------------------------------------------------------------------- rounding


def test_every_probability_is_exact() -> None:
    """Over all 2^16 draws a value is rounded away from zero as often as its cut-off part says."""
    draws = torch.arange(1 << 16, dtype=torch.int32)
    for fraction in (0, 1, 2, 0x3FFF, 0x8000, 0xFFFF):
        for upper in (0x3F80, 0xBF80, 0x0000, 0x8001, 0x7F7F):  # 1, -1, 0, a denormal, the largest
            bits = torch.full((1 << 16,), signed(upper << 16 | fraction), dtype=torch.int32)
            made = rounded(bits.view(torch.float32), draws).view(torch.int16)
            away = (made == signed((upper + 1) << 16) >> 16).sum().item()
            assert away == fraction and (made == signed(upper << 16) >> 16).sum() == 65536 - away


def test_what_is_no_number_stays_so() -> None:
    bits = [0x7F800000, -0x800000, 0x7FC00000, -0x400000, 0x7F800001, -1, 0x7FFFFFFF]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for draw in (0, 1, 0xFFFF, -1):
        made = rounded(values, torch.full((7,), draw, dtype=torch.int32))
        assert made[:2].tolist() == [float("inf"), float("-inf")] and made[2:].isnan().all()


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU rounds in pieces; rows wider than one, rows of which several fit, and an odd rest."""
    values = torch.randn(4, 3, 25)
    key = key_of(1, 1, "a").tensors()
    for count, width in ((1, 300), (4, 75), (12, 25), (300, 1)):
        rows = torch.arange(count, dtype=torch.int32) * 5000
        monkeypatch.setattr(position_bits, "PIECE", 1 << 20)
        want = round_at(values, rows, width, key)
        for piece in (7, 64):
            monkeypatch.setattr(position_bits, "PIECE", piece)
            assert torch.equal(round_at(values, rows, width, key), want)
            turned = values.transpose(0, 2).contiguous().transpose(0, 2)
            assert torch.equal(round_at(turned, rows, width, key), want)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_bits_are_those_of_operations_one_by_one(compiler: None) -> None:
    """By inductor, at positions in one and in two words, and of a length that is no whole vector."""
    values, key = torch.randn(3, 1003), key_of(5, 2, "a").tensors()
    values[:, ::50] = float("nan")
    compiled = torch.compile(round_at, fullgraph=True, dynamic=False)
    low = torch.tensor([5, 2**31 - 7, -9], dtype=torch.int32)
    for rows in (low, torch.tensor([2**32 - 5, 2**31 - 7, 2**40])):
        made, want = compiled(values, rows, 1003, key), round_at(values, rows, 1003, key)
        assert torch.equal(made.view(torch.int16), want.view(torch.int16))


def test_the_kernels_that_are_timed_are_right(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timed = importlib.import_module("kernels_rounding")
    torch.manual_seed(0)
    try:
        timed.check(torch.randn(96, 64))
    finally:
        sys.modules.pop("kernels_rounding"), sys.modules.pop("kernels_4bit")


# ------------------------------------------------------------------------------- statistics


def units(drawn: torch.Tensor) -> torch.Tensor:
    """The 16 bits that round, as numbers with mean 0 and variance 1."""
    return ((drawn & 0xFFFF).double() - 32767.5) / (65536 / 12**0.5)


def correlation(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one * two).mean()) * len(one) ** 0.5  # in standard deviations


@pytest.mark.parametrize("part", [1 / 65536, 0.01, 0.3, 0.5, 0.7, 0.99])
def test_rounding_is_unbiased(part: float) -> None:
    """How often a value is rounded up, over elements, and over the steps of a few elements."""
    fraction = round(part * 65536)
    value = torch.tensor([0x3F800000 + fraction], dtype=torch.int32).view(torch.float32)
    many = [words(step) for step in range(1, 5)]
    few = [
        words_at(torch.zeros(1, dtype=torch.int32), 64, key_of(0, step, "a").tensors())[0]
        for step in range(1, 4097)
    ]
    for drawn in (torch.cat(many), torch.cat(few)):
        up = (rounded(value.expand(len(drawn)).contiguous(), drawn) > 1).double().mean().item()
        chance = fraction / 65536
        assert abs(up - chance) < 5 * (chance * (1 - chance) / len(drawn)) ** 0.5


def test_neighbours_are_independent() -> None:
    drawn = units(words())
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 127, 128, 1000, 1024, 4096, 65536):
        assert abs(correlation(drawn[lag:], drawn[:-lag])) < 5, lag


def test_parameters_steps_and_seeds_are_independent() -> None:
    """Of each other element by element, and shifted: streams must not overlap either."""
    others = {
        "step": words(step=2), "far step": words(step=100001), "name": words(fqn="layers.1.weight"),
        "seed": words(seed=1), "both": words(step=2, fqn="layers.00.weight", seed=-1),
    }  # fmt: skip
    one = words()
    for name, other in others.items():
        assert abs(correlation(units(one), units(other))) < 5, name
        assert abs(correlation(units(one)[1:], units(other)[:-1])) < 5, name
        same = (one == other).sum().item()
        assert same <= 1, (name, same)  # 2^18 pairs of 2^32 words


def chi_squared(cells: torch.Tensor, count: int) -> float:
    """The distance of a count in cells from equal ones, in standard deviations."""
    found = torch.bincount(cells, minlength=count).double()
    wanted = len(cells) / count
    return float(((found - wanted) ** 2 / wanted).sum() - (count - 1)) / (2 * (count - 1)) ** 0.5


@pytest.mark.parametrize("shift", [0, 4, 8, 16, 24])
def test_every_part_of_a_word_is_uniform(shift: int) -> None:
    """Alone, with its neighbour, and with the same element's in the next step."""
    one, two = (((words(step) >> shift) & 0xFF).long() for step in (1, 2))
    assert abs(chi_squared(one, 256)) < 5
    for other in (one.roll(-1), one.roll(-2), one.roll(-128), two):
        assert abs(chi_squared(one * 256 + other, 1 << 16)) < 5


def test_one_changed_bit_changes_half_of_all_bits() -> None:
    """Of the position and of both words of the key: each bit of the word flips in half of the cases."""
    positions = torch.arange(4096, dtype=torch.int64) * 1_000_003
    key = key_of(3, 1, "a")
    base = _of_rows(positions, key)
    for bit in range(40):
        flips = _of_rows(positions ^ (1 << bit), key) ^ base
        assert _worst(flips) < 0.05, f"position bit {bit}"
    for bit in range(32):
        for name in ("first", "second"):
            number = signed((getattr(key, name) ^ signed(1 << bit)) % 2**32)
            changed = key._replace(**{name: number})
            assert _worst(_of_rows(positions, changed) ^ base) < 0.05, f"{name} bit {bit}"


def _of_rows(positions: torch.Tensor, key: BitsKey) -> torch.Tensor:
    return words_at(positions, 1, key.tensors())[:, 0]


def _worst(flips: torch.Tensor) -> float:
    """The largest distance from a half among the shares of flips of the 32 bits."""
    shares = ((flips.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1).double().mean(0)
    return float((shares - 0.5).abs().max())
