"""The executor of `explain_training`: reads the job's rows, captures its graphs, plans them, and trains nothing.

Phases: the rows, as for training; preprocessing fitted to them, because sizes follow from it (categories, lengths of
arrays); the model, built but not moved to the device; its graphs; the policy's plan in the memory that the job may
have. One EXPLANATION frame ends it: header {"explanation": what pg_tensile.explanation.explain returns, "lines": what
render makes of it}. Whatever would fail the job while it starts fails the explanation with the same error.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.fitting import FittedPreprocessing, Split, fit
from pg_tensile.profile import DeviceProfile
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pg_tensile.explanation import Admission, Request
    from pg_tensile.trace import Trace
    from pg_tensile.training import Settings
    from pyworker.executor import Executor

_OPTIMIZER_STATES = {"adam": 2, "adamw": 2}  # tensors of a parameter's size; SGD has one with momentum


def run(executor: Executor) -> None:
    """The rest of the process's life after JOB."""
    store = executor._receive_rows()
    executor._wait_for_libraries()
    from pg_tensile import explanation, models
    from pg_tensile.training import check_batch_size

    spec = executor._spec
    architecture = models.parse(spec["architecture"])
    split = Split(spec["seed"], spec["validation"])
    fitted = fit(store, split, spec["options"].get("task"), models.token_limits(architecture))
    check_batch_size(spec["batch_size"], fitted)
    executor._send(FrameType.PROGRESS, {"phase": "building"})
    model = models.build(architecture, fitted.preprocessing.model_inputs, fitted.preprocessing.outputs)
    place = _place(spec)
    executor._send(FrameType.PROGRESS, {"phase": "capturing"})
    request = _request(spec, model, fitted, place)
    traces, request = _captured(executor, model, fitted, place, request)
    executor._send(FrameType.PROGRESS, {"phase": "planning"})
    found = explanation.explain(request, traces, place.profile, _admission(spec, place))
    header = {"explanation": found, "lines": explanation.render(found)}
    executor._send(FrameType.EXPLANATION, header)


class _Place(NamedTuple):
    """Where the job would run. `name`: as the scheduler calls it. `approximate`: why this is not it."""

    device: torch.device
    name: str
    profile: DeviceProfile
    approximate: str | None


def _place(spec: dict[str, Any]) -> _Place:
    """The device that training would choose. One that is not at hand is explained with the CPU's graphs and, as far as
    it has been measured, its own profile."""
    import torch

    from pg_tensile.device import choose_device, measure
    from pg_tensile.errors import DeviceError

    profiles, approximate = spec["profiles"], None
    try:
        device = choose_device(spec["device"])
        name = str(device)
    except DeviceError as error:
        device, name = torch.device("cpu"), spec["device"]
        approximate = f"{error.message}; operators are the CPU's"
    used = next((known for known in profiles if known.startswith("cuda")), None)
    if spec["device"] == "auto" and device.type == "cpu" and used is not None:
        name, approximate = used, f"jobs have used {used}, which is not there now; operators are the CPU's"
    known = profiles.get(name)
    profile = measure(device) if known is None else DeviceProfile(**_of(DeviceProfile, known))
    return _Place(device, name, profile, approximate)


def _of(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(cls) if field.name in values}


def _request(spec: dict[str, Any], model: nn.Module, fitted: FittedPreprocessing, place: _Place) -> Request:
    from pg_tensile.batches import division
    from pg_tensile.explanation import Request

    state = _state_bytes(spec, model)
    architecture = spec["architecture"]
    return Request(
        model=spec["model"],
        architecture=architecture.get("callable", architecture["type"]),
        device=place.name,
        policy=spec["policy"],
        epochs=spec["epochs"],
        batch_size=spec["batch_size"],
        steps=division(fitted.training_rows, spec["batch_size"])[0],
        training_rows=fitted.training_rows,
        validation_rows=fitted.validation_rows,
        skipped_rows=fitted.skipped_rows,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        state_bytes=state,
        claim_bytes=spec["memory_budget"] or state,
        memory_budget=spec["memory_budget"],
        open_job=spec["open_job"],
        approximate=place.approximate,
    )


def _state_bytes(spec: dict[str, Any], model: nn.Module) -> int:
    """Of parameters, buffers, gradients and optimizer state."""
    momentum = bool(spec["options"].get("momentum"))
    copies = 1 + _OPTIMIZER_STATES.get(spec["optimizer"], int(momentum))
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return held + copies * trained


def _captured(
    executor: Executor, model: nn.Module, fitted: FittedPreprocessing, place: _Place, request: Request
) -> tuple[dict[str, Trace], Request]:
    """The traces of the job's graphs with predicted latencies, none where a job of policy none cannot be captured. Any
    other job would fail: CaptureError."""
    from pg_tensile.errors import CaptureError
    from pg_tensile.graphs import Sizes, capture_graphs
    from pg_tensile.latency import model_bytes

    preprocessing = fitted.preprocessing
    sizes = Sizes(fitted.training_rows, fitted.validation_rows, tuple(preprocessing.layout()))
    try:
        graphs = capture_graphs(model, _settings(executor._spec), preprocessing.task, sizes, place.device)
    except CaptureError as error:
        if request.policy != "none":
            raise
        return {}, request._replace(uncaptured=error.message)
    data = executor._latency_models.get(place.name)
    models = None if data is None else model_bytes.decode(bytes(data))
    traces = {name: _timed(captured.trace, place.profile, models) for name, captured in graphs.named().items()}
    return traces, request._replace(calibrated=models is not None)


def _timed(trace: Trace, profile: DeviceProfile, models: Any) -> Trace:
    from pg_tensile.latency import roofline

    return roofline.timed(trace, profile) if models is None else trace.with_latencies(models.predict(trace, profile))


def _settings(spec: dict[str, Any]) -> Settings:
    from pyworker.executor import _settings as settings

    made: Settings = settings(spec)
    return made


def _admission(spec: dict[str, Any], place: _Place) -> Admission:
    from pg_tensile.explanation import Admission

    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limits = {"host_bytes": spec["host_memory_bytes"] or half, "most_events": spec["plan_events"]}
    known = spec["admission"].get(place.name)
    if known is not None:
        return Admission(**known, **limits)
    memory = place.profile.memory_bytes
    return Admission(min(memory, spec["device_memory_bytes"] or memory), **limits)
