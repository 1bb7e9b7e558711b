"""Scenarios of an executor: steps under plans that change, a model that is given back, failures."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress

import torch

from pg_tensile.errors import ExecutorError, LinkError, OutOfDeviceMemoryError
from pg_tensile.execution.runtime.executor import Executor
from tests.accelerator.mutants.harness import (
    opened,
    scenario,
)
from tests.accelerator.mutants.job import Prepared
from tests.emulated.emulated import control


def checksum(tensors: Iterable[torch.Tensor]) -> float:
    """Return a number that differs if a bit of the tensors does."""
    weighted = (
        tensor.detach().double().flatten() * torch.arange(1, tensor.numel() + 1, device=tensor.device)
        for tensor in tensors
    )
    return sum(float(tensor.sum()) for tensor in weighted)


def state_of(executor: Executor) -> float:
    state = executor.state_dict()
    return checksum([*state.model.values(), *(each for own in state.optimizer.values() for each in own.values())])


@scenario
def training(prepared: Prepared) -> object:
    """Steps under plans that change, with compressed copies, measurements, samples, and a state read and written."""
    with opened() as device:
        torch.manual_seed(1)
        plans, results = prepared.plans, []
        executor = Executor(prepared.captured, copy.deepcopy(prepared.model), device, plans["swap_all"])
        for number, (x, y) in enumerate(prepared.batches):
            control.schedule(("random", "late_copies", "late_compute")[number % 3], number)
            if number == 2:
                executor.change_plan(plans["coded"])
            if number == 4:
                executor.measure_sparsity()
            if number == 6:
                executor.change_plan(plans["recompute_all"])
            if number == 7:
                executor.change_plan(plans["swap_all"])
            executor.recording = number in (1, 5)
            results.append(executor.step([x], [y]).loss)
            if executor.recording:
                record = executor.record
                assert record is not None and all(moved.end_us >= moved.start_us > 0 for moved in record.transfers)
            if number == 3:
                moved = executor.moved_bytes()
            if number == 4:
                shares = {tensor: each.zero_share for tensor, each in executor.statistics().items()}
            if number == 1:
                state = executor.state_dict()
            if number == 2:  # right after a step, whose copies are under way
                executor.load_state_dict(state)
        model = state_of(executor)
        executor.close()
        losses = [loss.item() for loss in results]
        return losses, model, sorted(moved.items()), sorted(shares.items())


@scenario
def replayed(prepared: Prepared) -> object:
    """Steps as device graphs, under plans that change while a replay is under way, and with the model lent out."""
    with opened() as device:
        torch.manual_seed(1)
        plans, results, replays = prepared.plans, [], []
        executor = Executor(
            prepared.captured, copy.deepcopy(prepared.model), device, plans["swap_all"], device_graphs=True
        )
        changes = {4: "moving", 9: "swap_all", 13: "none"}
        for number in range(17):
            control.schedule(("random", "late_copies", "late_compute")[number % 3], number)
            x, y = prepared.batches[number % len(prepared.batches)]
            if number in changes:
                executor.change_plan(plans[changes[number]])
            results.append(executor.step([x], [y]).loss)
            if number == 7:
                with executor.resident():
                    pass
            replays.append(executor.replays)
        model = state_of(executor)
        executor.close()
        return [loss.item() for loss in results], model, replays


@scenario
def given_back(prepared: Prepared) -> object:
    """A model that is lent out, and given back by `close` right after a step, from the host and from the device."""
    with opened() as device:
        found = []
        for plan in ("swap_all", "none"):
            torch.manual_seed(1)
            model = copy.deepcopy(prepared.model)
            executor = Executor(prepared.captured, model, device, prepared.plans[plan])
            for number, (x, y) in enumerate(prepared.batches[:3]):
                control.schedule(("late_copies", "late_compute", "random")[number], number)
                executor.step([x], [y])
            control.schedule("late_copies", 0)
            with executor.resident():
                found.append(checksum(model.parameters()))
            x, y = prepared.batches[3]
            executor.step([x], [y])
            executor.close()
            found.append(checksum(model.parameters()))
        return found


@scenario
def interrupted(prepared: Prepared) -> object:
    """Iterations that fail at an allocation, and go on at once if they may, or from a state that was saved."""
    with opened() as device:
        found = []
        x, y = ([each] for each in prepared.batches[0])
        for plan in ("swap_all", "coded"):
            torch.manual_seed(1)
            executor = Executor(prepared.captured, copy.deepcopy(prepared.model), device, prepared.plans[plan])
            executor.step(x, y)
            state = executor.state_dict()
            for allocation in (3, 12, 30):
                control.schedule("late_copies", 0)
                control.fail_allocation(allocation)
                with suppress(OutOfDeviceMemoryError, LinkError):  # LinkError: it was the coder's
                    executor.step(x, y)
                control.fail_allocation(0)
                with suppress(ExecutorError):  # it had changed the weights
                    found.append(executor.step(x, y).loss.item())
                executor.load_state_dict(state)
                found.append(executor.step(x, y).loss.item())
            executor.close()
        return found
