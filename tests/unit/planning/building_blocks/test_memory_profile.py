"""The incremental peak structure against an array that is changed and searched as a whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.building_blocks.memory_profile import Peaks
from tests.examples import examples

bytes_ = st.integers(-(1 << 50), 1 << 50)


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    samples = draw(st.lists(bytes_, min_size=1, max_size=60))
    place = st.integers(0, len(samples) - 1)
    return samples, draw(st.lists(st.tuples(place, place, bytes_), max_size=12))


@given(changes())
@examples(40)
def test_it_says_what_an_array_says(case):
    samples, additions = case
    naive, peaks = np.array(samples, np.int64), Peaks(samples)
    assert peaks.maximum() == (naive.max(), naive.argmax())
    for first, last, size in additions:
        naive[first : last + 1] += size
        peaks.add(first, last, size)
        assert peaks.maximum() == (naive.max(), naive.argmax())
        low, high = sorted((first, last))
        inside = naive[low : high + 1]
        assert peaks.maximum_in(low, high) == (inside.max(), low + inside.argmax())
    assert [peaks.maximum_in(place, place)[0] for place in range(len(naive))] == naive.tolist()


def test_the_first_of_equal_peaks_is_the_peak():
    peaks = Peaks([5, 7, 7, 1, 7])
    assert peaks.maximum() == (7, 1)
    peaks.add(1, 1, -1)
    assert peaks.maximum() == (7, 2)
    assert peaks.maximum_in(3, 4) == (7, 4)


def test_an_empty_range_changes_nothing():
    peaks = Peaks([5, 7])
    peaks.add(1, 0, 100)
    assert peaks.maximum() == (7, 1)


def test_the_samples_given_are_left_as_they_are():
    samples = np.array([1, 2, 3], np.int64)
    Peaks(samples).add(0, 2, 9)
    assert samples.tolist() == [1, 2, 3]
