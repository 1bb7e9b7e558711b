"""The trainer of `explain_training`: reads the job's rows, captures its graphs, plans them, and trains nothing.

Phases: the rows, as for training; preprocessing fitted to them, because sizes follow from it (categories, lengths of
arrays); the model, which stays on the CPU; its graphs, with predicted latencies; the plan that the scheduler would make
if the job had the device to itself, a bound on the time of any such plan, and the plan beside the jobs that run.
Workspaces are measured if the device is the host, as the job itself would do: on another device that takes memory that
has not been granted. A job with ranks is explained as rank 0 of those that its Ray cluster has room for at present, on
a device like this machine's: what the cluster's are like is known only to a job that runs there. One RESULT frame ends
it, with the numbers as JSON (planning/explain/numbers.py) or as lines of text. An error that would fail the job while
it starts fails the explanation in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.cautions import cautions
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.splits import Split, described
from pg_tensile.memory_limit import memory_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.device_types import ACCELERATORS
from pyworker.children.channel import Channel
from pyworker.children.job import (
    Job,
    choose_members,
    choose_open_architecture,
    fit_rows,
    job_recipe,
    job_settings,
    least_batch_size,
    with_hint,
    with_predicted_latencies,
)
from pyworker.children.job_budget import claimed_bytes, limiting, most_bytes
from pyworker.children.overhead import allocator_cautions, expected_overhead
from pyworker.children.running_jobs import running_jobs
from pyworker.cluster_device import PREFIX
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pg_tensile.execution.training.graphs import Graphs
    from pg_tensile.execution.training.settings import Settings
    from pg_tensile.planning.explain.request import Admission, Request
    from pg_tensile.planning.trace.trace import Trace

BOUND_LIMIT_S = 2.0  # for the solver: whoever asks does not wait longer for a number that is only a comparison
BESIDE_LIMIT_S = 10.0  # likewise for plans of the new job and the running ones together


def run(channel: Channel, libraries: Future[None]) -> None:
    """Run the explanation: the rest of the process after JOB."""
    store = channel.receive_rows()
    channel.wait_for(libraries, "preparing")
    from pg_tensile.execution.training.settings import check_batch_size
    from pg_tensile.planning.explain.numbers import explain
    from pg_tensile.planning.explain.text import render

    spec = channel.spec
    ranks = None if spec["ranks"] is None else _ranks(channel)
    chosen = choose_open_architecture(store, spec)
    fitted = fit_rows(store, spec)
    choose_members(spec, fitted)
    if spec["network"] is None:
        hint = 'A plan is made for networks, such as that of the architecture "tabular".'
        raise ArchitectureError(f'training "{spec["architecture"]["type"]}" follows no plan to be explained', hint)
    spec.update(job_recipe(spec, fitted))
    check_batch_size(least_batch_size(spec), fitted)
    subject, choice = _with_batch_size(channel, _build(channel, fitted))
    warnings = cautions(store, fitted, Split.of(spec), spec["options"].get("task"))
    warnings += allocator_cautions(subject.target.name.removeprefix(PREFIX), subject.target.profile)
    request = _request(spec, subject)._replace(choice=choice, warnings=tuple(warnings) or None, ranks=ranks)
    request = request._replace(architecture_reason=None if chosen is None else chosen.reason)
    traces, request = _traces(channel, subject, request)
    channel.send(FrameType.PROGRESS, {"phase": "planning"})
    profile, admission = subject.target.profile, _admission(spec, subject.target)
    running = running_jobs(spec["running"], channel.running_buffers, subject.target.name)
    over = _deadline(channel)
    explanation = explain(request, traces, profile, admission, BOUND_LIMIT_S, running, over, spec["memory_flow"])
    lines = render(explanation) if spec["format"] == "text" else [explanation.to_json()]
    channel.send(FrameType.RESULT, {"rows": [[line] for line in lines], "last": True})


def _deadline(channel: Channel) -> Callable[[], bool]:
    """Return a function that says whether planning beside the running jobs takes too long; it gives signs of life."""
    begun: list[float] = []

    def over() -> bool:
        channel.poll_early("planning")
        begun.append(time.monotonic())
        return begun[-1] - begun[0] > BESIDE_LIMIT_S

    return over


def _ranks(channel: Channel) -> dict[str, Any]:
    """Return the ranks that the job would have; the spec becomes that of rank 0. Raises the errors of cluster.py."""
    from pyworker.ranks import cluster

    spec = channel.spec
    cluster.connect(cluster.Access(**spec["ray"]), partial(channel.poll_early, "preparing"), starts_ranks=False)
    try:
        bundle = cluster.bundle_of(spec["device"], spec["options"].get("threads") or 1)
        ranks = cluster.prospect(bundle, *spec["ranks"])
    finally:
        cluster.disconnect()
    spec.update(world_size=ranks["count"], device="cuda" if "GPU" in bundle else "cpu")
    return ranks


class _TargetDevice(NamedTuple):
    """Device that the job would run on.

    `name` is the scheduler's name of it, with a prefix for a device of a Ray cluster; `approximate` is why `device` is
    not the same one, or None if it is. `overhead_bytes` is the memory of the job's process besides its tensors.
    """

    device: torch.device
    name: str
    profile: DeviceProfile
    approximate: str | None
    overhead_bytes: int

    @property
    def is_host(self) -> bool:
        """Whether workspaces can be measured in this process, as the job would do."""
        return self.name.removeprefix(PREFIX) == "cpu"


class _Subject(NamedTuple):
    """Model, settings and data that would be trained, and the device."""

    model: nn.Module
    settings: Settings
    fitted: FittedPreprocessing
    target: _TargetDevice


def _build(channel: Channel, fitted: FittedPreprocessing) -> _Subject:
    import torch

    from pg_tensile.execution import models
    from pg_tensile.execution.backends import use_deterministic_algorithms
    from pg_tensile.execution.training.settings import check_model

    channel.send(FrameType.PROGRESS, {"phase": "building"})
    torch.set_num_threads(channel.threads)
    target = _target_device(channel)
    use_deterministic_algorithms()
    settings, preprocessing = job_settings(channel.spec), fitted.preprocessing
    model = models.build(models.parse(channel.spec["network"]), preprocessing.model_inputs, preprocessing.outputs)
    check_model(model, min(settings.batch_size, fitted.training_rows))
    return _Subject(model, settings, fitted, target)


def _with_batch_size(channel: Channel, subject: _Subject) -> tuple[_Subject, dict[str, Any] | None]:
    """Return the subject with the batch size and learning rate that the job would choose, and the choice as JSON.

    They are chosen as well as that is possible before the job runs. A given batch size stays; the choice is then None.
    """
    from pg_tensile.errors import CaptureError
    from pg_tensile.execution.training.graphs import Graphs, capture_step
    from pyworker.children.batch_size import SizePredictions, Terms, choose_within, described

    if subject.settings.batch_size:
        return subject, None
    channel.send(FrameType.PROGRESS, {"phase": "choosing"})
    terms, target, job = Terms.of(channel.spec), subject.target, _job(subject)
    try:
        predictions = SizePredictions(
            job,
            target.profile,
            _budget_bytes(channel.spec, target),
            channel.spec["plan_events"],
            lambda trace: _predicted(channel, trace, target).latency_us,
            partial(channel.poll_early, "choosing"),
        )
        choice = choose_within(predictions, terms)
        if target.is_host:  # workspaces are measured here, as in the job's first steps
            step = capture_step(*job.with_batch_size(choice.batch_size))
            measured = _with_workspaces(channel, Graphs(step, None, None, None), target.profile).train.trace
            predictions.add_workspaces(choice.batch_size, measured)
            choice = choose_within(predictions, terms)
    except CaptureError as error:
        raise with_hint(error, chosen=True) from error
    settings = replace(subject.settings, batch_size=choice.batch_size, learning_rate=choice.learning_rate)
    return subject._replace(settings=settings), described(choice, terms, {}) | {"base_rate": terms.learning_rate}


def _job(subject: _Subject) -> Job:
    from pg_tensile.execution.training.graphs import Sizes

    fitted, preprocessing = subject.fitted, subject.fitted.preprocessing
    rows = fitted.training_rows, fitted.validation_rows
    sizes = Sizes(*rows, tuple(preprocessing.layout()), fitted.weights is not None)
    return Job(subject.model, subject.settings, preprocessing.task, sizes, subject.target.device)


def _budget_bytes(spec: dict[str, Any], target: _TargetDevice) -> int:
    """Return the memory that the job's tensors may take if it has the device to itself."""
    room = _admission(spec, target).budget_bytes - target.overhead_bytes
    return min(room, most_bytes(spec) or room)


def _target_device(channel: Channel) -> _TargetDevice:
    """Return the device that training would choose.

    One that is not available is explained with the CPU's graphs and, if it has been measured, its own profile. It is
    measured behind the imports, which would make it seem slow.
    """
    import torch

    from pg_tensile.errors import DeviceError
    from pg_tensile.execution.device_choice import choose_device
    from pg_tensile.execution.measuring.device import measure

    spec = channel.spec
    profiles, approximate = spec["profiles"], None
    try:
        device = choose_device(spec["device"])
        name = str(device)
    except DeviceError as error:
        device, name = torch.device("cpu"), spec["device"]
        approximate = f"{error.message}; operators are the CPU's"
    used = next((device for device in profiles if device.partition(":")[0] in ACCELERATORS), None)
    if spec["device"] == "auto" and device.type == "cpu" and used is not None:
        name, approximate = used, f"jobs have used {used}, which is not there now; operators are the CPU's"
    fields = profiles.get(name)
    if fields is None:
        profile = channel.wait_for(channel.background.submit(measure, device), "building")
    else:
        profile = DeviceProfile.from_json(fields)
    overhead = expected_overhead(spec, name, profile)
    if spec["ranks"] is not None:
        not_known = "the devices of the Ray cluster are taken to be like this machine's"
        name, approximate = f"{PREFIX}{name}", "; ".join(filter(None, (approximate, not_known)))
    return _TargetDevice(device, name, profile, approximate, overhead)


def _request(spec: dict[str, Any], subject: _Subject) -> Request:
    from pg_tensile.execution.data.batches import division
    from pg_tensile.execution.training.graphs import state_bytes
    from pg_tensile.planning.explain.request import Request

    fitted, target = subject.fitted, subject.target
    state = state_bytes(subject.model, subject.settings)
    architecture, stopping = spec["architecture"], subject.settings.early_stopping
    members = [member["type"] for member in (*spec["fitted"], spec["network"])]
    return Request(
        model=spec["model"],
        architecture=architecture.get("callable", ", ".join(members)),
        device=target.name,
        policy=spec["policy"],
        epochs=spec["epochs"],
        batch_size=subject.settings.batch_size,
        steps=division(fitted.training_rows, subject.settings.batch_size, subject.settings.ranks)[0],
        training_rows=fitted.training_rows,
        validation_rows=fitted.validation_rows,
        skipped_rows=fitted.skipped_rows,
        split=described(fitted.division, fitted.training_rows, fitted.validation_rows),
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        state_bytes=state,
        claim_bytes=claimed_bytes(spec) or state,
        overhead_bytes=target.overhead_bytes,
        memory_budget=most_bytes(spec),
        budget_name=None if limiting(spec) == "memory_budget" else limiting(spec),
        open_job=spec["open_job"],
        open_job_s=spec["open_job_s"],
        approximate=target.approximate,
        compression=None if subject.settings.compression == "none" else subject.settings.compression,
        swap_share=spec["options"].get("swap_share"),
        learning_rate=subject.settings.learning_rate,
        patience=stopping.patience if stopping else None,
        max_slowdown=spec["options"].get("max_slowdown"),
    )


def _traces(channel: Channel, subject: _Subject, request: Request) -> tuple[dict[str, Trace], Request]:
    """Return the traces of the job's graphs, and the request with what is known of them.

    If a job of policy none cannot be captured, there are no traces; any other job would fail, so the error is raised.
    """
    from pg_tensile.errors import CaptureError
    from pg_tensile.execution.training.graphs import capture_graphs

    channel.send(FrameType.PROGRESS, {"phase": "capturing"})
    target = subject.target
    try:
        graphs = capture_graphs(*_job(subject))
    except CaptureError as error:
        if request.policy != "none":
            raise with_hint(error) from error
        return {}, request._replace(uncaptured=error.message)
    graphs = graphs.with_traces({name: _predicted(channel, trace, target) for name, trace in graphs.traces().items()})
    if target.is_host:
        graphs = _with_workspaces(channel, graphs, target.profile)
    calibrated = target.name in channel.latency_models
    return graphs.traces(), request._replace(calibrated=calibrated, workspaces=target.is_host)


def _predicted(channel: Channel, trace: Trace, target: _TargetDevice) -> Trace:
    """Return the trace with the latencies that are predicted for the idle device."""
    return with_predicted_latencies(trace, target.profile, channel.latency_models.get(target.name))


def _with_workspaces(channel: Channel, graphs: Graphs, profile: DeviceProfile) -> Graphs:
    from pg_tensile.execution.measuring.workspaces import probe
    from pg_tensile.execution.runtime.host import HostDevice

    traces = {}
    with closing(HostDevice(profile)) as host:
        for name, graph in graphs.named().items():
            traces[name] = probe(graph, host, profile.memory_bytes // 2).trace
            channel.poll_early("measuring")
    return graphs.with_traces(traces)


def _admission(spec: dict[str, Any], target: _TargetDevice) -> Admission:
    from pg_tensile.planning.explain.request import Admission, Ahead

    half = memory_bytes() // 2
    limits = {"host_bytes": spec["host_memory_bytes"] or half, "most_events": spec["plan_events"]}
    fields = spec["admission"].get(target.name)
    if fields is not None:
        ahead = tuple(Ahead(**job) for job in fields["ahead"])
        return Admission(**(fields | {"ahead": ahead}), **limits)
    memory = target.profile.memory_bytes
    most = memory if spec["ranks"] is not None else spec["device_memory_bytes"] or memory
    return Admission(min(memory, most), **limits)
