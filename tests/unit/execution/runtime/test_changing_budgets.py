"""Budgets change while a job runs: until an iteration has ended under the new plan, the larger one counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pg_tensile.errors import DeviceError, OutOfDeviceMemoryError
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.measure import Meter
from pg_tensile.planning.plan.memory import footprint
from tests.unit.executing import (
    FAST,
    EagerJob,
    batch,
    captured_net,
    change,
    eager,
    net,
    peak,
    plan_of,
    recorded,
    run,
    same,
    validation_net,
)


def test_until_an_iteration_under_the_new_plan_has_ended_the_larger_budget_counts(start):
    large, small = peak("none"), peak("swap_all")
    budgets: list[int | None] = []

    class Notes(HostDevice):
        def upload(self, source: Tensor, target: Tensor) -> None:
            super().upload(source, target)
            budgets.append(executor.budget_bytes)

    device = Notes(FAST, large)
    executor = start("none", device=device)
    run(executor, 1)
    change(executor, "swap_all", small)
    assert executor.budget_bytes == large, "it has not been taken over yet"
    run(executor, 1)
    assert set(budgets) == {large} and executor.budget_bytes == small
    change(executor, "none", large)
    budgets.clear()
    run(executor, 1)
    assert set(budgets) == {large} and executor.budget_bytes == large
    change(executor, "swap_all")
    run(executor, 1)
    assert executor.budget_bytes == large, "None is no change"
    assert executor.counters.device_peak_bytes == executor.counters.peak_bytes == large
    device.close()


def test_device_bytes_are_those_of_the_registry_and_a_graph_knows_its_peak(start):
    executor = start("none")
    assert executor.budget_bytes is None
    weights = sum(parameter.nbytes for parameter in net().parameters()) - 3 * 4  # one is not used
    assert executor.device_bytes > 3 * weights
    assert executor.graphs[0].device_peak_bytes == peak("none")
    change(executor, "swap_all", peak("swap_all"))
    run(executor, 1)
    assert executor.graphs[0].device_peak_bytes == executor.budget_bytes == peak("swap_all")
    assert executor.device_bytes < weights


def test_a_plan_that_exceeds_its_budget_is_refused_before_it_runs_and_a_better_one_goes_on(start):
    expected = eager(4)[1]
    executor = start("none", budget=peak("none"))
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, expected[0])
    for _ in range(2):
        change(executor, "recompute_all", peak("swap_all"))
        with pytest.raises(OutOfDeviceMemoryError) as info:
            executor.step(*batch(1))
        assert info.value.budget == peak("swap_all") and executor.budget_bytes == peak("none")
    change(executor, "swap_all", peak("swap_all"))
    assert torch.equal(executor.step(*batch(1)).loss, expected[1])
    assert executor.budget_bytes == peak("swap_all")
    change(executor, "none", peak("none"))
    assert torch.equal(executor.step(*batch(2)).loss, expected[2])
    assert torch.equal(executor.step(*batch(3)).loss, expected[3])


class Hungry(HostDevice):
    """Its operators turn out to take more memory than anybody knew."""

    class Allocator(Meter):
        def __init__(self) -> None:
            self.steps = 0

        def start(self) -> None:
            self.steps += 1

        def stop(self) -> None:
            return None

        def read(self) -> np.ndarray:
            return np.full(self.steps, 30_000)

    def allocator(self) -> Meter:
        return self.Allocator()


def test_workspaces_measured_later_may_exceed_the_budget_and_nothing_is_lost(start):
    reference, losses = eager(5)
    device = Hungry(FAST, peak("none"))
    executor = start("none", device=device)
    executor.measure()
    torch.manual_seed(1)
    for number in range(3):  # the first is held against the trace, the others are measured
        assert torch.equal(executor.step(*batch(number)).loss, losses[number])
    needed = executor.graphs[0].device_peak_bytes
    assert needed > peak("none")
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemoryError) as info:
            executor.step(*batch(3))
        assert info.value.in_use + info.value.requested > peak("none")
    change(executor, "none", needed)
    assert torch.equal(executor.step(*batch(3)).loss, losses[3])
    assert executor.counters.device_peak_bytes == needed > executor.counters.peak_bytes
    smaller = footprint(executor.trace, plan_of("swap_all", executor.trace)).device_peak_bytes
    assert peak("swap_all") < smaller < needed
    change(executor, "swap_all", smaller)
    assert executor.budget_bytes == needed
    assert torch.equal(executor.step(*batch(4)).loss, losses[4])
    assert executor.budget_bytes == executor.graphs[0].device_peak_bytes == smaller
    assert same(executor.state_dict().model, reference.model.state_dict())
    device.close()


def test_what_validation_leaves_on_the_device_goes_when_the_budget_shrinks_during_it(start, policy):
    """The optimizer's state, of no use in an evaluation, must not be there when the new budget counts."""
    captured, reference = validation_net(), EagerJob()
    executor = start(policy)
    executor.add(captured)
    torch.manual_seed(1)
    assert torch.equal(executor.step(*batch(0)).loss, reference_step(reference, 0))
    small = max(peak("swap_all"), footprint(captured.trace).device_peak_bytes)
    change(executor, "swap_all", small)
    executor.recording = True
    for number in (7, 8):
        result = executor.evaluate(*batch(number, 5))
        assert torch.equal(result.outputs[0], reference.evaluate(*batch(number, 5))[1])
        assert executor.plan == plan_of("swap_all", captured_net().trace)
        assert recorded(executor).device_peak_bytes <= small
    assert executor.budget_bytes == small >= executor.device_bytes
    state = torch.get_rng_state()
    expected = reference_step(reference, 1)
    torch.set_rng_state(state)
    assert torch.equal(executor.step(*batch(1)).loss, expected)
    assert same(executor.state_dict().model, reference.state())


def reference_step(reference: EagerJob, number: int) -> Tensor:
    if number == 0:
        torch.manual_seed(1)
    loss = reference.step(*batch(number)).clone()
    if number == 0:
        torch.manual_seed(1)
    return loss


def test_a_negative_budget_is_refused(start):
    executor = start("none")
    with pytest.raises(DeviceError, match="a budget of -1 bytes is not possible"):
        change(executor, "none", -1)
    assert executor.inspect().changes.asked is None
