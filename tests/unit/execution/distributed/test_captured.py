"""Captured steps of several ranks: buckets, their place in the graph, and plans of real networks."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pg_tensile.errors import BudgetError, MeasurementError
from pg_tensile.execution.capture import Captured, OptimizerSpec, RankSpec, StepSpec, capture
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE, arrivals, buckets
from pg_tensile.execution.measuring.operators import Calibration
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.latency import collectives, roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.building_blocks.keep import least_bytes
from pg_tensile.planning.trace.trace import Mode
from tests.unit.graphs import random_order
from tests.unit.ranked import FAST
from tests.unit.zoo import NAMED
from tests.unit.zoo_habits import HABITS

NETWORKS = {name: {**NAMED, **HABITS}[name] for name in ("resnet50", "gpt2", "bert", "lstm", "shared", "clipped_sgd")}


def step(
    bucket_bytes: int = 4 << 20, early_update: bool = True, clip: float | None = None, accumulation: int = 1
) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    spec = StepSpec(F.cross_entropy, OptimizerSpec(), clip, ranks=RankSpec(3, bucket_bytes), accumulation=accumulation)
    return capture(model, [torch.randn(4, 8)], [torch.randint(0, 3, (4,))], spec, early_update)


def exchanged(captured: Captured) -> list[list[str]]:
    """Return the names of what each collective changes, in order."""
    trace = captured.trace
    accesses = [operator.accesses for operator in trace.operators if operator.target == str(ALL_REDUCE)]
    return [[trace.tensor_name[tensor] for tensor, mode in row if mode == Mode.WRITE] for row in accesses]


def places(captured: Captured, target: str) -> list[int]:
    return [index for index, operator in enumerate(captured.trace.operators) if target in operator.target]


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_buckets_are_filled_in_the_order_of_backward() -> None:
    names = [bucket[:-1] for bucket in exchanged(step(bucket_bytes=1080))]
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
    for collective in at:
        before = collective - 1
        while trace.target[before] == str(ALL_REDUCE):
            before -= 1
        changed = {tensor for tensor, mode in trace.operators[collective].accesses if mode == Mode.WRITE}
        if collective - 1 == before:
            assert changed & {tensor for tensor, _ in trace.operators[before].accesses}
    first_update = places(captured, "_fused_")[0]
    assert (first_update < places(captured, "threshold_backward")[0]) == early_update


def test_updates_and_clipping_follow_the_collectives() -> None:
    captured = step(bucket_bytes=1, clip=1.0)
    assert max(places(captured, "all_reduce_")) < min(places(captured, "vector_norm"))
    early = step(bucket_bytes=1)
    trace = early.trace
    reduced: set[int] = set()
    for operator in trace.operators:
        tensors = {tensor for tensor, _ in operator.accesses}
        if operator.target == str(ALL_REDUCE):
            reduced |= tensors
        elif "_fused_" in operator.target:
            gradients = {tensor for tensor in tensors if trace.tensor_name[tensor].endswith(".grad")}
            assert gradients and gradients <= reduced


def test_a_step_of_one_process_has_none() -> None:
    spec = StepSpec(F.cross_entropy)
    captured = capture(nn.Linear(4, 3), [torch.randn(2, 4)], [torch.tensor([0, 1])], spec)
    assert not places(captured, "all_reduce_") and captured.share is None
    assert len(step().given) == len(captured.given) + 1


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_of_networks_leave_collectives_as_they_are(name: str) -> None:
    model, inputs, targets, spec = NETWORKS[name].make()
    options = {**vars(spec), "ranks": RankSpec(2, 200)}
    trace = capture(model, inputs, targets, StepSpec(**options), early_update=True).trace
    trace = roofline.timed(trace, FAST)
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


# ---- times and memory ------------------------------------------------------------------------------------------------


def test_the_estimate_has_the_time_on_the_network() -> None:
    captured = step()
    (collective,) = places(captured, "all_reduce_")
    network = collectives.network_us(captured.trace)
    gradient_bytes = 4 * (9 * 16 + 17 * 16 + 17 * 3) + 8  # and the turn
    link = collectives.ETHERNET_10
    expected = 2 * 2 * link.latency_us + 2 * 2 / 3 * gradient_bytes / link.bytes_per_s * 1e6
    assert network[collective] == pytest.approx(expected)
    assert network.sum() == network[collective]
    assert roofline.estimate(captured.trace, FAST)[collective] > expected
    assert str(ALL_REDUCE) == collectives.ALL_REDUCE


def test_the_copy_of_a_bucket_is_its_workspace() -> None:
    several, single = step(), step(bucket_bytes=1)
    assert several.trace.workspace_bytes[places(several, "all_reduce_")].tolist() == [4 * (9 * 16 + 17 * 16 + 17 * 3)]
    assert not single.trace.workspace_bytes[places(single, "all_reduce_")].any()


def test_collectives_are_not_measured_by_themselves() -> None:
    """There is no process group here, in which they could be executed."""
    captured = step()
    device = HostDevice(FAST)
    workspaces, (collective,) = probe(captured, device, 1 << 30), places(captured, "all_reduce_")
    assert workspaces[collective] == captured.trace.workspace_bytes[collective] > 0
    with pytest.raises(MeasurementError, match="a step that waits for other ranks cannot be measured by itself"):
        Calibration([captured], device, 1 << 30)
    device.close()
