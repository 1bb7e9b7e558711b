"""`--device sim:PROFILE`: plans on a simulated device.

Nothing is executed and no tensor has memory, so the step may be larger than this machine. Latencies are the roofline's,
times and peaks the simulator's. With a latency error the device's latencies differ from the roofline's, so that plans
made with `latencies=roofline` are off, as those that are made before anything was measured.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import torch

from pg_tensile.errors import DeviceError, OptionError
from pg_tensile.planning.device.profile import GB, DeviceProfile, named_profile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.planning.simulator.simulator import Timeline
from pg_tensile.planning.trace.trace import Floats, Trace
from pg_tensile.text import binary_size
from pg_tensile.tools.bench.options import BenchOptions
from pg_tensile.tools.bench.planned import PlannedPolicy, distance, empty_row, plan_policies, planned_row, predicted
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import Report, links, rates, title_of
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.workload import Workload, build_model, prepare, weightless_model


def simulate_policies(options: BenchOptions, progress: Progress) -> Report:
    """Return the rows of a simulation, whose step is captured as the CPU executes it.

    Raises OptionError, CaptureError.
    """
    profile = chosen_profile(options)
    if options.compression != "none":
        raise OptionError("--compression needs values to compress", "Use --device host or cuda.")
    progress.say("capturing the training step")
    workload = with_estimates(captured(options), profile)
    vanilla = predicted(workload.vanilla.trace, NO_EVENTS, profile)
    rows = []
    for policy in plan_policies(workload, profile, progress):
        row = planned_row(empty_row(options, policy.choice), workload, policy, profile)
        rows.append(row if row.error else simulated_row(row, workload, policy, profile, vanilla))
    off = f", which is off by {options.latency_error:.0%} in the median" if options.latency_error else ""
    notes = [f"link: {links(profile)}; latencies are estimates of the roofline{off}"]
    if vanilla.peak_bytes > profile.memory_bytes:
        notes.append(f"vanilla does not fit into the {binary_size(profile.memory_bytes)} of this device")
    return Report(rows, title_of(options) + ", nothing executed", notes)


def chosen_profile(options: BenchOptions) -> DeviceProfile:
    try:
        profile = named_profile(options.device.profile)
    except DeviceError as error:
        raise OptionError(f"--device: {error.message}", error.hint) from None
    return profile if options.link_gbps is None else profile.with_link(options.link_gbps * GB)


def captured(options: BenchOptions) -> Workload:
    """Capture the step of a model whose weights occupy no memory; of a real model if it cannot be built like that."""
    cpu = torch.device("cpu")
    try:
        return prepare(options, weightless_model(options), cpu)
    except Exception:
        return prepare(options, build_model(options), cpu)


def with_estimates(workload: Workload, profile: DeviceProfile) -> Workload:
    """Return the workload with the roofline's latencies in its traces, times the factors of the latency error."""
    error, seed = workload.options.latency_error, workload.options.seed
    factors = Factors(error, seed) if error else None
    graphs = []
    for graph in (workload.vanilla, workload.early):
        estimate = roofline.estimate(graph.trace, profile)
        latency_us = estimate if factors is None else factors.of(graph.trace) * estimate
        graphs.append(replace(graph, trace=graph.trace.with_latencies(latency_us)))
    return replace(workload, vanilla=graphs[0], early=graphs[1])


class Factors:
    """Factors between a device's latencies and the estimated ones, log-normal.

    Operators with the same target, work and bytes have the same factor, in all graphs that are asked about. `error`:
    the median of the estimate's relative error, to the first order.
    """

    def __init__(self, error: float, seed: int) -> None:
        self._sigma = error / NormalDist().inv_cdf(0.75)
        self._random = np.random.default_rng(seed)
        self._drawn: dict[tuple[str, int, int], float] = {}

    def of(self, trace: Trace) -> Floats:
        """Return float64[operators]."""
        targets = [trace.target[operator] for operator in range(trace.operator_count)]
        calls = zip(targets, trace.flops.tolist(), trace.operator_bytes.tolist(), strict=True)
        return np.array([self._factor(call) for call in calls])

    def _factor(self, call: tuple[str, int, int]) -> float:
        if call not in self._drawn:
            self._drawn[call] = float(self._random.lognormal(0.0, self._sigma))
        return self._drawn[call]


def simulated_row(
    row: Row, workload: Workload, policy: PlannedPolicy, profile: DeviceProfile, vanilla: Timeline
) -> Row:
    """Fill a row with the simulator's peaks and times. A plan that needs more than the budget is an error."""
    timeline = predicted(policy.captured.trace, policy.plan, profile)
    ms, vanilla_ms = timeline.iteration_us / 1e3, vanilla.iteration_us / 1e3
    msr, eor, cbr = rates(vanilla.peak_bytes, timeline.peak_bytes, vanilla_ms, ms)
    error = None
    if row.budget_bytes is not None and timeline.device_peak_bytes > row.budget_bytes:
        peak = footprint(policy.captured.trace, policy.plan)
        operator = policy.captured.trace.operator_label(int(peak.steps[peak.peak_step]))
        peak_text = f"{timeline.device_peak_bytes:,} bytes in {operator}"
        error = f"the peak would be {peak_text}, more than the budget of {row.budget_bytes:,}"
    row = row.with_values(
        peak_bytes=timeline.peak_bytes,
        device_peak_bytes=timeline.device_peak_bytes,
        msr=msr,
        eor=eor,
        cbr=cbr,
        step_ms_median=ms,
        step_ms_min=ms,
        step_ms_max=ms,
        first_step_ms=timeline.first_iteration_us / 1e3,
        vanilla_step_ms_median=vanilla_ms,
        vanilla_first_step_ms=vanilla.first_iteration_us / 1e3,
        stall_ms=timeline.stall_us / 1e3,
        bytes_out=timeline.bytes_out,
        bytes_in=timeline.bytes_in,
        passive_swap_ins=timeline.passive_swap_ins,
        recomputes=timeline.recomputes,
        error=error,
    )
    return distance(row, workload, policy, profile)
