"""The executor of `tensile.calibrate()`: measures the device, then operators on it, and trains its latency models.

Phases: the device's profile; capturing training steps to measure (those of models that were trained, and a standard set
of the built-in architectures, so that a fresh database is calibrated as well); device memory, requested like that of a
job without plans; the steps' operators, alone and beside other processes; the models, once without some of the calls,
which gives their error, and once with all. Capturing takes a quarter of the time at most; the cost of compressing swaps
is measured in addition (compression.py). STATE frames with the models follow, then DONE. STOP is honoured between two
visits to a graph, and then nothing is kept.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from itertools import chain, count, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pg_tensile.errors import MeasurementError, TensileError
from pg_tensile.execution.data.preprocessing import ArrayInput, ModelInputs, Task, row_layout
from pyworker.children.job import overhead_bytes
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.capture import Captured
    from pg_tensile.planning.device.profile import DeviceProfile
    from pg_tensile.planning.latency.features import Sample
    from pg_tensile.planning.latency.mlp import LatencyModels
    from pyworker.children.channel import Channel

CAPTURING = 0.25  # share of the time, at most
CODECS = 0.1  # share of the time, in addition
MEMORY = 0.25  # share of the device's memory, at most
HELD_OUT = 5  # one call in HELD_OUT measures the error of models that have not seen it


class Workload(NamedTuple):
    """Training step to measure."""

    architecture: dict[str, Any]
    inputs: ModelInputs
    outputs: int
    task: Task
    batch_size: int
    optimizer: str
    options: dict[str, Any]

    @staticmethod
    def from_json(value: dict[str, Any]) -> Workload:
        """Return the workload of a model as tensile._calibration_workloads() returns it."""
        inputs = value["inputs"]
        arrays = tuple(ArrayInput(*array) for array in inputs["arrays"])
        bins = tuple(tuple(map(float, range(edges))) for edges in inputs["edges"])  # only their number matters
        sizes = ModelInputs(inputs["numeric"], tuple(inputs["cardinalities"]), arrays, bins)
        return Workload(**(value | {"inputs": sizes, "task": Task(value["task"])}))


def run(channel: Channel, libraries: Future[None]) -> None:
    """Run the calibration: the rest of the process after JOB, once PyTorch has been imported."""
    channel.wait_for(libraries, "preparing")
    import torch

    from pg_tensile.execution.measuring.device import choose_device, measure, use_deterministic_algorithms
    from pg_tensile.execution.measuring.operators import Calibration
    from pg_tensile.execution.runtime.open_device import open_device
    from pg_tensile.planning.latency import mlp, model_bytes

    spec = channel.spec
    seconds = float(spec["options"]["seconds"])
    torch.set_num_threads(spec["threads"])
    use_deterministic_algorithms()
    device = choose_device(spec["device"])
    _report(channel, 0, 0)
    profile = measure(device)
    started = time.monotonic()
    trained = [Workload.from_json(workload) for workload in spec["workloads"]]
    captured, warnings = _capture(channel, trained, device, started + CAPTURING * seconds)
    with closing(open_device(device, profile)) as runtime:
        captured_s = time.monotonic() - started
        limit_bytes = _claim(channel, device, profile, int(MEMORY * profile.memory_bytes))
        calibration = Calibration(captured, runtime, limit_bytes, max(0.5, seconds - captured_s))
        with closing(calibration.run()) as visits:
            for progress in visits:
                _report(channel, progress.done, progress.total)
    codecs = _measure_codecs(channel, device, CODECS * seconds)
    models = mlp.train(calibration.samples, profile)
    meta = {
        "device": str(device),
        "profile": asdict(profile),
        "kinds": len(models.kinds),
        "samples": len(calibration.samples),
        "error": held_out_error(calibration.samples, profile),
        "codecs": codecs,
    }
    channel.send_state("latency_models", model_bytes.encode(models), meta)
    channel.send(FrameType.DONE, {"stopped": False, "warnings": warnings})


def _claim(channel: Channel, device: torch.device, profile: DeviceProfile, size: int) -> int:
    """Request `size` bytes of the device, or its budget if that is less, and return the bytes granted.

    The request is that of a job without plans; this waits until it is granted. Raises channel.Stopped.
    """
    overhead = overhead_bytes(device.type, profile)
    header: dict[str, Any] = {
        "device": str(device),
        "profile": asdict(profile),
        "policy": "none",
        "fingerprint": None,
        "overhead_bytes": overhead,
        "persistent_bytes": 0,
        "parameters": 0,
        "vanilla_bytes": None,
        "operator": None,
        "graphs": [],
    }
    for revision in count(1):
        channel.send(FrameType.TRACE, header | {"revision": revision, "least_bytes": size})
        answer = channel.wait_for_frame("waiting", {FrameType.PLAN, FrameType.REFUSE})
        if answer.type == FrameType.PLAN:
            channel.send(FrameType.PROGRESS, {"plan_generation": answer.header["generation"]})
            break
        size = min(size, answer.header["budget_bytes"] - overhead)
    return size


def _report(channel: Channel, step: int, steps: int) -> None:
    """Report the progress. Raises channel.Stopped.

    Any PLAN or REFUSE that arrives is ignored, for plans of others do not change what was granted.
    """
    channel.send(FrameType.PROGRESS, {"phase": "calibrating", "step": step, "steps": steps})
    channel.poll_early("calibrating", {FrameType.PLAN, FrameType.REFUSE})


def _measure_codecs(channel: Channel, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the times of the device's codecs, measured in a thread. Raises channel.Stopped."""
    from pyworker.children.compression import measure_codecs

    measurement = channel.background.submit(measure_codecs, device, seconds)
    return channel.wait_for(measurement, "calibrating", {FrameType.PLAN, FrameType.REFUSE})


# ---- what is measured ------------------------------------------------------------------------------------------------


def _capture(
    channel: Channel, trained: list[Workload], device: torch.device, deadline: float
) -> tuple[list[Captured], list[str]]:
    """Return the steps captured until the deadline, at least one, and the reasons why others could not be."""
    captured: list[Captured] = []
    warnings: list[str] = []
    for workload in workloads(trained):
        if captured and time.monotonic() > deadline:
            break
        _report(channel, 0, 0)
        try:
            captured.append(capture_workload(workload, device))
        except TensileError as error:
            warnings.append(f"a model of type {workload.architecture['type']} was not measured: {error.message}")
    if not captured:
        raise MeasurementError("no training step could be captured", detail="; ".join(warnings))
    return captured, list(dict.fromkeys(warnings))


def workloads(trained: list[Workload]) -> Iterator[Workload]:
    """Yield the workloads of trained models, then variants of these and the standard ones, in turns.

    A variant has half or twice the batch size.
    """
    yield from trained
    variants = [
        workload._replace(batch_size=size)
        for factor in (0.5, 2.0)
        for workload in trained
        if (size := int(workload.batch_size * factor)) > 0
    ]
    for pair in zip_longest(variants, standard_workloads()):
        yield from filter(None, pair)


def capture_workload(workload: Workload, device: torch.device) -> Captured:
    """Return the workload's training step, captured for the device. Raises ArchitectureError, CaptureError."""
    from pg_tensile.execution import models
    from pg_tensile.execution.training.graphs import Sizes, capture_step
    from pg_tensile.execution.training.settings import Settings

    model = models.build(models.parse(workload.architecture), workload.inputs, workload.outputs)
    options = {key: workload.options[key] for key in ("weight_decay", "momentum", "clip") if key in workload.options}
    settings = Settings(1, workload.batch_size, workload.optimizer, **options)
    sizes = Sizes(workload.batch_size, 0, tuple(row_layout(workload.inputs, workload.task)))
    return capture_step(model, settings, workload.task, sizes, device)


def standard_workloads() -> Iterator[Workload]:
    """Yield the built-in architectures over a range of widths and batch sizes, in turns."""
    for workload in chain.from_iterable(zip(_tables(), _images(), _texts(), strict=True)):
        yield from (workload, workload._replace(batch_size=workload.batch_size // 2))


def _tables() -> Iterator[Workload]:
    table = ModelInputs(24, (50, 200, 1000), ())
    wide = ModelInputs(200, (), ())
    shapes: list[tuple[list[int], str, ModelInputs, int, int, str]] = [
        ([128, 64], "relu", table, 1, 256, "adamw"),
        ([512, 256], "gelu", wide, 10, 256, "adamw"),
        ([64], "tanh", table, 1, 64, "sgd"),
        ([1024, 1024], "relu", wide, 1, 128, "adam"),
        ([256, 128, 64], "silu", table, 5, 1024, "adamw"),
        ([32, 16], "relu", table, 1, 32, "adamw"),
        ([2048, 512], "relu", wide, 100, 512, "adamw"),
        ([128, 64], "relu", table, 3, 4096, "adamw"),
    ]
    for index, (hidden, activation, inputs, outputs, batch, optimizer) in enumerate(shapes):
        norm = ("none", "batch", "layer")[index % 3]
        architecture = {"type": "mlp", "hidden": hidden, "activation": activation, "norm": norm, "dropout": 0.1}
        yield _workload(architecture, inputs, outputs, batch, optimizer)


def _images() -> Iterator[Workload]:
    shapes: list[tuple[list[int], list[int], str, int, int]] = [
        ([16, 32], [1, 28, 28], "none", 10, 64),
        ([32, 64, 128], [3, 32, 32], "batch", 10, 32),
        ([16, 32], [1, 8, 8], "batch", 10, 128),
        ([64, 128], [3, 32, 32], "none", 100, 16),
        ([16, 32, 64], [3, 64, 64], "batch", 2, 16),
        ([8, 16], [1, 28, 28], "none", 10, 256),
        ([64, 128, 256, 256], [3, 64, 64], "batch", 10, 8),
        ([32, 32], [1, 16, 16], "layer", 10, 512),
    ]
    for channels, shape, norm, outputs, batch in shapes:
        architecture = {"type": "cnn", "channels": channels, "shape": shape, "norm": norm}
        yield _workload(architecture, ModelInputs(0, (), (ArrayInput(int(np.prod(shape)), 0),)), outputs, batch)


def _texts() -> Iterator[Workload]:
    shapes = [
        (64, 2, 32, 1000, 2, 32),
        (128, 2, 64, 5000, 5, 16),
        (32, 1, 16, 500, 2, 128),
        (256, 2, 64, 5000, 2, 8),
        (64, 4, 128, 2000, 10, 16),
        (128, 1, 32, 20000, 2, 64),
        (256, 1, 128, 1000, 2, 32),
        (64, 2, 32, 1000, 2, 256),
    ]
    for dim, layers, length, vocabulary, outputs, batch in shapes:
        architecture = {"type": "transformer", "dim": dim, "layers": layers, "heads": 4, "dropout": 0.1}
        yield _workload(architecture, ModelInputs(4, (), (ArrayInput(length, vocabulary),)), outputs, batch)


def _workload(
    architecture: dict[str, Any], inputs: ModelInputs, outputs: int, batch: int, optimizer: str = "adamw"
) -> Workload:
    task = Task.MULTICLASS if outputs > 2 else Task.BINARY
    return Workload(architecture, inputs, outputs if outputs > 2 else 1, task, batch, optimizer, {})


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
