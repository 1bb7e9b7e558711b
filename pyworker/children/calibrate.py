"""The trainer of `calibrate_device`: measures the device, then operators on it, and trains its latency models.

Phases: the device's profile; capturing training steps to measure (those of registered models, and a standard set of the
built-in architectures, so that a fresh database is calibrated as well; calibration_workloads.py); device memory,
requested like that of a job without plans; the steps' operators, alone and beside other processes; the models, once
without some of the calls, which gives their error, and once with all. Capturing takes a quarter of the time at most;
the cost of compressing swaps is measured in addition (compression.py). STATE frames with the models follow, then DONE.
STOP is honoured between two visits to a graph, and then nothing is kept. A calibration that the server has begun by
itself is the same, at the lowest priority.
"""

from __future__ import annotations

import re
import time
import zlib
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.errors import MeasurementError, TensileError
from pyworker.children.calibration_workloads import Workload, capture_workload, workloads
from pyworker.children.claim import Claims
from pyworker.children.job import network_of
from pyworker.children.overhead import earlier_overhead, overhead_bytes
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.capture import Captured
    from pg_tensile.planning.device.profile import DeviceProfile
    from pg_tensile.planning.latency.features import Sample
    from pg_tensile.planning.latency.mlp import LatencyModels
    from pg_tensile.planning.trace.trace import Trace
    from pyworker.children.channel import Channel

CAPTURING = 0.25  # share of the time, at most
CODECS = 0.1  # share of the time, in addition
MEMORY = 0.25  # share of the device's memory, at most
FIRST_TYPE = re.compile(r"\[?([a-z]+[0-9]+)\[")  # of a signature
HELD_OUT = 5  # one call in HELD_OUT measures the error of models that have not seen it


def run(channel: Channel, libraries: Future[None]) -> None:
    """Run the calibration: the rest of the process after JOB, once PyTorch has been imported."""
    channel.wait_for(libraries, "preparing")
    import torch

    from pg_tensile.execution.backends import use_deterministic_algorithms
    from pg_tensile.execution.device_choice import choose_device
    from pg_tensile.execution.measuring.device import measure
    from pg_tensile.execution.measuring.operators import Calibration
    from pg_tensile.execution.runtime.open_device import open_device
    from pg_tensile.planning.latency import mlp, model_bytes

    spec = channel.spec
    seconds = float(spec["options"]["seconds"])
    torch.set_num_threads(spec["threads"])
    use_deterministic_algorithms()
    device = choose_device(spec["device"])
    _report(channel, 0, 0, None)
    # behind the imports, which would make it seem slow
    profile = channel.wait_for(channel.background.submit(measure, device), "calibrating")
    started = time.monotonic()
    captured, warnings = _capture(channel, spec["workloads"], device, started + CAPTURING * seconds)
    with closing(open_device(device, profile)) as runtime:
        captured_s = time.monotonic() - started
        limit_bytes = _claim(channel, device, profile, int(MEMORY * profile.memory_bytes))
        calibration = Calibration(captured, runtime, limit_bytes, max(0.5, seconds - captured_s))
        with closing(calibration.run()) as visits:
            for progress in visits:
                left_s = max(0.0, (1 + CODECS) * seconds - (time.monotonic() - started))
                _report(channel, progress.done, progress.total, left_s)
    codecs = _measure_codecs(channel, device, CODECS * seconds)
    models = mlp.train(calibration.samples, profile)
    meta = {
        "device": str(device),
        "profile": asdict(profile),
        "kinds": len(models.kinds),
        "samples": len(calibration.samples),
        "error": held_out_error(calibration.samples, profile),
        "codecs": codecs,
        "known_kinds": sorted(set().union(*(operator_kinds(graph.trace) for graph in captured))),
    }
    channel.send_state("latency_models", model_bytes.encode(models), meta)
    channel.send(FrameType.DONE, {"stopped": False, "warnings": warnings})


def _claim(channel: Channel, device: torch.device, profile: DeviceProfile, size: int) -> int:
    """Request `size` bytes of the device, or its budget if that is less, and return the bytes granted.

    Waits until they are granted. Raises channel.Stopped."""
    overhead = overhead_bytes(str(device), profile, earlier_overhead(channel.spec["overheads"], str(device)))
    claims = Claims(channel, str(device), profile, overhead)
    while (answer := claims.request(size)).type == FrameType.REFUSE:
        size = min(size, answer.header["budget_bytes"] - overhead)
    return size


def _report(channel: Channel, step: int, steps: int, left_s: float | None) -> None:
    """Report the progress, and the seconds that are left to measure. Raises channel.Stopped.

    Any PLAN or REFUSE that arrives is ignored, for plans of others do not change what was granted.
    """
    left = {"time_left_s": left_s, "least_time_left_s": left_s}
    channel.send(FrameType.PROGRESS, {"phase": "calibrating", "step": step, "steps": steps} | left)
    channel.poll_early("calibrating", {FrameType.PLAN, FrameType.REFUSE})


def _measure_codecs(channel: Channel, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the times of the device's codecs, measured in a thread. Raises channel.Stopped."""
    from pyworker.children.compression import measure_codecs

    measurement = channel.background.submit(measure_codecs, device, seconds)
    return channel.wait_for(measurement, "calibrating", {FrameType.PLAN, FrameType.REFUSE})


# ---- what is measured ------------------------------------------------------------------------------------------------


def _capture(
    channel: Channel, models: list[dict[str, Any]], device: torch.device, deadline: float
) -> tuple[list[Captured], list[str]]:
    """Return the steps captured until the deadline, at least one, and the reasons why others could not be.

    `models` is what tensile_worker._calibration_workloads() returns.
    """
    captured: list[Captured] = []
    warnings: list[str] = []
    registered: list[Workload] = []

    def warn(kind: str, error: TensileError) -> None:
        warnings.append(f"a model of type {kind} was not measured: {error.message}")

    for described in models:
        network, _ = network_of(described["architecture"])
        if network is None:  # trees and lines have no steps
            continue
        model = described | {"architecture": network}
        try:
            workload = Workload.from_json(model) if "inputs" in model else Workload.untrained(model["architecture"])
        except TensileError as error:
            warn(model["architecture"]["type"], error)
        else:
            registered += [workload] if workload else []
    for workload in workloads(registered):
        if captured and time.monotonic() > deadline:
            break
        _report(channel, 0, 0, None)
        try:
            captured.append(capture_workload(workload, device))
        except TensileError as error:
            warn(workload.architecture["type"], error)
    if not captured:
        raise MeasurementError("no training step could be captured", detail="; ".join(warnings))
    return captured, list(dict.fromkeys(warnings))


def operator_kinds(trace: Trace) -> set[str]:
    """Return the kinds of the trace's operators, which tensile_internal._operator_kind() derives in the same way.

    A kind is a target and the type of the first operand. The kinds of the latency models distinguish more, but another
    layout or flag of a known operator is not worth another calibration.
    """
    calls = zip(trace.target.codes.tolist(), trace.signature.codes.tolist(), strict=True)
    kinds = set()
    for target, signature in set(calls):
        dtype = FIRST_TYPE.match(trace.signature.values[signature])
        kinds.add(" ".join([trace.target.values[target], *(dtype.groups() if dtype else ())]))
    return kinds


# ---- how good it is --------------------------------------------------------------------------------------------------


def held_out_error(samples: list[Sample], profile: DeviceProfile) -> float | None:
    """Return the median relative error, on one call in `HELD_OUT`, of models trained without those calls.

    None if either set of calls is empty.
    """
    from pg_tensile.planning.latency import mlp

    held = [sample for sample in samples if _is_held_out(sample)]
    rest = [sample for sample in samples if not _is_held_out(sample)]
    if not held or not rest:
        return None
    models: LatencyModels = mlp.train(rest, profile)
    measured = np.array([sample.latency_us for sample in held])
    return float(np.median(np.abs(models.predict_samples(held, profile) / measured - 1)))


def _is_held_out(sample: Sample) -> bool:
    """Return whether the sample's call is held out; the same for all measurements of a call."""
    return zlib.crc32(f"{sample.target} {sample.signature}".encode()) % HELD_OUT == 0
