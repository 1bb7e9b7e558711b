"""The policy joint on accelerators, where plans have to fit into the pieces of PyTorch's allocator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.sweep import Shortage
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import device_bytes, fits
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.joint.plan_search import PlanSearch
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

MIB = 1 << 20
LAYERS, HUGE = 12, 256 * MIB


def with_huge_operator(seed: int = 0) -> Trace:
    """Build a training step of layers of some MiB each, with three huge tensors at one operator between its halves."""
    random = Random(seed)
    tensors: list[Tensor] = []
    operators: list[Operator] = []

    def tensor(kind: Kind, size: int) -> int:
        tensors.append(Tensor(size, kind))
        return len(tensors) - 1

    def operator(phase: Phase, latency_us: float, reads: list[int], creates: list[int]) -> None:
        accesses = [Access(each, Mode.READ) for each in reads] + [Access(each, Mode.CREATE) for each in creates]
        operators.append(Operator("op", phase, tuple(accesses), latency_us=latency_us))

    activations = [tensor(Kind.INPUT, 4 * MIB)]
    operators.append(Operator("placeholder", Phase.FORWARD, (Access(activations[0], Mode.CREATE),)))
    weights = [tensor(Kind.PARAMETER, random.randint(2, 5) * MIB) for _ in range(LAYERS)]
    for weight in weights:
        activations.append(tensor(Kind.ACTIVATION, random.randint(3 * MIB, 14 * MIB)))
        operator(Phase.FORWARD, 300.0, [activations[-2], weight], [activations[-1]])
    first, second, third = (tensor(Kind.TEMPORARY, HUGE) for _ in range(3))
    operator(Phase.FORWARD, 300.0, activations[-1:], [first])
    operator(Phase.FORWARD, 300.0, [first], [second])
    operator(Phase.BACKWARD, 300.0, [first, second], [third])
    incoming = tensor(Kind.TEMPORARY, 5 * MIB)
    operator(Phase.BACKWARD, 300.0, [third], [incoming])
    for layer in reversed(range(LAYERS)):
        outgoing = tensor(Kind.TEMPORARY, random.randint(3 * MIB, 14 * MIB))
        operator(Phase.BACKWARD, 600.0, [incoming, activations[layer], weights[layer]], [outgoing])
        incoming = outgoing
    operators.append(Operator("output", Phase.OPTIMIZER, (Access(incoming, Mode.READ),)))
    return Trace.build(operators, tensors, "cuda")


def planned(seed: int) -> tuple[JobPlanner, Candidate]:
    """Return a planner, and its plan of swapping everything."""
    planner = JobPlanner(with_huge_operator(seed), RTX_A6000)
    return planner, planner.candidate(swaps(planner.trace, idle_intervals(planner.trace)))


@pytest.mark.parametrize(("seed", "above"), [(0, 0.01), (1, 0.01), (1, 0.06)])
def test_little_more_than_the_least_memory_is_enough_to_be_much_faster(seed, above):
    planner, bare = planned(seed)
    budget = int(bare.device_peak_bytes * (1 + above))
    (outcome, *_) = planner.starts(budget)
    assert outcome.candidate.footprint_bytes <= budget < outcome.candidate.device_peak_bytes, "the allocator matters"
    best = planner.within(budget)
    validate(planner.trace, best.plan)
    assert best.trace is planner.trace
    assert best.footprint_bytes == footprint(planner.trace, best.plan).device_peak_bytes
    assert device_bytes(AccessSequence(planner.trace, best.plan)) == best.device_peak_bytes <= budget
    assert best.us < 1.2 * outcome.candidate.us < 0.3 * bare.us


def test_in_the_least_memory_there_is_a_plan():
    planner, bare = planned(0)
    best = planner.within(bare.device_peak_bytes)
    assert best.device_peak_bytes == bare.device_peak_bytes == planner.least_bytes
    assert best.us <= bare.us


def test_no_plan_has_more_events_than_allowed():
    _, bare = planned(0)
    most_events = len(bare.plan) - 1
    planner = JobPlanner(with_huge_operator(0), RTX_A6000, most_events=most_events)
    least = planner.best(bare.device_peak_bytes)
    assert isinstance(least, Shortage) or len(least.plan) <= most_events
    assert len(planner.within(int(1.01 * bare.device_peak_bytes)).plan) <= most_events


def test_less_memory_never_takes_less_time_in_a_ladder():
    planner, bare = planned(1)
    budgets = [int(bare.device_peak_bytes * (1 + above)) for above in (0, 0.02, 0.06, 0.12)]
    plans = PlanSearch(planner, 2).ladder(budgets)
    assert list(plans) == budgets
    found = [plan for plan in plans.values() if isinstance(plan, Candidate)]
    assert len(found) == len(budgets)
    assert all(plan.device_peak_bytes <= budget for plan, budget in zip(found, budgets, strict=True))
    assert all(more.us <= less.us for less, more in pairwise(found))


def test_a_sequence_fits_into_its_device_bytes_but_not_below_its_footprint():
    planner, bare = planned(0)
    candidate = planner.starts(bare.device_peak_bytes)[0].candidate
    sequence = AccessSequence(planner.trace, candidate.plan)
    assert candidate.footprint_bytes < candidate.device_peak_bytes
    assert fits(sequence, candidate.device_peak_bytes)
    assert not fits(sequence, candidate.footprint_bytes) and not fits(sequence, candidate.footprint_bytes - 1)
    host = AccessSequence(replace(planner.trace, device="cpu"), candidate.plan)
    peak = device_bytes(host)
    assert fits(host, peak) and not fits(host, peak - 1)
