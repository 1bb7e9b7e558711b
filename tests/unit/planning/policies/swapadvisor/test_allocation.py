"""Allocations keep their form and the budget, whatever is bred from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.policies.swapadvisor.allocation import (
    Allocation,
    class_sizes,
    crossover,
    distinct_sizes,
    extended,
    fitted,
    monotone,
    mutate,
    pool_bytes,
    scattered,
    separate,
)
from pg_tensile.planning.trace.trace import Mode
from tests.unit.handmade import network, trace_of

FOUR = np.array([1, 2, 3, 4])
ONE, TWO = Allocation((0, 0, 0, 0), (4,)), Allocation((0, 1, 1, 1), (8, 1))  # of Figure 5, counted from 0


def check(sizes, allocation: Allocation, budget: int) -> None:
    assert len(allocation.classes) == len(sizes)
    assert allocation.classes[0] == 0 and set(np.diff(allocation.classes).tolist()) <= {0, 1}
    assert len(allocation.counts) == allocation.classes[-1] + 1 and min(allocation.counts) >= 0
    assert pool_bytes(sizes, allocation) <= budget


@st.composite
def allocations(draw, count: int = 2):
    """Sizes, a budget, and so many allocations within it."""
    sizes = np.array(sorted(draw(st.sets(st.integers(1, 10_000), min_size=1, max_size=8))))
    budget = draw(st.integers(0, 100_000))
    found = []
    for _ in range(count):
        steps = draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
        places = draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
        classes = tuple((np.cumsum(steps) - steps[0]).tolist())
        found.append(fitted(sizes, classes, np.array(places, np.float64), budget))
    return sizes, budget, found


@given(drawn=allocations(), data=st.data())
def test_children_never_exceed_the_budget_and_their_classes_never_fall(drawn, data):
    sizes, budget, (one, other) = drawn
    point = data.draw(st.integers(0, len(sizes)))
    for child in crossover(sizes, one, other, point, budget):
        check(sizes, child, budget)
    rate = data.draw(st.sampled_from((0.1, 1.0)))
    check(sizes, mutate(sizes, one, rate, budget, np.random.default_rng(point)), budget)


def test_what_the_paper_crosses_and_repairs_comes_out_as_there():
    """Figure 5: 12 bytes of memory, a crossover after the second size."""
    assert extended(TWO).tolist() == [8, 1, 1, 1]
    assert monotone(np.array([0, 1, 0, 0])) == (0, 1, 1, 1)
    first, second = crossover(FOUR, ONE, TWO, 2, 12)
    assert first == Allocation((0, 1, 1, 1), (4, 2))  # from [8, 3], which takes 20 bytes
    assert second.classes == (0, 0, 1, 1)


def test_every_class_gives_back_as_many_bytes():
    sizes = np.array([10, 100])
    repaired = fitted(sizes, (0, 1), np.array([40.0, 4.0]), 600)
    assert repaired == Allocation((0, 1), (30, 3))


def test_a_class_without_places_left_gives_back_no_more():
    sizes = np.array([10, 100])
    assert fitted(sizes, (0, 1), np.array([40.0, 1.0]), 100) == Allocation((0, 1), (10, 0))


def test_a_mutation_without_chance_changes_nothing():
    random = np.random.default_rng(0)
    assert mutate(FOUR, TWO, 0.0, 12, random) == TWO


def test_mutations_join_and_split_classes_and_change_counts():
    random = np.random.default_rng(0)
    seen = {mutate(FOUR, Allocation((0, 0, 1, 1), (2, 2)), 0.5, 12, random) for _ in range(50)}
    assert {len(each.counts) for each in seen} >= {1, 2, 3}
    assert len({each.counts for each in seen}) > 5


@pytest.mark.parametrize("part", [2, 8])
def test_first_allocations_use_the_budget_but_no_more(part):
    trace = network(4)
    sizes = distinct_sizes(trace)
    budget = int(trace.tensor_bytes.sum()) // part
    allocation = separate(trace, sizes, budget)
    check(sizes, allocation, budget)
    assert pool_bytes(sizes, allocation) > budget / 2
    assert class_sizes(sizes, allocation.classes).tolist() == sizes.tolist()
    random = np.random.default_rng(1)
    found = [scattered(trace, sizes, budget, random) for _ in range(20)]
    for each in found:
        check(sizes, each, budget)
    assert {len(each.counts) for each in found} == {1, 2}


def test_tensors_without_bytes_have_no_size():
    trace = trace_of((1, {0: Mode.READ, 1: Mode.CREATE}), sizes=(0, 8))
    assert distinct_sizes(trace).tolist() == [8]
