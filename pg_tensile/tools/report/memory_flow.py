"""Memory flow between jobs (docs/memory-flow.md): simulated, and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bokeh.models import BasicTickFormatter, ColumnDataSource, Range1d

from pg_tensile.errors import PlanError
from pg_tensile.planning.memory_flow.groups import Group, bytes_to_groups, cut_alike
from pg_tensile.planning.memory_flow.simulation import Moment, simulate_memory_flow, with_requests
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.scheduling.round_state import HOST_CONTENTION
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.tools.report.chart_style import ACROSS, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, new_chart, unit_of

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord, MemoryFlowRecord, Planned

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
SHOWN_ITERATIONS = 3  # of the job whose iterations take longest
ITERATIONS = 12  # simulated; the first third is left out
MOST_GROUPS = 20_000  # simulated, of jobs of very different lengths


@dataclass(frozen=True)
class MemoryFlowJob:
    """A job whose memory flows; its speed is relative to its own without a plan, alone."""

    job: int
    model: str
    groups: int
    most_bytes: int
    rest_bytes: int  # kept between two iterations
    iteration_us: float
    speed: float


@dataclass(frozen=True)
class MemoryFlowFacts:
    """Jobs that share memory, and what they hold over time."""

    shared_bytes: int
    most_bytes: int  # held together, at most
    jobs: list[MemoryFlowJob]
    at_us: list[float]
    held_bytes: dict[str, list[int]]  # by job
    hidden_jobs: int  # that share it as well, and are left out


def memory_flow_of(record: JobRecord) -> MemoryFlowFacts | None:
    """Return the memory flow of a record; None if the job's memory does not flow, or nobody else's is seen."""
    if record.memory_flow is None or len(record.memory_flow.jobs) < 2:
        return None
    try:
        return _simulated(record.memory_flow)
    except PlanError:  # a job has sent another trace since its plan was made
        return None


def _simulated(record: MemoryFlowRecord) -> MemoryFlowFacts | None:
    groups = {flowing.job: with_requests(_timed(flowing.planned)) for flowing in record.jobs}
    history: list[Moment] = []
    flow = simulate_memory_flow(groups, record.nbytes, HOST_CONTENTION, ITERATIONS, 0, MOST_GROUPS, history)
    if flow is None:
        return None
    longest = max(flow.iteration_us.values())
    begin = history[-1].us - SHOWN_ITERATIONS * longest
    shown = [moment for moment in history if moment.us >= begin]
    jobs = []
    for flowing in record.jobs:
        own, us = groups[flowing.job], flow.iteration_us[flowing.job]
        most = max(group.most_bytes for group in own)
        speed = flowing.planned.vanilla().iteration_us / us
        jobs.append(MemoryFlowJob(flowing.job, flowing.model, len(own), most, own[-1].rest_bytes, us, speed))
    return MemoryFlowFacts(
        record.nbytes,
        flow.most_bytes,
        jobs,
        [moment.us - shown[0].us for moment in shown],
        {str(job.job): [moment.held_bytes[job.job] for moment in shown] for job in jobs},
        record.hidden_jobs,
    )


def _timed(planned: Planned) -> list[Group]:
    """Return the groups of a plan, with their times alone on the link."""
    sequence = AccessSequence(planned.trace, planned.plan)
    sequence.check()
    return cut_alike(bytes_to_groups(planned.groups), sequence, evaluate(sequence, planned.profile).stalled_us)


def memory_flow_chart(facts: MemoryFlowFacts | None) -> dict[str, Any]:
    """Return the figure "memory_flow": what the jobs hold over time, one upon the other; nothing without one."""
    if facts is None:
        return {}
    unit_bytes, unit = unit_of(float(facts.shared_bytes))
    times = [us / 1e3 for us in facts.at_us]
    top = 1.08 * max(facts.shared_bytes, facts.most_bytes) / unit_bytes
    chart = new_chart(
        260, ACROSS, x_range=Range1d(start=0, end=max(times[-1], 1e-3)), y_range=Range1d(start=0, end=top)
    )
    chart.xaxis.axis_label = "ms"
    chart.yaxis.axis_label = f"{unit} of the device"
    for axis in (chart.xaxis, chart.yaxis):
        axis.formatter = BasicTickFormatter(use_scientific=False)
    below = [0.0] * len(times)
    for number, held in enumerate(facts.held_bytes.values()):
        above = [low + size / unit_bytes for low, size in zip(below, held, strict=True)]
        source = ColumnDataSource({"at": times, "below": below, "above": above})
        colour = COLOURS[number % len(COLOURS)]
        chart.varea_step(
            x="at", y1="below", y2="above", step_mode="after", source=source, fill_color=colour, fill_alpha=0.45
        )
        chart.step(x="at", y="above", mode="after", source=source, line_color=colour, line_width=1.5)
        below = above
    level = facts.shared_bytes / unit_bytes
    chart.line([0, times[-1]], [level, level], line_color=RED, line_dash="dashed", line_width=2)
    return {"memory_flow": chart}


def legend_of(facts: MemoryFlowFacts) -> list[tuple[str, str]]:
    """Return (name, colour) of what is drawn."""
    jobs = [(f"job {job.job} ({job.model})", COLOURS[number % len(COLOURS)]) for number, job in enumerate(facts.jobs)]
    return [*jobs, ("the memory that they share", RED)]
