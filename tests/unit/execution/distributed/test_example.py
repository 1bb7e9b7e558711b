"""The example of the library's documentation, executed by two ranks."""

from __future__ import annotations

from tests.unit import ranked
from tests.unit.ranked import Ranks


def test_the_example_trains(ranks: Ranks) -> None:
    first, second = ranks.call(2, ranked.example, (1_300_000, 1_100_000))
    assert first == second
    assert first == ranks.call(2, ranked.example, (2_000_000,))[0]
