"""The baselines vdnn, capuchin and lru: their papers' rules on handmade traces, what must hold for any, executed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import BudgetError
from pg_tensile.execution.capture import capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.state import training_state
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.building_blocks.shares import shares
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import capuchin, lru, vdnn
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.unit.executing import FAST, recorded, same
from tests.unit.graphs import live_tensors, random_trace
from tests.unit.handmade import network, trace_of
from tests.unit.zoo import NAMED

READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE
CONV, CONV_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
# a byte a µs each way
SLOW = replace(RTX_A6000, transfer_latency_us=0.0, launch_us=0.0).with_link(1e6)
randoms = st.integers(0, 1 << 40).map(Random)


def device_peak(trace: Trace, plan: Plan = NO_EVENTS) -> int:
    return memory.footprint(trace, plan).device_peak_bytes


def simulated(trace: Trace, plan: Plan) -> Timeline:
    return simulate([SimulatedJob(trace, plan)], SLOW)[0]


def some_trace(random: Random) -> Trace:
    return random_trace(random, random.randint(4, 30), 30)


def some_budget(random: Random, trace: Trace) -> int:
    """From a little less than what is possible to a little more than what is needed."""
    least, most = least_bytes(trace), device_peak(trace)
    return random.randint(max(0, least - (most - least) // 4 - 10), most + 10)


# ---- vdnn ----


def iteration(*rows: tuple[str, str, float, dict[int, Mode]], sizes: tuple[int, ...], parameters: int) -> Trace:
    """Operators (module, target, µs, accesses) between placeholder and output; backward from the first "loss" on.
    Tensor 0 is the batch, the next ones are parameters."""
    kinds = [Kind.INPUT] + [Kind.PARAMETER] * parameters + [Kind.ACTIVATION] * (len(sizes) - 1 - parameters)
    operators = [Operator("placeholder", Phase.FORWARD, (Access(0, CREATE),))]
    phase = Phase.FORWARD
    for module, target, us, modes in rows:
        phase = Phase.BACKWARD if target == "loss" else phase
        accesses = tuple(Access(tensor, mode) for tensor, mode in modes.items())
        operators.append(Operator(target, phase, accesses, latency_us=us, module=module))
    operators.append(Operator("output", Phase.OPTIMIZER, ()))
    return Trace.build(operators, [Tensor(size, kind) for size, kind in zip(sizes, kinds, strict=True)])


# batch, weights of three convolutions, their outputs, what the activations make of them, and gradients
X, W1, W2, W3, C1, C2, C3, A1, A2, G3, G2, G1 = range(12)


def three_convolutions(us: float = 100.0, size: int = 50) -> Trace:
    """conv, relu, conv, relu, conv, and backward; a relu's backward reads what it made."""
    return iteration(
        ("conv1", CONV, us, {X: READ, W1: READ, C1: CREATE}),  # 1
        ("relu1", "relu", us, {C1: READ, A1: CREATE}),
        ("conv2", CONV, us, {A1: READ, W2: READ, C2: CREATE}),
        ("relu2", "relu", us, {C2: READ, A2: CREATE}),
        ("conv3", CONV, us, {A2: READ, W3: READ, C3: CREATE}),
        ("", "loss", us, {C3: READ, G3: CREATE}),  # 6
        ("conv3", CONV_BACKWARD, us, {G3: READ, A2: READ, W3: READ, G2: CREATE}),
        ("relu2", "threshold_backward", us, {G2: WRITE, A2: READ}),
        ("conv2", CONV_BACKWARD, us, {G2: READ, A1: READ, W2: READ, G1: CREATE}),
        ("relu1", "threshold_backward", us, {G1: WRITE, A1: READ}),
        ("conv1", CONV_BACKWARD, us, {G1: READ, X: READ, W1: READ}),  # 11
        sizes=(size,) * 12,
        parameters=3,
    )


def moved(trace: Trace, which: vdnn.Which = "conv") -> dict[int, list[tuple[EventKind, int, int]]]:
    """(kind, trigger, deadline) of each tensor's events."""
    plan = vdnn.plan({7: trace}, SLOW, None, which)[7]
    validate(trace, plan)
    events: dict[int, list[tuple[EventKind, int, int]]] = {}
    for event in plan.events:
        events.setdefault(event.tensor, []).append((event.kind, event.trigger, event.deadline))
    return events


def test_inputs_of_convolutions_leave_while_they_run_and_are_back_one_convolution_ahead():
    """A convolution's backward brings back the input of the one before; the last one's comes as backward begins."""
    assert moved(three_convolutions()) == {
        X: [(OUT, 0, 1), (IN, 8, 10)],
        A1: [(OUT, 2, 3), (IN, 6, 8)],
        A2: [(OUT, 4, 5), (IN, 5, 7)],
    }


def test_vdnn_all_moves_what_other_layers_read_as_well():
    """The loss reads the last convolution's output; nothing in backward reads the others'. Each layer's inputs come
    back with the backward of the next later one."""
    rows = three_convolutions()
    operators = list(rows.operators)
    operators[8] = operators[8]._replace(accesses=(Access(G2, WRITE), Access(C2, READ)))  # its input, like gelu
    trace = Trace.build(operators, list(rows.tensors))
    conv, every = moved(trace), moved(trace, "all")
    assert set(conv) == {X, A1, A2} and set(every) == {X, A1, A2, C2}
    assert every[C2] == [(OUT, 3, 4), (IN, 6, 8)]
    assert conv[A1][1] == (IN, 6, 8) and every[A1][1] == (IN, 7, 9)


def test_a_layer_ends_with_the_copy_of_its_input_and_frees_the_memory():
    """Copies take 80 µs, layers 50 µs: 30 µs of waiting for each of three inputs, out and in. Of the last one's
    way back, nothing overlaps less: all start with a layer."""
    trace = three_convolutions(us=50.0, size=80)
    plan = vdnn.plan({0: trace}, SLOW, None)[0]
    timeline = simulated(trace, plan)
    assert timeline.stall_us == 6 * 30
    assert simulated(three_convolutions(us=80.0, size=80), plan).stall_us == 0
    before, after = memory.footprint(trace).bytes, memory.footprint(trace, plan).bytes
    assert (before - after)[[1, 2, 3, 4, 5]].tolist() == [0, 80, 80, 160, 160]


def test_what_several_layers_read_goes_with_the_last_of_them():
    """A shortcut: what the convolution reads is added to its output."""
    trace = iteration(
        ("conv1", CONV, 1, {0: READ, 1: READ, 3: CREATE}),
        ("conv2", CONV, 1, {3: READ, 2: READ, 4: CREATE}),
        ("", "add", 1, {3: READ, 4: WRITE}),
        ("", "loss", 1, {4: READ, 5: CREATE}),
        ("conv2", CONV_BACKWARD, 1, {5: READ, 3: READ, 2: READ, 6: CREATE}),
        ("conv1", CONV_BACKWARD, 1, {6: READ, 0: READ, 1: READ}),
        sizes=(8,) * 7,
        parameters=2,
    )
    assert moved(trace)[3] == [(OUT, 2, 3), (IN, 3, 5)]


def test_operators_of_a_module_are_one_layer():
    """A tensor that a layer creates and reads is not its input; its input is swapped while all its operators run."""
    trace = iteration(
        ("block", "matmul", 1, {0: READ, 1: READ, 2: CREATE}),
        ("block", "mask", 1, {2: READ, 3: CREATE}),
        ("block", "mul", 1, {2: READ, 3: READ, 4: CREATE}),
        ("", "loss", 1, {4: READ, 5: CREATE}),
        ("block", "mul", 1, {5: WRITE, 3: READ}),
        ("block", "matmul", 1, {5: READ, 0: READ, 2: READ}),
        sizes=(8,) * 6,
        parameters=1,
    )
    assert moved(trace, "all") == {0: [(OUT, 0, 3), (IN, 3, 5)]} and moved(trace) == {}


def test_vdnn_knows_no_budget_and_no_other_choice():
    jobs = {1: three_convolutions(), 2: network(4)}
    for which in ("conv", "all"):
        plans = vdnn.plan(jobs, SLOW, None, which)
        assert plans == vdnn.plan(jobs, SLOW, 1, which)
        assert plans[1] == vdnn.plan({0: jobs[1]}, SLOW, None, which)[0]
    with pytest.raises(ValueError, match='not of "dyn"'):
        vdnn.plan(jobs, SLOW, None, "dyn")  # type: ignore[arg-type]


@given(random=randoms)
@examples(15)
def test_vdnn_moves_what_crosses_from_forward_to_backward_and_nothing_else(random):
    """With names of convolutions and modules dealt out at random."""
    trace = some_trace(random)
    operators = [
        each._replace(target=random.choice((each.target, CONV)), module=random.choice(("", "", "one", "two")))
        for each in list(trace.operators)[1:-1]
    ]
    trace = Trace.build([trace.operators[0], *operators, trace.operators[-1]], list(trace.tensors))
    conv, every = moved(trace), moved(trace, "all")
    assert set(conv) <= set(every)
    for tensor, events in every.items():
        assert not trace.persistent[tensor] and [kind for kind, _, _ in events] == [OUT, IN]
        (_, _, freed), (_, back, _) = events
        assert trace.phase[freed] == Phase.FORWARD and trace.phase[back + 1] == Phase.BACKWARD
        if tensor in conv:
            convolutions = [each for each in operators if each.target == CONV and each.phase == Phase.FORWARD]
            assert any(Access(tensor, READ) in each.accesses for each in convolutions)


# ---- lru ----


def on_demand(trace: Trace, budget: int, prefetch: bool = False) -> list[Event]:
    plan = lru.plan({7: trace}, SLOW, budget, prefetch)[7]
    validate(trace, plan)
    assert device_peak(trace, plan) <= budget
    return list(plan.events)


def recently_used() -> Trace:
    """1, 2 and 3 are made in turn, 1 is read again, then 4 takes the room of one of them; all are needed again."""
    return trace_of(
        (10, {1: CREATE}), (10, {2: CREATE}), (10, {3: CREATE}), (10, {1: READ}), (10, {4: CREATE}),
        (10, {4: READ}), (10, {1: READ, 2: READ, 3: READ}), sizes=(0, 50, 50, 50, 50),
    )  # fmt: skip


def test_what_was_used_longest_ago_goes_where_the_next_operator_does_not_fit():
    trace = recently_used()
    assert on_demand(trace, 200) == []
    assert on_demand(trace, 199) == [Event(OUT, 2, 4, 4), Event(IN, 2, 6, 7)]
    plan = lru.plan({0: trace}, SLOW, 150)[0]
    assert simulated(trace, plan).stall_us == 100  # neither transfer overlaps with anything


def test_with_prefetching_the_same_tensors_go_while_operators_run():
    """1 goes for 4, which dies at 5, so that there is room for 1 from then on; it is read again at 8."""
    reads = [(10, {2: READ})] * 2
    trace = trace_of(
        (10, {1: CREATE}), (10, {2: CREATE}), (10, {3: CREATE}), (10, {4: CREATE, 3: READ}), (10, {4: READ}), *reads,
        (10, {1: READ, 3: READ}), sizes=(0, 10, 20, 50, 50),
    )  # fmt: skip
    assert on_demand(trace, 125) == [Event(OUT, 1, 3, 3), Event(IN, 1, 7, 8)]
    assert on_demand(trace, 125, prefetch=True) == [Event(OUT, 1, 1, 3), Event(IN, 1, 5, 8)]
    plain, early = (lru.plan({0: trace}, SLOW, 125, prefetch)[0] for prefetch in (False, True))
    assert (simulated(trace, plain).stall_us, simulated(trace, early).stall_us) == (20, 0)


def test_as_many_go_as_it_takes_and_the_operator_keeps_what_it_accesses():
    """4 needs the room of two; the operator that makes it reads 2, the oldest."""
    trace = trace_of(
        (10, {2: CREATE}), (10, {1: CREATE}), (10, {3: CREATE}), (10, {2: READ, 4: CREATE}),
        (10, {1: READ}), (10, {3: READ}), sizes=(0, 50, 50, 50, 80),
    )  # fmt: skip
    assert on_demand(trace, 150) == [Event(OUT, 1, 3, 3), Event(OUT, 3, 3, 3), Event(IN, 1, 4, 5), Event(IN, 3, 5, 6)]


def test_parameters_leave_across_the_end_of_the_iteration():
    """1 is a parameter, 2 its moment; in the steady state the moment is away until its update and goes for the
    activations of the next iteration."""
    trace = trace_of(
        (10, {1: READ, 3: CREATE}), (10, {3: READ, 4: CREATE}), (10, {4: READ}), (10, {1: WRITE, 2: WRITE}),
        sizes=(0, 40, 60, 40, 40), persistent=2,
    )  # fmt: skip
    assert on_demand(trace, 120) == [Event(OUT, 2, 0, 0), Event(IN, 2, 3, 4)]
    assert boundary(trace, lru.plan({0: trace}, SLOW, 120)[0]).device == {1, 2}
    large_batch = trace_of(
        (10, {1: READ, 3: CREATE}), (10, {3: READ}), (10, {2: WRITE, 1: WRITE}),
        sizes=(50, 20, 60, 10), persistent=2,
    )  # fmt: skip
    plan = lru.plan({0: large_batch}, SLOW, 80)[0]
    assert on_demand(large_batch, 80) == [Event(IN, 2, 2, 3), Event(OUT, 2, 4, 4)]  # as the iteration before ends
    assert boundary(large_batch, plan) == ({1}, {2})


@given(random=randoms)
@examples(15)
def test_lru_keeps_to_the_budget_or_says_what_the_smallest_is(random):
    trace = some_trace(random)
    budget, least = some_budget(random, trace), least_bytes(trace)
    try:
        plain, early = on_demand(trace, budget), on_demand(trace, budget, prefetch=True)
        assert sorted(event[:2] for event in plain) == sorted(event[:2] for event in early)
    except BudgetError as error:
        assert budget < least == error.smallest_bytes
        operator = next(o for o in range(trace.operator_count) if trace.operator_label(o) in (error.detail or ""))
        accessed = sum(trace.tensors[access.tensor].bytes for access in trace.operators[operator].accesses)
        unused = trace.tensor_bytes[trace.tensor_first == trace.operator_count].sum()
        assert accessed + trace.workspace_bytes[operator] + unused == least
        on_demand(trace, least)


@given(random=randoms)
@examples(15)
def test_nothing_goes_while_something_older_stays_or_while_there_is_room(random):
    trace = some_trace(random)
    budget = max(some_budget(random, trace), least_bytes(trace))
    plan = lru.plan({0: trace}, SLOW, budget)[0]
    count = trace.operator_count
    used = [[access.tensor for access in operator.accesses] for operator in trace.operators]

    def age(tensor: int, operator: int) -> int:
        """Operators since it was used last, in this iteration or the one before."""
        return next(back for back in range(1, count + 1) if tensor in used[(operator - back) % count])

    sequence = AccessSequence(trace, plan)
    for gap in {event.trigger for event in plan.events if event.kind == OUT}:
        operator = (gap + 1) % count
        gone = [event.tensor for event in plan.events if event.kind == OUT and event.trigger == gap]
        there = live_tensors(sequence, operator)
        stays = [
            t for t in there if trace.tensor_bytes[t] and t not in used[operator] and trace.tensor_first[t] < count
        ]
        ages = [age(tensor, operator) for tensor in gone]
        assert not set(gone) & set(used[operator])
        assert all(age(tensor, operator) <= min(ages) for tensor in stays)
        needed = memory.footprint(trace, plan).bytes[operator] + trace.workspace_bytes[operator]
        youngest = [tensor for tensor, its in zip(gone, ages, strict=True) if its == min(ages)]
        assert needed + max(trace.tensor_bytes[tensor] for tensor in youngest) > budget
    for event in plan.events:
        assert event.deadline == event.trigger + (event.kind == IN)
        assert event.kind == OUT or event.tensor in used[event.deadline]


def test_jobs_share_a_budget_in_proportion_to_what_they_take_without_a_plan():
    jobs = {1: network(4), 2: network(9), 3: network(9)}
    vanilla = {job: device_peak(trace) for job, trace in jobs.items()}
    budget = sum(vanilla.values()) * 6 // 10
    granted = shares(jobs, SLOW, budget)
    assert sum(granted.values()) <= budget and granted[2] == granted[3]
    assert all(abs(granted[job] - 0.6 * vanilla[job]) < 2 for job in jobs)
    for policy in (lru.plan, capuchin.plan):
        plans = policy(jobs, SLOW, budget)
        assert plans == {job: policy({job: trace}, SLOW, granted[job])[job] for job, trace in jobs.items()}
    with pytest.raises(BudgetError) as error:
        lru.plan(jobs, SLOW, 1000)
    lru.plan(jobs, SLOW, error.value.smallest_bytes)
    with pytest.raises(BudgetError):
        lru.plan(jobs, SLOW, error.value.smallest_bytes - 1)


def test_without_a_budget_the_device_is_one():
    trace = recently_used()
    small = replace(SLOW, memory_bytes=199)
    for policy in (lru.plan, capuchin.plan):
        assert policy({0: trace}, SLOW, None)[0] == NO_EVENTS
        assert device_peak(trace, policy({0: trace}, small, None)[0]) == 150


# ---- capuchin ----


def guided(trace: Trace, budget: int, profile: DeviceProfile = SLOW) -> Plan:
    plan = capuchin.plan({7: trace}, profile, budget)[7]
    validate(trace, plan)
    return plan


def kinds(plan: Plan) -> set[tuple[int, EventKind]]:
    return {(event.tensor, event.kind) for event in plan.events}


def nested() -> Trace:
    """1 is made, then 2, then 3 at the peak (operator 5); 2 is read again, then 1. Both are dear to make."""
    return trace_of(
        (1000, {1: CREATE}), (100, {}), (1000, {2: CREATE}), (200, {}), (10, {3: CREATE}), (200, {}),
        (10, {2: READ}), (100, {}), (10, {1: READ}), sizes=(0, 40, 50, 10),
    )  # fmt: skip


def test_within_the_budget_nothing_is_done():
    assert guided(nested(), 100) == NO_EVENTS
    assert len(guided(nested(), 99)) == 2


def test_the_largest_free_time_comes_first_not_the_largest_tensor():
    """1 lies idle for longer than 2 and is swapped, and 2 as well where that does not suffice."""
    assert kinds(guided(nested(), 99)) == kinds(guided(nested(), 60)) == {(1, OUT), (1, IN)}
    assert kinds(guided(nested(), 59)) == {(1, OUT), (1, IN), (2, OUT), (2, IN)}


def test_a_swap_in_ends_before_its_use_and_does_not_start_while_memory_is_short():
    trace = nested()
    plan = guided(trace, 59)
    timeline = simulated(trace, plan)
    assert timeline.stall_us == 0 and timeline.device_peak_bytes == device_peak(trace, plan) == 50
    back = {
        each.tensor: (each.start_us, each.end_us) for each in timeline.transfers if plan.events[each.event].kind == IN
    }
    for tensor, used in ((2, 7), (1, 9)):
        start_us, end_us = back[tensor]
        assert timeline.step_end_us[5] <= start_us and end_us <= timeline.step_start_us[used]


def test_a_tensor_without_the_peak_between_its_accesses_stays():
    """1 is over the peak, 2 idles for longer, but before it."""
    trace = trace_of(
        (1000, {2: CREATE}), (500, {}), (1000, {1: CREATE}), (500, {}), (10, {2: READ}), (60, {}),
        (10, {3: CREATE}), (100, {}), (10, {1: READ}), sizes=(0, 50, 50, 60),
    )  # fmt: skip
    assert kinds(guided(trace, 109)) == {(1, OUT), (1, IN)}


@pytest.mark.parametrize(("made_us", "way"), [(59, RECOMPUTE), (61, OUT)])
def test_without_free_time_the_smaller_overhead_decides(made_us, way):
    """Out and in take 80 µs, of which 20 overlap."""
    trace = trace_of(
        (made_us, {1: CREATE}), (10, {}), (0, {2: CREATE}), (10, {}), (10, {1: READ}), sizes=(0, 40, 50)
    )  # fmt: skip
    plan = guided(trace, 89)
    assert (1, way) in kinds(plan) and device_peak(trace, plan) == 50
    assert simulated(trace, plan).iteration_us == pytest.approx(made_us + 30 + min(made_us, 60))


def test_the_most_bytes_saved_a_second_of_recomputation_come_first():
    """1 takes 10 µs for 40 bytes, 2 takes 20 for 60, 3 takes 30 for 90: neither time nor bytes alone."""
    trace = trace_of(
        (10, {1: CREATE}), (20, {2: CREATE}), (30, {3: CREATE}), (1, {4: CREATE}),
        (1, {3: READ}), (1, {2: READ}), (1, {1: READ}), sizes=(0, 40, 60, 90, 50),
    )  # fmt: skip
    assert kinds(guided(trace, 239)) == {(1, RECOMPUTE)}
    assert kinds(guided(trace, 199)) == {(1, RECOMPUTE), (2, RECOMPUTE)}
    assert {tensor for tensor, _ in kinds(guided(trace, 100))} == {1, 2, 3}


def test_what_a_recomputation_is_made_of_counts_once_it_is_gone():
    """2 is made of 1, 3 of the batch. With 1 there, 2 takes 10 µs and 3 takes 15; once 1 is gone, 2 takes 18."""
    trace = trace_of(
        (8, {0: READ, 1: CREATE}), (10, {1: READ, 2: CREATE}), (15, {0: READ, 3: CREATE}), (1, {4: CREATE}),
        (1, {}), (1, {2: READ}), (1, {3: READ}), (1, {0: READ, 1: READ}), sizes=(1, 60, 60, 60, 200),
    )  # fmt: skip
    link = SLOW.with_link(1e5)
    assert kinds(guided(trace, 380, link)) == {(1, RECOMPUTE)}
    assert kinds(guided(trace, 320, link)) == {(1, RECOMPUTE), (3, RECOMPUTE)}
    plan = guided(trace, 260, link)
    assert [event.tensor for event in plan.events if event.deadline == 6] == [1, 2]
    assert kinds(plan) == {(1, RECOMPUTE), (2, RECOMPUTE), (3, RECOMPUTE)}


def test_a_source_on_the_host_comes_back_for_a_recomputation():
    """The batch has the largest free time and is swapped; what is made of it is recomputed before the batch would be
    back."""
    trace = trace_of(
        (10, {0: READ, 1: CREATE}), (50, {}), (10, {2: CREATE}), (60, {}), (1, {}), (1, {1: READ}), (100, {}),
        (1, {0: READ}), sizes=(40, 100, 60),
    )  # fmt: skip
    plan = guided(trace, 140)
    assert kinds(plan) == {(0, OUT), (0, IN), (1, RECOMPUTE)} and device_peak(trace, plan) == 140
    assert next(event.deadline for event in plan.events if event.kind == IN) == 5
    assert simulated(trace, plan).iteration_us == pytest.approx(233 + 10)


def test_a_source_stays_on_the_host_where_there_is_no_room_for_it():
    """As before, but the batch would be in the way of 3, which is made after 1 was read."""
    trace = trace_of(
        (10, {0: READ, 1: CREATE}), (50, {}), (10, {2: CREATE}), (60, {}), (1, {}), (1, {1: READ}),
        (100, {3: CREATE}), (60, {}), (1, {0: READ}), sizes=(40, 100, 60, 120),
    )  # fmt: skip
    plan = guided(trace, 140)
    assert kinds(plan) == {(0, OUT), (0, IN), (1, OUT), (1, IN)} and device_peak(trace, plan) == 140


def test_a_copy_is_waited_for_where_its_memory_is_needed():
    """2 needs the room of 1 at once, 50 µs; 3 that of 2 after 30 of 50 µs."""
    trace = trace_of(
        (9000, {1: CREATE}), (9000, {2: CREATE}), (30, {}), (10, {3: CREATE}), (300, {}), (10, {1: READ}),
        (300, {}), (10, {2: READ}), sizes=(0, 50, 50, 50),
    )  # fmt: skip
    plan = guided(trace, 50)
    assert [event.deadline for event in plan.events if event.kind == OUT] == [1, 3]
    assert device_peak(trace, plan) == 50 and simulated(trace, plan).stall_us == 50 + 20


def test_the_oldest_copy_is_waited_for():
    """1 and 2 are to be away at operator 7. Operator 5 needs the room of one of them, 30 µs after the first copy began
    and before the second one has."""
    trace = trace_of(
        (10, {1: CREATE}), (10, {2: CREATE}), (10, {3: CREATE}), (10, {}), (10, {4: CREATE}), (300, {}),
        (10, {3: READ, 4: READ, 5: CREATE}), (300, {}), (10, {1: READ}), (300, {}), (10, {2: READ}),
        sizes=(0, 50, 50, 50, 50, 50),
    )  # fmt: skip
    plan = guided(trace, 150)
    outs = {event.tensor: event.deadline for event in plan.events if event.kind == OUT}
    assert outs == {1: 4, 2: 6}
    assert device_peak(trace, plan) == 150 and simulated(trace, plan).stall_us == 20


def test_nothing_goes_across_the_end_of_the_iteration():
    """Nor does the optimizer's state, which lies idle from its update to the next."""
    trace = network(8)
    plan = guided(trace, device_peak(trace) // 4)
    assert boundary(trace, plan).device == set(np.flatnonzero(trace.persistent).tolist())
    moments = np.flatnonzero(trace.tensor_kind == Kind.OPTIMIZER_STATE)
    assert len(plan) > 0 and not {event.tensor for event in plan.events} & set(moments.tolist())


def test_a_budget_out_of_reach_gets_the_nearest_plan():
    """All parameters, their states and gradients are on the device, and what one operator of backward accesses."""
    trace = network(8)
    peaks = [device_peak(trace, guided(trace, device_peak(trace) * part // 10)) for part in (10, 8, 7, 1, 0)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] <= 0.8 * peaks[0] and peaks[2] <= 0.7 * peaks[0]
    staying = trace.tensor_bytes[trace.persistent | (trace.tensor_kind == Kind.GRADIENT)].sum()
    assert peaks[-1] <= staying + 4 * (1 << 20)


@given(random=randoms)
@examples(15)
def test_capuchin_saves_what_it_planned_to_save(random):
    """In any iteration, on any link; what it meets, it meets to the byte."""
    trace, profile = some_trace(random), SLOW.with_link(10 ** random.uniform(5, 12))
    budget = some_budget(random, trace)
    plan = capuchin.plan({7: trace}, profile, budget)[7]
    validate(trace, plan)
    assert capuchin.plan({7: Trace.from_bytes(trace.to_bytes())}, profile, budget)[7] == plan
    vanilla = device_peak(trace)
    assert device_peak(trace, plan) <= max(budget, vanilla)
    assert vanilla > budget or plan == NO_EVENTS
    if any(event.kind == RECOMPUTE for event in plan.events):
        return  # which swaps around the reads of recomputations, too
    over = np.flatnonzero(memory.footprint(trace).bytes + trace.workspace_bytes > budget)
    for event in plan.events:
        used = trace.access_operator[trace.access_tensor == event.tensor]
        assert any(a < o < b for a, b in pairwise(used) for o in over)


@given(random=randoms)
@examples(20)
def test_the_memory_that_capuchin_plans_with_is_never_too_little(random):
    trace, profile = random_trace(random, random.randint(10, 40), 40), SLOW.with_link(10 ** random.uniform(4, 9))
    trace = roofline.timed(trace, profile)
    budget = int(device_peak(trace) * random.uniform(0.4, 1.0))
    job = capuchin._Job(trace, profile, budget)
    job.swap_hidden()
    job.take_cheapest()
    job.wait()
    plan = Plan.build(job.events())
    validate(trace, plan)
    assert device_peak(trace, plan) <= max(budget, int(job._memory.max()))


@pytest.mark.parametrize("policy", [lru.plan, capuchin.plan])
def test_tight_plans_for_five_thousand_operators_take_a_second(policy):
    trace = network(1430)
    budget = device_peak(trace) // 3
    plan = policy({0: trace}, RTX_A6000, budget)[0]
    validate(trace, plan)
    assert device_peak(trace, plan) < 1.1 * budget


# ---- executed ----


@pytest.mark.parametrize("policy", ["vdnn", "lru", "capuchin"])
def test_a_network_trains_to_the_same_bits(policy):
    case = NAMED["resnet26"]
    model, inputs, targets, spec = case.make()
    trained = case.make()[0]
    captured = capture(trained, inputs, targets, spec)
    trace, slow = captured.trace, FAST.with_link(1e7)
    budget = device_peak(trace) * 7 // 10
    plan = {
        "vdnn": lambda: vdnn.plan({0: trace}, slow, None, "all"),
        "lru": lambda: lru.plan({0: trace}, slow, budget),
        "capuchin": lambda: capuchin.plan({0: trace}, slow, budget),
    }[policy]()[0]
    expected = {OUT, IN, RECOMPUTE} if policy == "capuchin" else {OUT, IN}
    assert {event.kind for event in plan.events} == expected
    assert device_peak(trace, plan) <= budget or policy == "vdnn"

    reference = EagerStep(model, spec)
    torch.manual_seed(1)
    losses = [reference.step(inputs, targets).loss.clone() for _ in range(3)]
    device = HostDevice(FAST, device_peak(trace, plan))
    with Executor(captured, trained, device, plan) as executor:
        torch.manual_seed(1)
        for number, loss in enumerate(losses):
            executor.recording = number > 0
            assert torch.equal(executor.step(inputs, targets).loss, loss), f"step {number}"
        assert recorded(executor).footprint.tolist() == AccessSequence(executor.trace, plan).footprint.tolist()
        assert recorded(executor).passive_swap_ins == 0
        state = executor.state_dict()
    device.close()
    assert same(state.model, model.state_dict())
    kept = training_state(model, reference.optimizer).optimizer
    assert all(same(kept[parameter], state.optimizer[parameter]) for parameter in kept)
