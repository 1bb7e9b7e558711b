"""Scenario of two devices that share a pool of memory."""

from __future__ import annotations

from contextlib import ExitStack, closing

import torch

from pg_tensile.execution.runtime.accelerator import AcceleratorDevice
from pg_tensile.execution.runtime.shared_pool import SharedPool
from pg_tensile.planning.device.profile import A100_40GB
from tests.accelerator.mutants.harness import DEVICE, SIZE, onboard, scenario
from tests.accelerator.mutants.job import Prepared
from tests.emulated.emulated import control


@scenario
def pooled(prepared: Prepared) -> object:
    """Memory that passes from the stream that had it before to the pool, and from one device to the other.

    All on streams that have not waited for each other; results are read while the other device takes their memory."""
    control.schedule("late_compute", 0)
    with ExitStack() as stack:
        with torch.Stream(torch.device(DEVICE)):
            onboard(0, 2 * SIZE)
            pool = stack.enter_context(closing(SharedPool(DEVICE, 2 * SIZE)))
        one, other = (
            stack.enter_context(closing(AcceleratorDevice(DEVICE, profile=A100_40GB, pool=pool))) for _ in range(2)
        )
        with torch.Stream(torch.device(DEVICE)):
            with one.iteration():
                results = [onboard(1), onboard(2)]
            read = [result.add(1) for result in results]
            del results
        with other.iteration():
            results = [onboard(3), onboard(4)]
            del results
            with torch.Stream(torch.device(DEVICE)), one.iteration():
                results = [onboard(5), onboard(6)]
        torch.accelerator.synchronize()
        return [[int(each.max()) for each in tensors] for tensors in (read, results)]
