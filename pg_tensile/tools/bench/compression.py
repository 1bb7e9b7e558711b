"""Compressed swaps in benchmarks: sparsity of the tensors, times of the codecs, and plans with both.

Statistics come from steps in which every tensor is swapped, to include the tensors that only a plan with compression
swaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pg_tensile.errors import CodecError
from pg_tensile.execution.capture import Captured
from pg_tensile.execution.measuring.codecs import calibrate
from pg_tensile.execution.runtime.device import Device
from pg_tensile.planning.compression.codec import available, named_codec
from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.coding import CHUNK_BYTES, Coding
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import swap_all
from pg_tensile.planning.policies.compression.advisor import choose_compression, coding_with
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.contenders import PlanStepper
from pg_tensile.tools.bench.workload import Workload

STEPS = 10  # before tensors are examined, so that weights and momentum have left their initial values


class Sparsity(NamedTuple):
    """Statistics of a graph's tensors, and coding times on the device."""

    statistics: dict[int, Statistics]
    times: CodecTimes
    error: float  # relative absolute error of the times (CSWAP, section V-C)


def measure_sparsity(workload: Workload, captured: Captured, device: Device, seconds: float) -> Sparsity:
    """Train some steps, then measure the codecs for about `seconds`. Raises the errors of a step or a measurement."""
    stepper = PlanStepper(workload, captured, device, NO_EVENTS)
    try:
        *batches, transition, last = workload.batches(STEPS + 2)
        for batch in batches:
            stepper.step(batch)
        stepper.executor.change_plan(swap_all.plan({0: captured.trace}, device.profile, None)[0])
        stepper.step(transition)
        stepper.executor.measure_sparsity()
        stepper.step(last)
        statistics = stepper.executor.statistics()
    finally:
        stepper.close()
    kind: torch.device = device.torch_device
    times, error = calibrate(kind, seconds, CHUNK_BYTES[kind.type], busy=True)
    return Sparsity(statistics, times, error)


def plan_compressed(
    make: Callable[[Trace], Plan], trace: Trace, profile: DeviceProfile, compression: str, sparsity: Sparsity
) -> tuple[Plan, Coding | None]:
    """Return the plan that `make` makes with compressed swaps, and its coding.

    `compression`: "auto", or the codec for everything that it makes smaller. Raises the errors of `make`, and
    CodecError if the codec is not available.
    """
    if compression == "auto":
        compressed = choose_compression(make, trace, profile, sparsity.statistics, sparsity.times)
        return compressed.plan, compressed.coding
    codec = named_codec(compression)
    if not available(codec):
        raise CodecError(f"the codec {compression} is not available", hint='Install the package "lz4".')
    coded = trace.with_coding(coding_with(codec, trace, sparsity.statistics, sparsity.times))
    return with_codecs(coded, make(coded)), coded.coding
