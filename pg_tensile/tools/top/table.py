"""The columns of the two tables, and the choice of those that fit.

Each column has a rank: on a narrow terminal the columns with the highest rank are dropped first. The cells left over
widen the columns that can use them. The strip about the selected job (view.py) shows most of the numbers that the
tables leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from pg_tensile.text import count, loss, percent, printable, short, short_duration, short_size
from pg_tensile.tools.top.cells import bar, fit, sparkline
from pg_tensile.tools.top.history import SILENT_S, History
from pg_tensile.tools.top.snapshot import Job, Snapshot

MARK = "▸"  # before the selected job


@dataclass(frozen=True)
class Column:
    """A column: the `width` in cells that it needs, the `most` that it can use, and `show` for a job's text."""

    title: str
    rank: int
    width: int
    show: Callable[[Job, int], str]
    most: int = 0
    left: bool = False
    style: str = ""


Chosen = list[tuple[Column, int]]


def choose(columns: Sequence[Column], room: int) -> Chosen:
    """Return the columns that fit into `room` cells, each after a space, with their widths; in their order."""
    widths: dict[str, int] = {}
    for column in sorted(columns, key=lambda option: option.rank):
        if room <= column.width:
            break
        widths[column.title] = column.width
        room -= column.width + 1
    growing = [column for column in columns if column.title in widths and column.most > column.width]
    while room and growing:
        for column in growing[:room]:
            widths[column.title] += 1
        room -= min(room, len(growing))
        growing = [column for column in growing if widths[column.title] < column.most]
    return [(column, widths[column.title]) for column in columns if column.title in widths]


def heading(chosen: Chosen) -> Text:
    texts = [" " + fit(column.title, width, right=not column.left) for column, width in chosen]
    return Text("".join(texts), style="bold")


def line(chosen: Chosen, job: Job, selected: bool) -> Text:
    """Return the line of a job in the table."""
    text = Text(style="reverse" if selected else "")
    for number, (column, width) in enumerate(chosen):
        text.append(MARK if selected and number == 0 else " ")
        text.append(fit(column.show(job, width), width, right=not column.left), "" if selected else column.style)
    return text


# ---- running jobs ---------------------------------------------------------------------------------------------------


def running(snapshot: Snapshot, history: History, jobs: Sequence[Job]) -> list[Column]:
    """Return the columns of the jobs that have a trainer."""
    epochs = [_epoch(job) for job in jobs]
    owners, devices = {job.owner for job in jobs}, {job.device for job in jobs} - {None}
    of = history.of

    def eta(job: Job) -> str:
        return ("≤" if job.may_stop_early else "") + short_duration(job.time_left_s)

    def phase(job: Job) -> str:
        silent = snapshot.silent_s(job) or 0.0
        return f"silent {short_duration(silent)}" if silent > SILENT_S else job.phase or job.state

    return [
        *_names(jobs),
        Column("PHASE", 1, 11, lambda job, width: phase(job), left=True, style="green"),
        Column("EPOCH", 7, _widest(5, 11, epochs), lambda job, width: _epoch(job)),
        Column("STEP", 16, 9, lambda job, width: _of(job.step, job.steps)),
        Column("PROGRESS", 2, 8, lambda job, width: bar(job.progress, width), most=30, left=True, style="cyan"),
        Column("ETA", 3, 7, lambda job, width: eta(job)),
        Column("LOSS", 5, 7, lambda job, width: loss(job.loss)),
        Column("COURSE", 8, 6, lambda job, width: sparkline(of(job).losses, width), most=24, left=True, style="cyan"),
        Column("SAMP/S", 6, 6, lambda job, width: short(job.samples_per_s)),
        Column("MEMORY", 4, 7, lambda job, width: short_size(job.memory_bytes)),
        Column("PEAK", 13, 7, lambda job, width: short_size(job.device_peak_bytes)),
        Column("KEPT", 15, 7, lambda job, width: short_size(job.device_bytes)),
        Column("SWAPPED", 10, 7, lambda job, width: short_size(job.bytes_swapped)),
        Column("SWAP/S", 11, 7, lambda job, width: short_size(of(job).swap_bytes_per_s)),
        Column("SLOWER", 13, 6, lambda job, width: slowdown(job.measured_slowdown)),
        Column("STALL", 9, 6, lambda job, width: short_duration(job.stall_s)),
        Column("STALL%", 14, 6, lambda job, width: percent(of(job).stall_share)),
        Column("PLAN", 12, 4, lambda job, width: count(job.plan_generation)),
        *([Column("DEVICE", 17, 8, lambda job, width: job.device or "", left=True)] if len(devices) > 1 else []),
        *([Column("OWNER", 18, 10, lambda job, width: job.owner, left=True)] if len(owners) > 1 else []),
        Column("STATE", 19, 8, lambda job, width: job.state, left=True),
        Column("POLICY", 20, 8, lambda job, width: job.policy or "", left=True),
        Column("PRIO", 21, 5, lambda job, width: str(job.priority)),
    ]


def _names(jobs: Sequence[Job]) -> list[Column]:
    """Return the columns with which both tables begin."""
    names = _widest(8, 30, [printable(job.model) for job in jobs])
    return [
        Column("JOB", 0, _widest(3, 19, [str(job.job) for job in jobs]), lambda job, width: str(job.job)),
        Column("MODEL", 0, 8, lambda job, width: job.model, most=names, left=True, style="bold"),
    ]


def _widest(least: int, most: int, texts: Sequence[str]) -> int:
    return min(most, max([least, *map(cell_len, texts)]))


def _epoch(job: Job) -> str:
    return _of(job.epoch, job.epochs)


def _of(part: int | None, whole: int | None) -> str:
    return "" if part is None or whole is None else f"{count(part)}/{count(whole)}"


# ---- the queue ------------------------------------------------------------------------------------------------------


def queue(snapshot: Snapshot, jobs: Sequence[Job]) -> list[Column]:
    """Return the columns of the waiting jobs."""
    return [
        *_names(jobs),
        Column("STATE", 1, 11, lambda job, width: job.state, left=True, style="yellow"),
        Column("WAITED", 4, 6, lambda job, width: short_duration(snapshot.waited_s(job))),
        Column("PRIO", 5, 5, lambda job, width: str(job.priority)),
        Column("REASON", 2, 12, lambda job, width: reason(snapshot, job), most=1000, left=True),
    ]


def reason(snapshot: Snapshot, job: Job) -> str:
    """Return why the job waits, and when it is tried again."""
    again = snapshot.retry_in_s(job)
    parts = (job.reason, None if again is None else f"again in {short_duration(again)}")
    return "; ".join(part for part in parts if part)


def slowdown(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def _largest(name: str) -> Callable[[Job], Any]:
    return lambda job: (-(getattr(job, name) or 0), job.job)


ORDERS: dict[str, Callable[[Job], Any]] = {  # sort keys of running jobs: by number, or the largest value first
    "job": lambda job: job.job,
    "memory": _largest("memory_bytes"),
    "stall": _largest("stall_s"),
    "samples/s": _largest("samples_per_s"),
    "start": _largest("started_at"),
}
