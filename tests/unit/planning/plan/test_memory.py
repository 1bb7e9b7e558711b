"""Peaks by hand on a small chain, and against counting; host arenas in which nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from benchmarks import planning_speed
from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan import memory as peak
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.memory import Arena, HostCopy
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Trace
from tests.examples import examples
from tests.unit import graphs, oracle
from tests.unit.graphs import A, B, C, D, F, S, W, X, chain, live_tensors

OUT, IN, RECOMPUTE, RELEASE = EventKind
STATE = 10 + 11 + 12  # bytes of parameters and buffers of the chain
a, b, c, d, e = range(20, 25)  # bytes of its activations


def test_the_peak_of_the_chain():
    vanilla = peak.footprint(chain())
    assert vanilla.bytes[5] == STATE + a + b + c + d
    assert vanilla.peak_bytes == STATE + a + c + d + e
    assert vanilla.peak_step == 6
    assert vanilla.steps.tolist() == list(range(10))
    assert vanilla.device_peak_bytes == vanilla.peak_bytes  # no workspace is known
    sequence = AccessSequence(chain(), NO_EVENTS)
    assert live_tensors(sequence, 5) == [W, F, S, A, B, C, D]
    assert live_tensors(sequence, 0) == [W, F, S, X]


def test_a_swap_saves_its_bytes_at_the_peak():
    saved = peak.footprint(chain(), Plan.build([Event(OUT, C, 5, 5), Event(IN, C, 6, 9)]))
    assert saved.bytes[6] == STATE + a + d + e
    assert (saved.peak_bytes, saved.peak_step) == (STATE + a + b + c + d, 5)
    # gone only after the peak, or there again before it, it saves nothing
    for events in ([Event(OUT, C, 5, 6), Event(IN, C, 7, 9)], [Event(OUT, C, 5, 5), Event(IN, C, 5, 9)]):
        assert peak.footprint(chain(), Plan.build(events)).peak_bytes == peak.footprint(chain()).peak_bytes


def test_a_recomputation_counts_the_input_that_it_keeps():
    plan = peak.footprint(chain(), Plan.build([Event(RECOMPUTE, A, 5, 6)]))
    assert plan.steps.tolist() == [0, 1, 2, 3, 4, 5, 1, 6, 7, 8, 9]
    assert plan.bytes[5] == STATE + 13 + b + c + d  # x instead of a
    assert plan.bytes[6] == STATE + 13 + a + c + d


def test_workspace_counts_on_the_device_only():
    workspaces = np.zeros(10, np.int64)
    workspaces[2] = 1000
    trace = chain().with_latencies(np.zeros(10), workspaces)
    analysed = peak.footprint(trace)
    assert analysed.peak_bytes == peak.footprint(chain()).peak_bytes
    assert analysed.device_peak_bytes == STATE + a + b + 1000
    again = peak.footprint(trace, Plan.build([Event(RECOMPUTE, B, 4, 5, version=1)]))
    assert again.device_peak_bytes == STATE + a + b + c + 12 + 1000  # norm once more, with a copy of its statistics
    assert peak.floor_bytes(trace) == a + b + 12 + 1000


def test_the_floor_is_the_largest_working_set():
    assert peak.floor_bytes(chain()) == a + d + e
    assert peak.floor_bytes(chain()) <= peak.footprint(chain()).peak_bytes


def test_bad_plans_are_refused():
    bad = Plan.build([Event(RELEASE, A, 3, 3)])
    for analyse in (peak.footprint, peak.host_arena):
        with pytest.raises(InvalidPlanError, match="operator 6"):
            analyse(chain(), bad)


@given(graphs.planned())
@examples(25, long=200)
def test_live_tensors_make_up_the_footprint(planned):
    trace, plan = planned
    analysed, sequence = peak.footprint(trace, plan), AccessSequence(trace, plan)
    counted = oracle.run(trace, plan).footprint
    assert analysed.peak_bytes == max(counted) and analysed.peak_step == counted.index(max(counted))
    for step, expected in enumerate(counted):
        assert trace.tensor_bytes[live_tensors(sequence, step)].sum() + sequence.scratch_bytes[step] == expected
    assert peak.floor_bytes(trace) <= analysed.device_peak_bytes


# ---- the host arena ----


def test_copies_that_do_not_meet_share_their_place():
    plan = Plan.build([Event(OUT, A, 2, 2), Event(IN, A, 3, 4), Event(OUT, C, 5, 6), Event(IN, C, 7, 9)])
    assert peak.host_arena(chain(), plan) == Arena(64, {A: [HostCopy(2, 4, 0)], C: [HostCopy(5, 9, 0)]})
    both = Plan.build([Event(OUT, A, 2, 2), Event(IN, A, 5, 6), Event(OUT, C, 5, 6), Event(IN, C, 7, 9)])
    arena = peak.host_arena(chain(), both)
    assert arena.bytes == 128
    assert {place[0].offset for place in arena.offsets.values()} == {0, 64}


def test_a_copy_lives_until_its_last_use_before_it_is_stale():
    swaps = [Event(OUT, A, 1, 1), Event(IN, A, 1, 2), Event(OUT, A, 2, 3), Event(IN, A, 4, 6)]
    assert peak.host_arena(chain(), Plan.build(swaps)).offsets == {A: [HostCopy(1, 6, 0)]}
    swaps = [Event(OUT, B, 2, 2), Event(IN, B, 2, 3), Event(OUT, B, 4, 4), Event(IN, B, 4, 5)]  # changed in between
    assert peak.host_arena(chain(), Plan.build(swaps)).offsets == {B: [HostCopy(2, 3, 0), HostCopy(4, 5, 0)]}
    unused = [Event(OUT, C, 9, 9)]
    assert peak.host_arena(chain(), Plan.build(unused)).offsets == {C: [HostCopy(9, 0, 0)]}


def test_copies_of_persistent_tensors_go_around_the_end():
    plan = Plan.build([Event(IN, W, 0, 1), Event(OUT, W, 7, 9), Event(OUT, A, 2, 2), Event(IN, A, 4, 6)])
    arena = peak.host_arena(chain(), plan)
    assert arena.offsets[W] == [HostCopy(7, 1, 0)]
    assert arena.bytes == 64  # a leaves after w has come and comes before w leaves


def test_what_nothing_writes_is_on_the_host_for_ever():
    arena = peak.host_arena(chain(), Plan.build([Event(OUT, F, 4, 5), Event(IN, F, 6, 8)]))
    assert arena.offsets == {F: [HostCopy(0, 0, 0)]}
    assert peak.host_arena(chain(), NO_EVENTS) == Arena(0, {})


def test_a_copy_that_is_current_at_the_end_keeps_its_place_until_then():
    plan = Plan.build([Event(OUT, S, 2, 3), Event(IN, S, 3, 4)])
    assert peak.host_arena(chain(), plan).offsets == {S: [HostCopy(2, 0, 0)]}


def test_places_are_aligned_as_the_device_wants_it():
    plan = Plan.build([Event(OUT, A, 2, 2), Event(IN, A, 5, 6), Event(OUT, C, 5, 6), Event(IN, C, 7, 9)])
    trace = chain()
    cuda = Trace.build(list(trace.operators), list(trace.tensors), "cuda")
    assert peak.host_arena(cuda, plan).bytes == 1024


def places(arena: Arena) -> Iterator[tuple[int, HostCopy]]:
    return ((tensor, copy) for tensor, copies in arena.offsets.items() for copy in copies)


def gaps(copy: HostCopy, steps: int) -> set[int]:
    """The gaps in which a copy is held, around the end of the iteration."""
    count = (copy.last - copy.first) % steps or steps
    return {(copy.first + gap) % steps for gap in range(count)}


@given(graphs.planned(most_operators=20))
@examples(25, long=200)
def test_an_executed_plan_never_overwrites_a_copy_that_it_needs(planned):
    """Two iterations, executed in an arena of bytes: what comes in is what went out."""
    trace, plan = planned
    arena = peak.host_arena(trace, plan)
    sequence = AccessSequence(trace, plan)
    steps = len(sequence.steps)
    memory: dict[int, int] = {}  # byte → whose copy it is
    held = {tensor: [(copy, gaps(copy, steps)) for copy in copies] for tensor, copies in arena.offsets.items()}

    def place(tensor: int, gap: int) -> range:
        (offset,) = [copy.offset for copy, within in held[tensor] if gap % steps in within]
        assert offset + trace.tensor_bytes[tensor] <= arena.bytes
        return range(offset, offset + int(trace.tensor_bytes[tensor]))

    for tensor in sequence.boundary.host:
        memory |= dict.fromkeys(place(tensor, -1), tensor)
    for _ in range(2):
        for kind, step, tensor, _event in sequence.actions():
            if kind is ActionKind.COPY_OUT:
                memory |= dict.fromkeys(place(tensor, step), tensor)
            elif kind is ActionKind.WAIT_OUT:
                assert all(memory[byte] == tensor for byte in place(tensor, step))
            elif kind in (ActionKind.COPY_IN, ActionKind.WAIT_IN):
                gap = step if kind is ActionKind.COPY_IN else step - 1
                assert all(memory[byte] == tensor for byte in place(tensor, gap))
        for tensor in sequence.boundary.host:
            assert all(memory[byte] == tensor for byte in place(tensor, steps - 1))


@given(graphs.planned(most_operators=20))
def test_an_arena_is_not_much_larger_than_what_is_held_at_once(planned):
    trace, plan = planned
    arena, steps = peak.host_arena(trace, plan), len(AccessSequence(trace, plan).steps)
    align = peak.ALIGNMENT[trace.device]
    held = np.zeros(steps, np.int64)
    for tensor, copy in places(arena):
        size = -(-int(trace.tensor_bytes[tensor]) // align) * align
        assert copy.offset % align == 0
        held[list(gaps(copy, steps))] += size
    assert held.max() <= arena.bytes <= 2 * held.max()


def test_an_arena_of_a_large_plan_is_tight():
    trace, layers = planning_speed.build(2_000)
    plan = planning_speed.plan(layers)
    arena, steps = peak.host_arena(trace, plan), len(AccessSequence(trace, plan).steps)
    held = np.zeros(steps, np.int64)
    for tensor, copy in places(arena):
        held[list(gaps(copy, steps))] += trace.tensor_bytes[tensor]
    assert held.max() <= arena.bytes <= 1.05 * held.max()
