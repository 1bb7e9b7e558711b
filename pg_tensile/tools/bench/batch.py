"""`--batch 0`: the choice of a case's batch size, before the case is measured.

The budget is the smallest of the policies' budgets in bytes, else the device's memory. On a simulated device everything
is predicted from the roofline. On a real one the model is trained for a few steps with up to five batch sizes, as in a
job, and the choice uses these measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from pg_tensile.execution.measuring import device as devices
from pg_tensile.execution.measuring.batch_sizes import Probing, Rows, probe_sizes
from pg_tensile.execution.runtime.accelerator import make_deterministic
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.planning.batchsize.choose import Candidate, Choice, choose
from pg_tensile.planning.batchsize.predict import Predictor
from pg_tensile.planning.batchsize.throughput import Curves
from pg_tensile.planning.batchsize.traces import SIZES, BatchTraces
from pg_tensile.planning.device.profile import GB, RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.text import binary_size
from pg_tensile.tools.bench.measured import chosen_device
from pg_tensile.tools.bench.options import BenchOptions
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.simulated import captured, chosen_profile
from pg_tensile.tools.bench.workload import Workload, build_model, prepare

MOST_ROWS = 1024  # a benchmark has no table of samples that limits the batch
PROBING_S = 30.0
SLACK = 50  # 1 / SLACK of the budget stays free: the workspaces of sizes not measured are estimates
SHOWN = 13  # candidates: the chosen one and twelve more


def choose_batch(options: BenchOptions, progress: Progress, most: int = MOST_ROWS) -> tuple[Choice, Predictor]:
    """Return the batch size of at most `most` rows with the highest throughput within the budget, and its predictor.

    Raises BatchSizeError, CaptureError and OptionError.
    """
    progress.say("choosing the batch size")
    if options.device.kind == "sim":
        profile = chosen_profile(options)
        traces = BatchTraces(lambda size: captured(replace(options, batch=size)).early.trace)
        predict = Predictor(traces.trace_at, profile, budget_bytes(options))
        return _choose(predict, most), predict
    return _choose_by_training(options, progress, most)


def budget_bytes(options: BenchOptions) -> int | None:
    """Return the smallest of the policies' budgets less the slack, or None if no policy has one."""
    budgets = [choice.budget.nbytes(0) for choice in options.policies if choice.budget is not None]
    return min(budgets) * (SLACK - 1) // SLACK if budgets else None


def candidate_notes(choice: Choice) -> list[str]:
    """Return lines that describe the chosen batch size and the other candidates."""
    lines = [f"batch size {choice.batch_size} is predicted to be the fastest that fits:"]
    return lines + [_described(candidate) for candidate in choice.candidates[:SHOWN]]


def _described(candidate: Candidate) -> str:
    if not candidate.feasible:
        return f"  batch {candidate.batch_size}: {candidate.reason}"
    stalls = f", waits {candidate.stall_us / candidate.iteration_us:.1%}" if candidate.stall_us else ""
    rate = f"{candidate.samples_per_s:,.4g} samples/s"
    return f"  batch {candidate.batch_size}: {rate}, {binary_size(candidate.device_bytes)}{stalls}; {candidate.reason}"


def _choose(predict: Predictor, most: int, probes: Iterable[int] = ()) -> Choice:
    unstalled = predict.largest_without_stall(1, most)
    first = [*probes, *([unstalled.batch_size] if unstalled is not None else [])]
    return choose(predict, most, most=most, budget_bytes=predict.budget_bytes, first=first, law="none")


def _choose_by_training(options: BenchOptions, progress: Progress, most: int) -> tuple[Choice, Predictor]:
    torch_device = chosen_device(options)
    model = build_model(options)
    if torch_device.type != "cpu":
        make_deterministic(torch_device.type)  # before anything is captured or executed
    profile = devices.measure(torch_device)
    if options.link_gbps is not None:
        profile = profile.with_link(options.link_gbps * GB)

    @cache
    def workload(size: int) -> Workload:
        return prepare(replace(options, batch=size), model, torch_device, profile.allocator)

    def rows(size: int) -> Iterator[Rows]:
        batches = workload(size).batches(2)
        while True:
            yield from ((batch.inputs, batch.targets) for batch in batches)

    traces = BatchTraces(lambda size: workload(size).early.trace)
    curves = Curves(profile.launch_us, [roofline.timed(traces.trace_at(size), profile) for size in SIZES])

    def probing(budget: int | None) -> Probing:
        predict = Predictor(traces.trace_at, profile, budget, curves.predict)
        device = open_device(torch_device, profile, budget)
        return Probing(lambda size: workload(size).early, build_model(options), device, predict, traces, curves)

    if torch_device.type == "cpu" and options.link_gbps is None:  # an RTX A6000's balance, as set_link's
        with probing(None) as once:
            probe = once.measure(SIZES[-1], rows(SIZES[-1]))
        roof_us = roofline.total_us(workload(SIZES[-1]).vanilla.trace, RTX_A6000)
        profile = profile.scaled_link(roof_us, probe.step_us)
    with probing(budget_bytes(options)) as several:
        predict = several.predictor
        if largest := _largest(predict, most):
            several.run(probe_sizes(largest), rows, PROBING_S)
        choice = several.settle(lambda: _choose(predict, most, several.probes), rows, PROBING_S)
    for size, probe in several.probes.items():
        progress.say(f"batch {size}: {probe.samples_per_s:,.4g} samples/s")
    return choice, predict


def _largest(predict: Predictor, most: int) -> int:
    """Return the largest power of two that fits as a batch size; 0 if none does."""
    size = 1
    while size <= most and predict(size).feasible:
        size *= 2
    return size // 2
