"""Contenders of a benchmark: eager PyTorch, and one program for each policy (peers.py has variants of eager PyTorch).

All start from the same weights. A contender starts afresh in every round, so only one of them holds memory at a time.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.capture import Captured
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.raw_bytes import raw_bytes
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.memory_flow import Requests, claimed
from pg_tensile.execution.runtime.record import Counters
from pg_tensile.execution.runtime.state import TrainingState, training_state
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.tools.bench.conditions import AllocatorUse, TurnConditions, TurnWatch
from pg_tensile.tools.bench.workload import Batch, Workload, seed_everything

NO_STATE = TrainingState({}, {})


class Stepper(Protocol):
    """A training run in progress."""

    def step(self, batch: Batch) -> Tensor:
        """Execute one step and return its loss, possibly before the device has finished."""
        ...

    def synchronize(self) -> None: ...

    def count(self) -> None:
        """Start counting: `totals` covers the steps from here on."""
        ...

    def totals(self) -> Counters | None:
        """Return the counters, or None if nothing is counted."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return copies on the CPU of the last step's gradients, by parameter; empty if they are not kept."""
        ...

    def state(self) -> TrainingState:
        """Return a copy on the CPU of everything that the steps have changed."""
        ...

    def restore(self, initial: TrainingState) -> None:
        """Restore the state from before the first step, as `state` returned it then."""
        ...

    def close(self) -> None: ...


class EagerStepper:
    """Plain PyTorch, with the optimizer of the captured step."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._device = device
        self._step = EagerStep(workload.fresh_model().to(device), workload.spec)

    def step(self, batch: Batch) -> Tensor:
        inputs, targets = ([tensor.to(self._device) for tensor in part] for part in batch)
        return self._step.step(inputs, targets).loss

    def synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def count(self) -> None:
        return None

    def totals(self) -> Counters | None:
        return None

    def gradients(self) -> dict[str, Tensor]:
        named = self._step.model.named_parameters()
        return {name: parameter.grad.cpu().clone() for name, parameter in named if parameter.grad is not None}

    def forget_gradients(self) -> None:
        self._step.optimizer.zero_grad(set_to_none=True)

    def persistent(self) -> list[Tensor]:
        """Return the tensors that persist between two steps, except gradients."""
        model, states = self._step.model, self._step.optimizer.state.values()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*model.parameters(), *model.buffers(), *kept]

    def state(self) -> TrainingState:
        return training_state(self._step.model, self._step.optimizer)

    def restore(self, initial: TrainingState) -> None:
        self._step.model.load_state_dict(dict(initial.model))
        self._step.optimizer.state.clear()

    def close(self) -> None:
        del self._step


class PlanStepper:
    """A program on a device of the runtime."""

    def __init__(
        self,
        workload: Workload,
        captured: Captured,
        device: Device,
        plan: Plan,
        device_graphs: bool = False,
        groups: Sequence[Group] = (),
        requests: Requests | None = None,
    ) -> None:
        self._device = device
        with claimed(requests, plan.generation, bool(groups)):
            self.executor = Executor(
                captured,
                workload.fresh_model(),
                device,
                plan,
                device_graphs=device_graphs,
                groups=groups,
                requests=requests,
            )

    def step(self, batch: Batch) -> Tensor:
        return self.executor.step(batch.inputs, batch.targets).loss

    def synchronize(self) -> None:
        self._device.synchronize()

    def count(self) -> None:
        self.executor.counters = Counters()

    def totals(self) -> Counters | None:
        return self.executor.counters

    def gradients(self) -> dict[str, Tensor]:
        return {}

    def state(self) -> TrainingState:
        return self.executor.state_dict()

    def restore(self, initial: TrainingState) -> None:
        self.executor.load_state_dict(initial)

    def close(self) -> None:
        self.executor.close()


class Turn(NamedTuple):
    """Results of a contender in one round: milliseconds of the run's first step, and of the steps that count."""

    first_ms: float
    step_ms: tuple[float, ...]
    losses: tuple[Tensor, ...] = ()
    state: TrainingState = NO_STATE
    totals: Counters | None = None  # of the steps that count
    gradients: Mapping[str, Tensor] = {}  # of the first step, if requested
    digest: str = ""  # of losses and state, in place of them where the turn was taken in another process
    allocator: AllocatorUse | None = None  # in the steps that count, on an accelerator that was watched
    conditions: TurnConditions = TurnConditions()

    def without_state(self) -> Turn:
        return self._replace(state=NO_STATE, gradients={})


def take_turn(
    stepper: Stepper,
    batches: Sequence[Batch],
    warmup: int,
    seed: int,
    gradients: bool = False,
    limit_s: float | None = None,
    watch: TurnWatch | None = None,
) -> Turn:
    """Execute all batches from the initial weights; the first `warmup` of them do not count.

    `gradients`: whether to keep those of the first step. `watch` observes the steps that count. Raises
    MeasurementError if the first step takes longer than `limit_s`; None means no limit.
    """
    seed_everything(seed)
    gc.collect()
    times: list[float] = []
    losses: list[Tensor] = []
    kept: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        if number == warmup:
            stepper.count()
            if watch is not None:
                watch.start()
        began = time.perf_counter()
        with given_up_after(limit_s if number == 0 else None):
            loss = stepper.step(batch)
            stepper.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(loss.detach().cpu().clone())
        if gradients and number == 0:
            kept = stepper.gradients()
    turn = Turn(times[0], tuple(times[warmup:]), tuple(losses), totals=stepper.totals(), gradients=kept)
    if watch is not None:
        watch.stop()
        turn = turn._replace(allocator=watch.allocator, conditions=watch.conditions)
    return turn._replace(state=stepper.state())


@contextmanager
def given_up_after(seconds: float | None) -> Iterator[None]:
    """Raise MeasurementError in the body after `seconds`, at any point of it, as Ctrl-C would; None means never.

    Works in the main thread only.
    """
    if seconds is None:
        yield
        return

    def give_up(*_: object) -> None:
        raise MeasurementError(f"given up: its first step took longer than {seconds:,.3g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- equal to the last bit ------------------------------------------------------------------------------------------


def difference(turn: Turn, reference: Turn) -> str | None:
    """Return the first difference between two turns: "loss of step 2", "features.conv.weight".

    None if they are equal to the last bit, where a NaN equals a NaN.
    """
    for step, (mine, yours) in enumerate(zip(turn.losses, reference.losses, strict=True), 1):
        if not same_bits(mine.reshape(-1), yours.reshape(-1)):
            return f"loss of step {step}"
    for name, tensor in turn.state.model.items():
        if isinstance(tensor, Tensor) and not same_bits(tensor, reference.state.model.get(name)):
            return name
    for name, kept in turn.state.optimizer.items():
        for key, tensor in kept.items():
            if not same_bits(tensor, reference.state.optimizer.get(name, {}).get(key)):
                return f"{key} of {name}"
    return None


def same_bits(tensor: Tensor, reference: Tensor | None) -> bool:
    if reference is None or tensor.shape != reference.shape or tensor.dtype != reference.dtype:
        return False
    return torch.equal(_bits(tensor), _bits(reference))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), float("nan"))
    return raw_bytes(tensor)
