"""Several training jobs at once on a simulated device (`sim:PROFILE`): the rows of rounds.py, with nothing executed.

The device computes for all jobs in turns, so an operator takes as many times as long as there are jobs, with a plan and
without. Time in which a job waits for the link is not given to the others, so costs are rather too high. The link is
shared as in the simulator, one transfer at a time in each direction. The jobs start a part of a step apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.together.job_process import Measured
from benchmarks.together.rounds import STAGGER, Entrant, TogetherRow, empty_row, graphs, plan_for_all
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.options import VANILLA, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.planned import NOT_SIMULATED
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import rates
from pg_tensile.tools.bench.simulated import captured, chosen_profile, with_estimates


def simulate_together(
    jobs: Sequence[BenchOptions], policies: Sequence[PolicyChoice], progress: Progress
) -> list[TogetherRow]:
    """Return a row for each policy; vanilla is simulated in any case. One without plans has a row with its error.

    Raises OptionError, CaptureError.
    """
    profile = chosen_profile(jobs[0])
    progress.say("capturing the training steps")
    measured = in_turns(jobs, profile)
    vanilla = timelines(plan_for_all(PolicyChoice(VANILLA, VANILLA), measured, profile), measured, profile)
    rows = []
    for choice in (PolicyChoice(VANILLA, VANILLA), *(choice for choice in policies if choice.name != VANILLA)):
        progress.say(f"planning: {choice}")
        entrant = Entrant(choice, error=NOT_SIMULATED) if choice.is_peer else plan_for_all(choice, measured, profile)
        row = replace(
            empty_row(jobs, choice, 0, 0, profile, measured),
            budget_bytes=entrant.budget_bytes,
            planning_ms=entrant.planning_ms,
            error=entrant.error,
        )
        rows.append(row if row.error else filled(row, timelines(entrant, measured, profile), vanilla))
    return rows


def in_turns(jobs: Sequence[BenchOptions], profile: DeviceProfile) -> list[Measured]:
    """Return the jobs' traces with their latencies while the device computes for all of them in turns.

    Jobs with the same options have the same traces.
    """
    alike: dict[str, Measured] = {}
    for options in jobs:
        if str(options) not in alike:
            workload = with_estimates(captured(options), profile)
            vanilla, early = (slowed(graph.trace, len(jobs)) for graph in (workload.vanilla, workload.early))
            alike[str(options)] = Measured(vanilla, early, float(vanilla.latency_us.sum()) / 1e3, profile)
    return [alike[str(options)] for options in jobs]


def slowed(trace: Trace, times: float) -> Trace:
    """Return the trace with operators that take that many times as long."""
    return trace.with_latencies(times * trace.latency_us)


def timelines(entrant: Entrant, measured: Sequence[Measured], profile: DeviceProfile) -> list[Timeline]:
    """Simulate the jobs under the entrant's plans; an entrant without plans is vanilla."""
    gap_us = STAGGER * mean(job.step_ms for job in measured) * 1e3
    traces = graphs(entrant.choice, measured)
    return simulate([SimulatedJob(trace, entrant.plans[job], job * gap_us) for job, trace in traces.items()], profile)


def filled(row: TogetherRow, mine: Sequence[Timeline], vanilla: Sequence[Timeline]) -> TogetherRow:
    """Return the row with the simulator's times and peaks."""
    job_ms = [timeline.iteration_us / 1e3 for timeline in mine]
    vanilla_ms = [timeline.iteration_us / 1e3 for timeline in vanilla]
    peak = sum(timeline.peak_bytes for timeline in mine)
    msr, eor, cbr = rates(row.vanilla_peak_bytes or 0, peak, sum(vanilla_ms), sum(job_ms))
    return replace(
        row,
        peak_bytes=peak,
        device_peak_bytes=sum(timeline.device_peak_bytes for timeline in mine),
        msr=msr,
        eor=eor,
        cbr=cbr,
        job_ms=job_ms,
        job_eors=[ms / reference_ms for ms, reference_ms in zip(job_ms, vanilla_ms, strict=True)],
        stall_ms=sum(timeline.stall_us for timeline in mine) / 1e3,
        bytes_moved=sum(timeline.bytes_out + timeline.bytes_in for timeline in mine),
        recomputes=sum(timeline.recomputes for timeline in mine),
    )
