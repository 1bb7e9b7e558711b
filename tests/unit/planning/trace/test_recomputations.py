"""Recomputation of tensors: what is possible, from what, and what it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.steps import Layout, lay_out
from pg_tensile.planning.trace.recomputations import Input, Recomputations, recomputable_versions, scratch_bytes
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.unit.graphs import A, B, C, D, E, F, S, W, X, chain, dice, random_trace
from tests.unit.handmade import trace_of

CREATE, READ, WRITE = Mode.CREATE, Mode.READ, Mode.WRITE


def test_every_version_of_a_created_tensor_can_be_recomputed() -> None:
    versions = recomputable_versions(chain()).tolist()
    assert [versions[tensor] for tensor in (A, B, C, D, E)] == [1, 2, 1, 1, 1]
    assert [versions[tensor] for tensor in (W, F, S, X)] == [0] * 4  # persistent tensors and the input


def test_a_version_is_recomputed_by_its_writers_in_order() -> None:
    trace = chain()
    recomputation = Recomputations(trace).of(B, 1)
    assert recomputation is not None
    assert [step.operator for step in recomputation.steps] == [2, 3]
    assert recomputation.inputs == (Input(A, 0, False), Input(S, 0, True))
    assert recomputation.us == trace.latency_us[[2, 3]].sum()


def test_statistics_are_copied_and_other_outputs_discarded() -> None:
    trace = chain()
    recomputation = Recomputations(trace).of(B, 0)
    assert recomputation is not None
    assert recomputation.scratch_bytes == trace.tensor_bytes[S] + trace.workspace_bytes[2]
    two = trace_of((1.0, {1: CREATE, 2: CREATE}), (1.0, {1: READ, 2: READ}), sizes=(0, 10, 30))
    assert scratch_bytes(two).tolist() == [0, 30, 10]


def test_an_operator_that_changes_another_tensor_is_not_executed_twice() -> None:
    trace = trace_of((1.0, {1: CREATE}), (1.0, {1: WRITE, 2: CREATE}), (1.0, {1: READ, 2: READ}), sizes=(0, 10, 10))
    assert recomputable_versions(trace).tolist() == [0, 2, 0]
    assert Recomputations(trace).of(2, 0) is None
    assert Recomputations(trace).us(2, 0) == float("inf")


def test_excluded_tensors_are_not_recomputed() -> None:
    assert Recomputations(chain(), {B}).of(B, 0) is None


@pytest.mark.parametrize(("version", "unchanged"), [(0, True), (1, False)])
def test_inputs_need_the_version_that_was_read_unless_they_are_statistics(version: int, unchanged: bool) -> None:
    recomputation = Recomputations(chain()).of(B, 1)
    assert recomputation is not None
    assert recomputation.inputs_unchanged({A: version, S: 7}.__getitem__) is unchanged


@given(dice().map(random_trace), st.data())
def test_plans_execute_the_same_operators(trace: Trace, data: st.DataObject) -> None:
    """A recompute event in the gap after the version was written has these steps, or is refused."""
    tensor = data.draw(st.integers(0, trace.tensor_count - 1))
    version = data.draw(st.integers(0, int(trace.tensor_writes[tensor])))
    trigger = max(trace.writers(tensor, version), default=0)
    layout = lay_out(trace, Plan.build([Event(EventKind.RECOMPUTE, tensor, trigger, trigger + 1, version)]))
    assert isinstance(layout, Layout)
    recomputation = Recomputations(trace).of(tensor, version)
    assert (recomputation is None) == bool(layout.faults)
    if recomputation is not None:
        assert layout.operator[layout.event >= 0].tolist() == [step.operator for step in recomputation.steps]
