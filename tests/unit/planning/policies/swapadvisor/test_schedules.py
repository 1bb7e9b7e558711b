"""Schedules stay orders in which the operators may be executed, whatever is bred from them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from benchmarks.experiments.recurrent import UnrolledLSTM
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import check_order, in_order
from pg_tensile.planning.policies.swapadvisor import schedules
from pg_tensile.planning.policies.swapadvisor.schedules import DependencyLists, crossover, greedy, mutate
from pg_tensile.planning.trace.trace import Phase
from tests.unit.graphs import dice, random_order, traces
from tests.unit.unrolled import unrolled


def orders(random: Random, trace, count: int):
    return [np.array(random_order(random, trace), np.int32) for _ in range(count)]


@given(trace=traces(most_operators=20), random=dice(), data=st.data())
def test_children_of_schedules_are_schedules(trace, random, data):
    one, other = orders(random, trace, 2)
    point = data.draw(st.integers(0, trace.operator_count))
    for child, head, tail in zip(crossover(one, other, point), (other, one), (one, other), strict=True):
        check_order(trace, child)
        assert child[:point].tolist() == head[:point].tolist()
        assert child[point:].tolist() == [each for each in tail.tolist() if each not in head[:point]]


def test_crossover_of_the_papers_figure():
    """Figure 4, counted from 0: the first three operators of the second parent, then the others as in the first."""
    first, second = crossover(np.array([0, 1, 2, 3, 4]), np.array([1, 2, 3, 4, 0]), 3)
    assert first.tolist() == [1, 2, 3, 0, 4]
    assert second.tolist() == [0, 1, 2, 3, 4]


@given(trace=traces(most_operators=20), random=dice(), rate=st.sampled_from((0.0, 0.1, 1.0)))
def test_mutants_are_schedules(trace, random, rate):
    (order,) = orders(random, trace, 1)
    mutant = mutate(DependencyLists.of(trace), order, rate, np.random.default_rng(random.randrange(1 << 30)))
    check_order(trace, mutant)
    if rate == 0:
        assert mutant.tolist() == order.tolist()


def test_a_mutation_changes_some_places_and_follows_the_schedule_elsewhere():
    trace = unrolled(layers=4, steps=6)
    order = np.arange(trace.operator_count, dtype=np.int32)
    mutants = [mutate(DependencyLists.of(trace), order, 0.02, np.random.default_rng(seed)) for seed in range(5)]
    pairs = {(one, one + 1) for one in range(trace.operator_count - 1)}
    for mutant in mutants:
        kept = len(pairs & set(pairwise(mutant.tolist())))
        assert trace.operator_count / 2 < kept
    assert len({mutant.tobytes() for mutant in mutants}) > 1


@given(
    trace=traces(most_operators=20),
    capacity=st.sampled_from((None, 0, 1000, 10**9)),
    thrift=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_greedy_schedules_are_schedules(trace, capacity, thrift):
    check_order(trace, greedy(trace, DependencyLists.of(trace), capacity, thrift))


def test_greedy_updates_parameters_as_soon_as_it_can_and_needs_less_memory():
    trace = unrolled(layers=6, steps=2)
    ordered = in_order(trace, greedy(trace, DependencyLists.of(trace), None, 1.0))
    assert footprint(ordered).peak_bytes < 0.8 * footprint(trace).peak_bytes
    updates = np.flatnonzero(ordered.phase == Phase.OPTIMIZER)
    assert updates[0] < trace.operator_count - len(updates)


def switches(trace) -> int:
    """How often the next operator that reads a parameter reads another one."""
    shared = [tensor for tensor in trace.access_tensor.tolist() if trace.persistent[tensor]]
    return sum(one != other for one, other in pairwise(shared))


@pytest.mark.parametrize("thrift", [0.0, 1.0])
def test_greedy_uses_shared_weights_together(thrift):
    trace = unrolled(layers=6, steps=8)
    ordered = in_order(trace, greedy(trace, DependencyLists.of(trace), footprint(trace).device_peak_bytes // 8, thrift))
    assert switches(trace) > 80
    assert switches(ordered) < 30


def test_a_window_bounds_what_the_greedy_scheduler_looks_at(monkeypatch):
    monkeypatch.setattr(schedules, "WINDOW", 1)
    trace = unrolled(layers=3, steps=3)
    check_order(trace, greedy(trace, DependencyLists.of(trace), 0, 0.0))


def test_greedy_leaves_weights_alone_that_nothing_can_go_on_with():
    """An LSTM written out: all layers know their first state, but all but the first one wait for inputs."""
    model = UnrolledLSTM(width=32, layers=4)
    rows = torch.randn(4, 6, 32), torch.randint(0, 10, (4,))
    trace = capture(model, rows[:1], rows[1:], StepSpec(cross_entropy, OptimizerSpec("sgd", 0.1))).trace
    names = {trace.tensor_name[tensor]: tensor for tensor in range(trace.tensor_count)}
    weights = [names[f"hidden.{layer}.weight"] for layer in range(4)]
    capacity = footprint(trace).device_peak_bytes // 8

    def first_uses(waiting: float) -> list[int]:
        ordered = in_order(trace, greedy(trace, DependencyLists.of(trace), capacity, 0.0, waiting))
        accesses = ordered.access_tensor.tolist()
        return [accesses.index(weight) for weight in weights]

    eager, patient = first_uses(1.0), first_uses(schedules.WAITING)
    assert patient == sorted(patient)
    assert patient[-1] > 10 * eager[-1]
