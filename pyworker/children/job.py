"""The job of an executor as the library takes it: settings from its spec, model, sizes and device.

Imports PyTorch only when it is called, as the rows arrive while a thread imports it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.errors import CaptureError, OptionError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pg_tensile.execution.data.preprocessing import Task
    from pg_tensile.execution.training.graphs import Sizes
    from pg_tensile.execution.training.settings import Settings
    from pg_tensile.planning.device.profile import DeviceProfile
    from pg_tensile.planning.trace.trace import Trace

CONTEXT_BYTES = 512 << 20  # of a process on a CUDA device besides its tensors, until it can be measured


class Job(NamedTuple):
    """Job to be trained: everything that its graphs depend on."""

    model: nn.Module
    settings: Settings
    task: Task
    sizes: Sizes
    device: torch.device

    def with_batch_size(self, batch_size: int) -> Job:
        return self._replace(settings=replace(self.settings, batch_size=batch_size))


def job_settings(spec: dict[str, Any]) -> Settings:
    """Return the library's settings for the job's spec. Raises OptionError."""
    from pg_tensile.execution.training.settings import EarlyStopping, Settings
    from pg_tensile.rules import check_options

    options = spec["options"]
    check_options(options)
    if spec["batch_size"] == 0 and options.get("accumulate", 1) > 1:
        hint = "Give a batch_size, or leave accumulate out: the batch size is chosen so that whole batches fit."
        raise OptionError("a job that chooses its batch size cannot accumulate", hint=hint)
    stopping = options.get("early_stopping")
    return Settings(
        epochs=spec["epochs"],
        batch_size=spec["batch_size"],
        optimizer=spec["optimizer"],
        learning_rate=spec["learning_rate"],
        seed=spec["seed"],
        weight_decay=options.get("weight_decay"),
        momentum=options.get("momentum"),
        clip=options.get("clip"),
        early_stopping=None if stopping is None else EarlyStopping(**stopping),
        checkpoint_interval_s=spec["checkpoint_interval_s"],
        compression=options.get("compression", "none"),
        precision=options.get("precision", "float32"),
        accumulate=int(options.get("accumulate", 1)),
    )


def least_batch_size(spec: dict[str, Any]) -> int:
    """Return the batch size or, if it is to be chosen, the smallest one allowed."""
    least, _ = spec["options"].get("batch_size_range", (1, 1))
    return int(spec["batch_size"] or least)


def overhead_bytes(device: str) -> int:
    """Return the device memory besides its tensors that a process on the device is expected to take."""
    return CONTEXT_BYTES if device.startswith("cuda") else 0


def with_predicted_latencies(
    trace: Trace, profile: DeviceProfile, models: memoryview | None, load: float = 0.0
) -> Trace:
    """Return the trace with latencies predicted by the device's models or, without models, by the roofline.

    `load` is that of the device by others.
    """
    from pg_tensile.planning.latency import model_bytes, roofline

    if models is None:
        return trace.with_latencies(roofline.estimate(trace, profile))
    return trace.with_latencies(model_bytes.decode(bytes(models)).predict(trace, profile, load))


def with_hint(error: CaptureError, chosen: bool = False) -> CaptureError:
    """Return the error with a hint at how such a model can be trained.

    `chosen`: the batch size was to be chosen.
    """
    hint = (error.hint or "").replace("the policy none", "policy => 'none'")
    if "policy => 'none'" not in hint:
        hint = f"{hint} Or train it with policy => 'none', which runs the model as it is.".strip()
    if chosen:
        hint = hint.replace("policy => 'none'", "policy => 'none' and a batch_size")
    return CaptureError(error.message, hint, error.detail)
