"""Properties of all policies, and the simple policies: none, swap_all, recompute_all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pg_tensile.errors import InvalidPlanError, UnknownPolicyError
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.access_sequence import AccessSequence, boundary
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES, named_policy, recompute_all
from pg_tensile.planning.trace.trace import Kind, Mode, Trace
from tests.examples import examples
from tests.unit.graphs import traces
from tests.unit.handmade import network, trace_of

SIMPLE = ("none", "swap_all", "recompute_all")
READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE
OUT, IN, RECOMPUTE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RECOMPUTE


def planned(policy: str, trace: Trace) -> Plan:
    return POLICIES[policy]({7: trace}, RTX_A6000, None)[7]


def recomputed(trace: Trace) -> list[tuple[int, int, int]]:
    """(trigger, tensor, version) of the events of recompute_all, in plan order."""
    plan = planned("recompute_all", trace)
    validate(trace, plan)
    assert {event.kind for event in plan.events} <= {RECOMPUTE}
    return [(event.trigger, event.tensor, event.version) for event in plan.events]


def accessed_bytes(trace: Trace) -> np.ndarray:
    """int64[operators]"""
    total = np.concatenate(([0], np.cumsum(trace.tensor_bytes[trace.access_tensor])))
    return np.diff(total[trace.access_start])


# ---- all of them ----


@pytest.mark.usefixtures("brief_search")
@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces(most_operators=20, most_tensors=20))
@examples(10, long=40)
def test_plans_are_valid_and_the_same_every_time(policy, trace):
    plan = planned(policy, trace)
    validate(trace, plan)
    assert planned(policy, Trace.from_bytes(trace.to_bytes())) == plan


def test_every_job_gets_a_plan():
    jobs = {3: network(2), 1: network(5)}
    for name, policy in POLICIES.items():
        plans = policy(jobs, RTX_A6000, 1 << 30)
        assert set(plans) == {1, 3}
        for job, plan in plans.items():
            validate(jobs[job], plan)
            if name in SIMPLE:
                assert plan == policy({0: jobs[job]}, RTX_A6000, None)[0]
    assert all(policy({}, RTX_A6000, None) == {} for policy in POLICIES.values())


def test_policies_are_found_by_name():
    assert named_policy("swap_all") is POLICIES["swap_all"]
    with pytest.raises(UnknownPolicyError, match='no policy "swapall"') as error:
        named_policy("swapall")
    assert error.value.hint == f"Use one of {', '.join(POLICIES)}."


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=pytest.mark.long) if name == "joint" else name for name in POLICIES]
)
def test_five_thousand_operators_are_planned(policy):
    """Long for `joint`: many passes."""
    trace = network(1430)
    assert trace.operator_count >= 5000
    plan = planned(policy, trace)
    validate(trace, plan)


@given(trace=traces())
def test_none_has_no_events(trace):
    assert planned("none", trace) == NO_EVENTS


# ---- swap_all ----


@given(trace=traces(most_operators=20, most_tensors=20))
def test_swap_all_leaves_on_the_device_what_the_operator_accesses(trace):
    """And what no operator ever accesses: the floor of the trace."""
    footprint = memory.footprint(trace, planned("swap_all", trace))
    unused = trace.tensor_bytes[np.diff(trace.tensor_start) == 0].sum()
    assert footprint.bytes.tolist() == (accessed_bytes(trace) + unused).tolist()


def test_swap_all_swaps_between_consecutive_operators_and_across_iterations():
    """1: hidden = f(batch, weight); 2: reads hidden; 3: updates the weight."""
    trace = trace_of(
        (1, {0: READ, 1: READ, 2: CREATE}), (1, {2: READ}), (1, {1: WRITE}), sizes=(10, 10, 10), persistent=1
    )
    plan = planned("swap_all", trace)
    assert set(plan.events) == {
        Event(OUT, 0, 0, 0), Event(IN, 0, 0, 1),
        Event(OUT, 2, 1, 1), Event(IN, 2, 1, 2),
        Event(IN, 1, 0, 1), Event(OUT, 1, 1, 1), Event(IN, 1, 2, 3), Event(OUT, 1, 3, 3),
    }  # fmt: skip
    assert boundary(trace, plan) == (frozenset(), frozenset([1]))


def test_swap_all_moves_no_tensor_without_bytes():
    trace = trace_of((1, {1: CREATE}), (1, {0: READ}), (1, {1: READ}), sizes=(0, 0))
    assert planned("swap_all", trace) == NO_EVENTS


# ---- recompute_all ----


def test_an_idle_tensor_is_recomputed_before_its_next_use():
    trace = trace_of((1, {0: READ, 1: CREATE}), (1, {1: READ}), (1, {0: READ}), (1, {1: READ}), sizes=(8, 8))
    assert recomputed(trace) == [(3, 1, 0)]
    plan = planned("recompute_all", trace)
    assert plan.events[0].deadline == 4
    assert memory.footprint(trace, plan).bytes.tolist() == [8, 16, 16, 8, 16, 8, 0]


def test_a_tensor_in_use_by_consecutive_operators_stays():
    trace = trace_of((1, {0: READ, 1: CREATE}), (1, {1: READ}), (1, {1: READ}), sizes=(8, 8))
    assert recomputed(trace) == []


def test_what_a_recomputation_reads_is_recomputed_first():
    """1 → 2 → 3, and then 3 is needed again."""
    trace = trace_of(
        (1, {0: READ, 1: CREATE}), (1, {1: READ, 2: CREATE}), (1, {2: READ, 3: CREATE}),
        (1, {0: READ}), (1, {3: READ}), sizes=(8, 8, 8, 8),
    )  # fmt: skip
    assert recomputed(trace) == [(4, 1, 0), (4, 2, 0), (4, 3, 0)]


def test_what_is_made_for_one_recomputation_serves_the_others_of_its_gap():
    """2 and 3 are both made from 1, and both needed again."""
    trace = trace_of(
        (1, {0: READ, 1: CREATE}), (1, {1: READ, 2: CREATE}), (1, {1: READ, 3: CREATE}),
        (1, {0: READ}), (1, {2: READ, 3: READ}), sizes=(8, 8, 8, 8),
    )  # fmt: skip
    assert recomputed(trace) == [(4, 1, 0), (4, 2, 0), (4, 3, 0)]


def test_all_writers_of_a_tensor_are_repeated():
    """Created by 1, changed by 2: version 1 is what 4 reads."""
    trace = trace_of((1, {0: READ, 1: CREATE}), (1, {1: WRITE}), (1, {0: READ}), (1, {1: READ}), sizes=(8, 8))
    assert recomputed(trace) == [(3, 1, 1)]
    sequence = AccessSequence(trace, planned("recompute_all", trace))
    assert sequence.steps.tolist() == [0, 1, 2, 3, 1, 2, 4, 5]


def test_what_was_made_from_overwritten_data_is_kept():
    """2 is made from version 0 of 1, which 3 changes; 1 itself is not."""
    trace = trace_of(
        (1, {0: READ, 1: CREATE}), (1, {1: READ, 2: CREATE}), (1, {1: WRITE}),
        (1, {0: READ}), (1, {2: READ, 1: READ}), sizes=(8, 8, 8),
    )  # fmt: skip
    assert recomputed(trace) == [(4, 1, 1)]


def test_what_was_made_from_a_parameter_is_recomputed_until_its_update():
    trace = trace_of(
        (1, {1: READ, 2: CREATE}), (1, {0: READ}), (1, {2: READ}), (1, {1: WRITE}), (1, {2: READ}),
        sizes=(8, 8, 8), persistent=1,
    )  # fmt: skip
    assert recomputed(trace) == [(2, 2, 0)]


def test_operators_that_write_something_else_are_not_repeated():
    trace = trace_of(
        (1, {1: WRITE, 2: CREATE}), (1, {0: READ}), (1, {2: READ}), sizes=(8, 8, 8), persistent=1
    )  # fmt: skip
    assert recomputed(trace) == []


def test_operators_that_keep_statistics_are_repeated():
    trace = trace_of(
        (1, {1: STATS, 2: CREATE}), (1, {0: READ}), (1, {2: READ}), (1, {1: STATS}), (1, {2: READ}),
        sizes=(8, 8, 8), persistent=1,
    )  # fmt: skip
    assert recomputed(trace) == [(2, 2, 0), (4, 2, 0)]


def test_inputs_persistent_tensors_and_tensors_without_bytes_are_kept():
    trace = trace_of(
        (1, {0: READ, 1: READ, 2: CREATE}), (1, {2: READ}), (1, {}), (1, {0: READ, 1: READ, 2: READ}),
        sizes=(8, 8, 0), persistent=1,
    )  # fmt: skip
    assert recomputed(trace) == []


@given(trace=traces(most_operators=16, most_tensors=14))
@examples(20)
def test_whatever_can_be_recomputed_is(trace):
    """Without limits: no use of an idle tensor is left to which a recomputation could be added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_all, "STEPS_PER_USE", 1 << 20)
        patch.setattr(recompute_all, "STEPS_PER_OPERATOR", 1 << 20)
        plan = planned("recompute_all", trace)
    validate(trace, plan)
    there = {(event.tensor, event.trigger) for event in plan.events}
    for use in np.flatnonzero(trace.access_mode != CREATE):
        tensor, operator = int(trace.access_tensor[use]), int(trace.access_operator[use])
        before = trace.access_operator[:use][trace.access_tensor[:use] == tensor]
        idle = before.size and before[-1] < operator - 1 and trace.tensor_kind[tensor] > Kind.INPUT
        if idle and trace.tensor_bytes[tensor] and (tensor, operator - 1) not in there:
            version = int(trace.access_version[use])
            more = Event(RECOMPUTE, tensor, operator - 1, operator, version)
            with pytest.raises(InvalidPlanError):
                validate(trace, Plan.build([*plan.events, more]))


def test_chains_are_bounded():
    """Every backward operator would need its whole forward pass: two million steps without the bound."""
    trace = network(1430)
    plan = planned("recompute_all", trace)
    assert trace.operator_count < repeated(trace) <= recompute_all.STEPS_PER_OPERATOR * trace.operator_count
    kept_nothing = memory.footprint(trace, NO_EVENTS).peak_bytes
    assert memory.footprint(trace, plan).peak_bytes < 0.8 * kept_nothing


def test_fans_are_bounded():
    """Each tensor is made from the ten before it, so chains grow tenfold with each."""
    layers = 60
    forward = [(1.0, {new: CREATE, **dict.fromkeys(range(max(0, new - 10), new), READ)}) for new in range(1, layers)]
    backward = [(1.0, {new: READ, max(0, new - 10): READ}) for new in reversed(range(1, layers))]
    trace = trace_of(*forward, *backward, sizes=(8,) * layers)
    validate(trace, planned("recompute_all", trace))
    assert 0 < repeated(trace) <= recompute_all.STEPS_PER_OPERATOR * trace.operator_count


def test_the_steps_of_an_iteration_are_bounded():
    """Five chains of 30 operators, and then a thousand operators that read the ends of the chains in turn."""
    chains, length = 5, 30
    ends = [chain * length + length for chain in range(chains)]
    forward = [(1.0, {new: CREATE, (new - 1 if (new - 1) % length else 0): READ}) for new in range(1, ends[-1] + 1)]
    trace = trace_of(
        *forward, *((1.0, {ends[use % chains]: READ}) for use in range(1000)), sizes=(8,) * (1 + len(forward))
    )
    validate(trace, planned("recompute_all", trace))
    assert trace.operator_count < repeated(trace) <= recompute_all.STEPS_PER_OPERATOR * trace.operator_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_all, "STEPS_PER_OPERATOR", 1 << 20)
        assert repeated(trace) >= 995 * length


def repeated(trace: Trace) -> int:
    """Return the number of steps of recompute_all's plan that execute an operator again."""
    return len(AccessSequence(trace, planned("recompute_all", trace)).steps) - trace.operator_count
