"""The allocator takes no more of the device than a job was granted, and that is enough for its plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from itertools import product

import pytest
import torch
from torch import nn

from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.execution.runtime.allocator_limit import limit_enforced_by
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.steps import EagerSteps
from pg_tensile.planning.allocator_rules import MARGIN_BYTES
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from tests.accelerator.target import DEVICE, module
from tests.accelerator.test_device import MIB, onboard
from tests.accelerator.test_executor import prepare, train  # noqa: F401

POLICY_NAMES = ("none", "swap_all", "recompute_all", "joint", "lru")
SHORT = ("swap_all", "joint")


def with_budget(budget_bytes: int | None) -> closing[AcceleratorDevice]:
    return closing(AcceleratorDevice(DEVICE, A100_40GB, budget_bytes, strict=True))


def memory_bytes() -> int:
    return torch.accelerator.get_memory_info(DEVICE)[1]


def limit_bytes() -> int:
    """Return the limit that the allocator applies: the product rounded down, where it is not whole already."""
    return round(module().get_per_process_memory_fraction(DEVICE) * memory_bytes() - 0.25)


@pytest.fixture(autouse=True)
def limit_restored() -> Iterator[None]:
    yield
    assert limit_bytes() == memory_bytes()


def plan_of(policy: str, trace: Trace) -> Plan:
    if policy == "joint":
        return JobPlanner(trace, A100_40GB).within(6 * plan_bytes(trace) // 10).plan
    return POLICIES[policy]({0: trace}, A100_40GB, 6 * plan_bytes(trace) // 10)[0]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if name == "convolutions" or policy in SHORT else pytest.mark.long)
        for name, policy in product(("convolutions", "attention", "lstm"), POLICY_NAMES)
    ],
)
def test_what_a_plan_needs_is_enough_for_it(prepare, name, policy):  # noqa: F811
    """Long for some pairs: every policy is tried on one network, and those that move most on all."""
    prepared = prepare(name)
    plan = plan_of(policy, prepared.captured.trace)
    granted = plan_bytes(prepared.captured.trace, plan)
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_stats(DEVICE)
    with with_budget(granted) as device:
        assert limit_bytes() == granted + device.library_bytes + MARGIN_BYTES
        assert (limit_enforced_by(torch.device(DEVICE)) or "").startswith("allocator")
        with Executor(prepared.captured, copy.deepcopy(prepared.model), device, plan) as executor:
            train(executor, prepared)
        after = torch.accelerator.memory_stats(DEVICE)
        assert after["num_ooms"] == before["num_ooms"]
        assert after["num_alloc_retries"] == before["num_alloc_retries"]


def test_more_than_the_budget_is_refused_although_the_device_has_it():
    with with_budget(10 * MIB) as device, device.iteration():
        kept = onboard(9 * MIB, 1)
        with pytest.raises(torch.OutOfMemoryError):
            onboard(memory_bytes() // 2, 1)
        assert kept[-1] == 1


def test_a_process_may_take_what_its_devices_may_together():
    with with_budget(10 * MIB) as first:
        alone = limit_bytes()
        with with_budget(30 * MIB) as second:
            assert limit_bytes() == alone + 30 * MIB + second.library_bytes
            with with_budget(None):
                assert limit_bytes() == memory_bytes()
            first.limit_memory(20 * MIB)
            assert limit_bytes() == alone + 40 * MIB + second.library_bytes
        assert limit_bytes() == alone + 10 * MIB


def test_a_smaller_budget_gives_cached_memory_back():
    with with_budget(1000 * MIB) as device:
        with device.iteration():
            del_soon = onboard(200 * MIB, 1)
        del del_soon
        device.synchronize()
        cached = torch.accelerator.memory_reserved(DEVICE)
        device.limit_memory(100 * MIB)
        assert torch.accelerator.memory_reserved(DEVICE) <= cached - 190 * MIB


def test_an_executor_tells_the_device_its_budget(prepare):  # noqa: F811
    prepared = prepare("convolutions")
    trace = prepared.captured.trace
    most = plan_bytes(trace)
    less = 6 * most // 10
    x, y = prepared.batches[0]
    with with_budget(most) as device:
        before = limit_bytes()
        with Executor(prepared.captured, copy.deepcopy(prepared.model), device) as executor:
            executor.step([x], [y])
            executor.change_plan(plan_of("joint", trace), budget_bytes=less)
            executor.step([x], [y])
            assert limit_bytes() == before - most + less
            executor.step([x], [y])


def test_a_job_without_a_plan_keeps_to_its_budget_too():
    model = nn.Linear(4, 1)
    arguments = (model, Settings(1, 4), Task.REGRESSION, torch.device(DEVICE), 4)
    unlimited = EagerSteps(*arguments)
    assert limit_bytes() == memory_bytes()
    unlimited.close()
    steps = EagerSteps(*arguments, 10 * MIB)
    assert limit_bytes() == 10 * MIB + MARGIN_BYTES
    with pytest.raises(torch.OutOfMemoryError):
        onboard(memory_bytes() // 2, 1)
    steps.close()


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="PyTorch does not tell its allocator's settings"
)
def test_what_is_set_about_segments_stays():
    settings = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        with with_budget(MIB):
            assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:False"
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:100")
        with with_budget(MIB):
            set_now = torch._C._accelerator_getAllocatorSettings()
            assert set_now == "max_split_size_mb:100,expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
