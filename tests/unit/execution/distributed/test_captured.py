"""Captured steps of several ranks: buckets, their place in the graph, and plans of real networks."""

from __future__ import annotations

import functools
import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pg_tensile.errors import BudgetError, MeasurementError
from pg_tensile.execution.capture import Captured, OptimizerSpec, RankSpec, StepSpec, capture
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE, WAIT, arrivals, buckets
from pg_tensile.execution.measuring.operators import Calibration
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.latency import collectives, roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Mode, Phase, Trace
from tests.unit.graphs import random_order
from tests.unit.ranked import FAST
from tests.unit.zoo import NAMED
from tests.unit.zoo_habits import HABITS

GRADIENT_BYTES = 4 * (9 * 16 + 17 * 16 + 17 * 3)
NETWORKS = {name: {**NAMED, **HABITS}[name] for name in ("resnet26", "gpt2", "bert", "lstm", "shared", "clipped_sgd")}


def step(
    bucket_bytes: int = 4 << 20, early_update: bool = True, clip: float | None = None, accumulation: int = 1
) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    spec = StepSpec(F.cross_entropy, OptimizerSpec(), clip, ranks=RankSpec(3, bucket_bytes), accumulation=accumulation)
    return capture(model, [torch.randn(4, 8)], [torch.randint(0, 3, (4,))], spec, early_update)


def exchanged(captured: Captured) -> list[list[str]]:
    """Return the names of the gradients of each collective, in order."""
    trace = captured.trace
    return [collectives.exchanged_names(trace, exchange) for exchange in collectives.exchanges(trace)]


def places(captured: Captured, target: str) -> list[int]:
    return [index for index, operator in enumerate(captured.trace.operators) if target in operator.target]


def ring_us(nbytes: float) -> float:
    """Return the time of an all-reduce by three ranks."""
    return 2 * 2 * collectives.LATENCY_US + 2 * 2 / 3 * nbytes / collectives.BYTES_PER_S * 1e6


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_buckets_are_filled_in_the_order_of_backward() -> None:
    names = exchanged(step(bucket_bytes=1080))
    assert sorted(names[0]) == ["2.bias.grad", "3.bias.grad", "3.weight.grad"]
    assert names[1] == ["2.weight.grad"] and sorted(names[2]) == ["0.bias.grad", "0.weight.grad"]
    assert len(exchanged(step())) == 1 and len(exchanged(step(bucket_bytes=1))) == 6
    assert exchanged(step(bucket_bytes=1080, accumulation=2)) == exchanged(step(bucket_bytes=1080))


def test_a_bucket_has_one_type() -> None:
    parameters = {
        name: nn.Parameter(torch.ones(size, dtype=dtype))
        for name, size, dtype in (("a", 2, torch.float32), ("b", 2, torch.bfloat16), ("c", 3, torch.float32))
    }
    assert buckets(parameters, "abc", 100) == [["b"], ["a", "c"]]
    assert buckets(parameters, "acb", 19) == [["a"], ["c"], ["b"]]
    assert buckets(parameters, "ac", 20) == [["a", "c"]]


def test_gradients_arrive_alike_in_both_ways_of_backward() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), shared, nn.Linear(4, 1))
    parameters = dict(model.named_parameters())
    with arrivals(parameters) as first:
        model(torch.ones(2, 4)).sum().backward()
    with arrivals(parameters) as second:
        torch.autograd.grad(model(torch.ones(2, 4)).sum(), tuple(parameters.values()))
    assert first == second and sorted(first) == sorted(parameters) and first[-1].startswith("0.")


# ---- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_update", [False, True])
def test_collectives_come_as_soon_as_their_gradients(early_update: bool) -> None:
    captured = step(bucket_bytes=1080, early_update=early_update)
    trace, at = captured.trace, places(captured, "all_reduce_")
    assert at[0] < places(captured, "threshold_backward")[0]  # backward is not over
    for collective in at:  # a bucket of several gradients is made right before, and right after the last of them
        made = trace.tensor_first[trace.operators[collective].accesses[0].tensor]
        if trace.target[made] == collectives.BUCKET:
            assert made == collective - 1
            gradients = {tensor for tensor, mode in trace.operators[made].accesses if mode == Mode.READ}
            assert gradients & {tensor for tensor, _ in trace.operators[made - 1].accesses}
    first_update = places(captured, "_fused_")[0]
    assert (first_update < places(captured, "threshold_backward")[0]) == early_update


def test_updates_and_clipping_follow_the_collectives() -> None:
    captured = step(bucket_bytes=1, clip=1.0)
    assert max(places(captured, "wait_")) < min(places(captured, "vector_norm"))
    early = step(bucket_bytes=1)
    trace = early.trace
    reduced: set[int] = set()
    for operator in trace.operators:
        tensors = {tensor for tensor, _ in operator.accesses}
        if operator.target == collectives.WAIT:
            reduced |= tensors
        elif "_fused_" in operator.target:
            gradients = {tensor for tensor in tensors if trace.tensor_name[tensor].endswith(".grad")}
            assert gradients and gradients <= reduced


@functools.cache
def network_trace(name: str, early_update: bool) -> Trace:
    model, inputs, targets, spec = NETWORKS[name].make()
    of_ranks = StepSpec(**{**vars(spec), "ranks": RankSpec(2, 200)})
    return capture(model, inputs, targets, of_ranks, early_update=early_update).trace


@pytest.mark.parametrize("early_update", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_backward_pass_goes_on_while_the_network_is_busy(name: str, early_update: bool) -> None:
    """A bucket is under way while gradients of the next one are computed, and no third one with it."""
    trace = network_trace(name, early_update)
    exchanges = collectives.exchanges(trace)
    for exchange, following in itertools.pairwise(exchanges):
        assert exchange.begin < following.begin < exchange.wait
        between = range(exchange.begin + 1, exchange.wait)
        assert not any(trace.target[index] == str(ALL_REDUCE) and index != following.begin for index in between)
        accessed = {tensor for index in between for tensor, _ in trace.operators[index].accesses}
        assert exchange.tensor not in accessed
    overlapped = [trace.phase[one.begin : one.wait] == Phase.BACKWARD for one in exchanges]
    assert any(map(np.any, overlapped))


def test_a_step_of_one_process_has_none() -> None:
    spec = StepSpec(F.cross_entropy)
    captured = capture(nn.Linear(4, 3), [torch.randn(2, 4)], [torch.tensor([0, 1])], spec)
    assert not places(captured, "all_reduce_") and captured.share is None
    assert len(step().given) == len(captured.given) + 1


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_of_networks_leave_collectives_as_they_are(name: str) -> None:
    trace = roofline.timed(network_trace(name, True), FAST)
    wanted = [index for index, operator in enumerate(trace.operators) if operator.target == str(ALL_REDUCE)]
    assert len(wanted) > 1
    shuffled = random_order(Random(0), trace)
    assert shuffled != list(range(len(shuffled)))
    assert [index for index in shuffled if index in set(wanted)] == wanted
    least, most = least_bytes(trace), footprint(trace).device_peak_bytes
    for policy, make in POLICIES.items():
        try:
            plan = make({0: trace}, FAST, least + (most - least) // 3)[0]
        except BudgetError:
            continue
        validate(trace, plan)
        executed = AccessSequence(trace, plan).operators.tolist()
        assert [index for index in executed if index in set(wanted)] == wanted, policy


@functools.cache
def many() -> Trace:
    """Return a step with a bucket for each gradient. It is not captured at import, before other tests add a device."""
    return step(bucket_bytes=1).trace


# ---- times and memory ------------------------------------------------------------------------------------------------


def test_the_estimate_has_the_time_on_the_network() -> None:
    captured = step()
    (wait,) = places(captured, "wait_")
    without = np.full(captured.trace.operator_count, 2.0)
    longer = collectives.with_network_us(captured.trace, without) - without
    assert longer[wait] == pytest.approx(ring_us(GRADIENT_BYTES + 8) - 2.0)  # and the turn; less the wait itself
    assert longer.sum() == longer[wait]
    assert roofline.estimate(captured.trace, FAST)[wait] > longer[wait]
    assert (str(ALL_REDUCE), str(WAIT)) == (collectives.ALL_REDUCE, collectives.WAIT)


@given(us=st.lists(st.floats(0.01, 1e3), min_size=60, max_size=60))
def test_waits_take_what_is_left_of_the_time_on_the_network(us: list[float]) -> None:
    trace = many()
    latency = np.array((us * trace.operator_count)[: trace.operator_count])
    waited = collectives.with_network_us(trace, latency)
    exchanges = collectives.exchanges(trace)
    assert (np.flatnonzero(waited != latency)[:, None] == [one.wait for one in exchanges]).any(1).all()
    ended = np.cumsum(waited)
    free = 0.0
    for exchange in exchanges:
        free = max(free, ended[exchange.begin]) + ring_us(collectives.reduced_bytes(trace, exchange.begin))
        waits = latency[exchange.wait] < waited[exchange.wait] - 1e-9
        assert ended[exchange.wait] >= free - 1e-6
        assert not waits or ended[exchange.wait] == pytest.approx(free)


def test_a_bucket_is_the_only_copy_of_its_gradients() -> None:
    """They are freed when it is made, and updates read it; a single gradient is exchanged where it is."""
    several, single = step(), step(bucket_bytes=1)
    (collective,) = places(several, "all_reduce_")
    trace = several.trace
    bucket = trace.operators[collective].accesses[0].tensor
    assert (trace.tensor_name[bucket], trace.tensor_bytes[bucket]) == ("bucket0.grad", GRADIENT_BYTES)
    for update in places(several, "_fused_"):
        assert bucket in {tensor for tensor, _ in trace.operators[update].accesses}
    assert not places(single, "aten.cat") and not any("bucket" in name for name in single.trace.tensor_name.values)
    assert footprint(trace).device_peak_bytes >= trace.tensor_bytes[bucket]


def test_collectives_are_not_measured_by_themselves() -> None:
    """There is no process group here, in which they could be executed."""
    captured = step()
    device = HostDevice(FAST)
    workspaces = probe(captured, device, 1 << 30).trace.workspace_bytes
    assert not workspaces[[*places(captured, "all_reduce_"), *places(captured, "wait_")]].any()
    with pytest.raises(MeasurementError, match="a step that waits for other ranks cannot be measured by itself"):
        Calibration([captured], device, 1 << 30)
    device.close()
