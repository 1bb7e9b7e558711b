"""The planner's model of the allocator reserves what the allocator itself does."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pg_tensile.planning.allocator_rules import DEFAULT_PAGES as PAGES
from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.allocator import (
    GIVEN_BACK,
    ITERATIONS,
    Allocator,
    Block,
    OutOfPagesError,
    plan_bytes,
    replayed,
)
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies.recompute_all import plan as recompute_all
from pg_tensile.planning.trace.trace import Mode, Trace
from tests.examples import examples
from tests.unit.graphs import random_trace

DEVICE = "emulated:0"
MEMORY = 1 << 42
randoms = st.integers(0, 1 << 32).map(Random)  # those of hypothesis mostly draw small numbers


@pytest.fixture(autouse=True)
def expandable(control) -> Iterator[None]:
    control.set_memory(MEMORY)
    control.expandable_segments(True)
    yield


def statistics() -> dict[str, int]:
    return torch.accelerator.memory_stats(DEVICE)


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


def begin() -> None:
    torch.get_device_module("emulated").set_per_process_memory_fraction(1.0)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert torch.accelerator.memory_reserved(DEVICE) == 0


def some_size(random: Random) -> int:
    """Bytes of a block: of either segment, from a part of a page to several of them."""
    return random.choice((random.randint(0, 5000), random.randint(1, 1 << 20), random.randint(1 << 20, 60 << 20)))


@given(random=randoms, limit=st.one_of(st.none(), st.integers(60, 600)))
@examples(10, long=50, suppress=[HealthCheck.function_scoped_fixture])
def test_any_order_of_allocations(random, limit):
    """Until the limit, in MiB, is too little even after free pages were given back."""
    begin()
    limit_bytes = MEMORY if limit is None else limit << 20
    torch.get_device_module("emulated").set_per_process_memory_fraction(limit_bytes / MEMORY)
    retried = statistics()["num_alloc_retries"]
    model = Allocator(limit_bytes)
    modelled: list[Block] = []
    real: list[torch.Tensor] = []
    for _ in range(200):
        if not real or random.random() < 10 / (10 + len(real)):
            nbytes = some_size(random)
            try:
                real.append(block(nbytes))
            except torch.OutOfMemoryError:
                with pytest.raises(OutOfPagesError):
                    model.allocate(nbytes)
                break
            modelled.append(model.allocate(nbytes))
        else:
            chosen = random.randrange(len(real))
            del real[chosen]
            model.free(modelled.pop(chosen))
        assert torch.accelerator.memory_reserved(DEVICE) == model.device_bytes
        assert statistics()["num_alloc_retries"] - retried == model.given_back
    assert torch.accelerator.max_memory_reserved(DEVICE) == model.peak_bytes
    real.clear()


def scaled(random: Random) -> Trace:
    """A random graph whose tensors are up to hundreds of MiB."""
    trace = random_trace(random, random.randint(4, 60), 60)
    factor = random.choice((1, 1000, 100_000))
    tensors = [tensor._replace(bytes=tensor.bytes * factor + random.randint(0, 600)) for tensor in trace.tensors]
    return Trace.build(list(trace.operators), tensors, "cuda")


def execute(trace: Trace, plan: Plan, limit: int = MEMORY) -> int:
    """Allocate and free on the device as an executor does, within a limit; return the bytes that were reserved."""
    sequence = AccessSequence(trace, plan)
    created: dict[int, list[int]] = {}
    for operator, tensor, mode in zip(
        trace.access_operator.tolist(), trace.access_tensor.tolist(), trace.access_mode.tolist(), strict=True
    ):
        if mode == Mode.CREATE:
            created.setdefault(operator, []).append(tensor)
    sizes, operators, events = trace.tensor_bytes.tolist(), sequence.steps.tolist(), sequence.step_event.tolist()
    begin()
    torch.get_device_module("emulated").set_per_process_memory_fraction(limit / MEMORY)
    resident = {tensor: block(sizes[tensor]) for tensor in sorted(sequence.boundary.device)}
    for _ in range(ITERATIONS):
        for kind, step, tensor, _ in sequence.actions():
            if kind == ActionKind.RUN:
                event, outputs = events[step], created.get(trace.captured_operator[operators[step]], [])
                if event >= 0:
                    outputs = [output for output in outputs if output == plan.rows["tensor"][event]]
                resident |= {output: block(sizes[output]) for output in sorted(outputs)}
                extra = (sequence.scratch_bytes[step], trace.workspace_bytes[operators[step]])
                del [block(int(nbytes)) for nbytes in extra][:]
            elif kind in (ActionKind.FREE, ActionKind.WAIT_OUT):
                resident.pop(tensor, None)
            elif kind in (ActionKind.COPY_IN, ActionKind.PASSIVE_IN) and tensor not in resident:
                resident[tensor] = block(sizes[tensor])
    resident.clear()
    return int(torch.accelerator.max_memory_reserved(DEVICE))


def plan_of(policy: str, trace: Trace) -> Plan:
    if policy == "swap_all":
        return swaps(trace, idle_intervals(trace))
    return NO_EVENTS if policy == "none" else recompute_all({0: trace}, A100_40GB, None)[0]


@given(random=randoms, policy=st.sampled_from(["none", "swap_all", "recompute_all"]))
@examples(15, long=100, suppress=[HealthCheck.function_scoped_fixture])
def test_plans(random, policy):
    trace = scaled(random)
    plan = plan_of(policy, trace)
    assert replayed(AccessSequence(trace, plan)).peak_bytes == execute(trace, plan)


@given(random=randoms, policy=st.sampled_from(["none", "swap_all", "recompute_all"]))
@examples(15, suppress=[HealthCheck.function_scoped_fixture])
def test_what_a_plan_is_granted_is_enough_and_the_tensors_peak_is_not(random, policy):
    """With the last page of each segment, which the margin has; pages are given back as often as is allowed."""
    trace = scaled(random)
    plan = plan_of(policy, trace)
    granted, peak = plan_bytes(trace, plan), footprint(trace, plan).device_peak_bytes
    assert is_executed(trace, plan, granted + sum(PAGES))
    assert granted == peak or not is_executed(trace, plan, peak + sum(PAGES))


def is_executed(trace: Trace, plan: Plan, limit: int) -> bool:
    before = statistics()["num_alloc_retries"]
    try:
        execute(trace, plan, limit)
    except torch.OutOfMemoryError:
        return False
    return statistics()["num_alloc_retries"] - before <= GIVEN_BACK * ITERATIONS
