"""The progress bar of `Job.wait`.

In a terminal rich keeps it up to date; in a notebook one output is replaced each time, because rich's own bar for
notebooks needs ipywidgets; where the output is a file, only the last state is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from pg_tensile.text import printable, short_duration

ENDED = ("finished", "failed", "cancelled")


def share(row: Mapping[str, Any]) -> float:
    """Return the share of the job's training steps that is done, from 0 to 1; only finished jobs have 1.

    `row` has the columns of tensile.progress; those that the job's worker has not reported are None."""
    if row["state"] == "finished":
        return 1.0
    epoch, steps = row["epoch"] or 1, row["steps"] or 0
    of_epoch = min((row["step"] or 0) / steps, 1.0) if steps else 0.0
    return min((epoch - 1 + of_epoch) / max(row["epochs"] or 1, 1), 0.99)


def note(row: Mapping[str, Any]) -> str:
    """Return what the job does or waits for, as text, with the least important part last (narrow terminals cut it)."""
    state, phase, reason = row["state"], row["phase"], row["reason"]
    if state in ENDED:
        return str(state)
    if state != "running" or not phase:
        doing = phase if state in ("starting", "running") and phase else state
        return f"{doing}: {reason}" if reason else str(doing)
    parts = [str(phase)]
    if row["epoch"] is not None:
        parts.append(f"epoch {row['epoch']} of {row['epochs']}")
    if row["loss"] is not None:
        parts.append(f"loss {row['loss']:.4g}")
    if row["steps"]:
        parts.append(f"step {row['step'] or 0:,} of {row['steps']:,}")
    if row["samples_per_s"]:
        parts.append(f"{row['samples_per_s']:,.0f} rows/s")
    return ", ".join(parts)


def left(row: Mapping[str, Any]) -> str:
    """Return how long the job still takes, or nothing if that is not known."""
    most, least = row["time_left_s"], row["least_time_left_s"]
    if most is None:
        return ""
    return f"{'at most ' if least is not None and least < most else ''}{short_duration(most)} left"


class TimeLeft(ProgressColumn):
    """A column with the time that is left, and with the time that has passed once the job has ended."""

    def render(self, task: Task) -> Text:
        return Text(short_duration(task.finished_time) if task.finished else str(task.fields["left"]), no_wrap=True)


class Cut(TextColumn):
    """A text column that is shortened before the other columns are if the terminal is too narrow."""

    def __init__(self, template: str) -> None:
        super().__init__(template, markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        return Text(printable(super().render(task).plain), no_wrap=True, overflow="ellipsis")


class Bar:
    """A context in which `show` updates the bar. If `shown` is False, nothing is displayed."""

    def __init__(self, title: str, shown: bool = True, console: Console | None = None) -> None:
        self._shown = shown
        self._progress = Progress(
            Cut("{task.description}"),
            BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            TimeLeft(table_column=Column(no_wrap=True)),
            Cut("{task.fields[note]}"),
            console=console or get_console(),
        )
        self._task = self._progress.add_task(title, total=1.0, note="", left="")
        self._output: Any = None  # in a notebook: the output to replace

    def __enter__(self) -> Bar:
        if not self._shown:
            return self
        if self._progress.console.is_jupyter:
            from IPython.display import display

            self._output = display(self._progress, display_id=True)
        else:
            self._progress.start()
        return self

    def show(self, row: Mapping[str, Any]) -> None:
        """Update the bar; `row` as in `share`."""
        self._progress.update(self._task, completed=share(row), note=note(row), left=left(row))
        if self._output is not None:
            self._output.update(self._progress)

    def __exit__(self, *exception: object) -> None:
        if self._shown and self._output is None:
            self._progress.stop()
