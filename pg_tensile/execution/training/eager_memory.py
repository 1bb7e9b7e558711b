"""Memory that eager steps take besides the model's state: measured in the first one, for a model is not captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.runtime.measure import CachingAllocator, HostAllocator


@contextmanager
def backward_measured(optimizer: Optimizer, device: torch.device, keep: Callable[[int], None]) -> Iterator[None]:
    """Measure one step, and pass `keep` the most bytes that its forward and backward pass take.

    These are activations, gradients and workspaces. What the optimizer makes in its first step is not among them. If
    this thread is being profiled already, nothing is measured.
    """
    meter = HostAllocator() if device.type == "cpu" else CachingAllocator(device)
    try:
        meter.__enter__()
    except MeasurementError:
        yield
        return
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        if not stopped:
            meter.stop()
        stopped = True

    hook = optimizer.register_step_pre_hook(stop)
    try:
        meter.start()
        yield
    finally:
        hook.remove()
        stop()
        meter.__exit__(None, None, None)
    keep(int(meter.read().max()))
