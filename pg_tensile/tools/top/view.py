"""The view: a pure function from the state to lines of text for a terminal of a given size.

    header      the server, numbers of jobs, the server's time; below it an alarm, and models that have drifted
    devices     memory granted, the link, the load by others
    tunings     a line for each: trials, and the best one so far
    running     a line for each job with a trainer
    queue       the waiting jobs, the next one first, with reasons
    strip       pace, memory and costs of the selected job
    footer      keys, a question or an answer

Tables that do not fit are scrolled to the selected job. A terminal with fewer than LOW lines has no strip, and devices
have only one line each where two would take more than a fifth of the height; the tables use the lines that are left.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pg_tensile.tools.top import details, panels, table
from pg_tensile.tools.top.cells import fit, wrap
from pg_tensile.tools.top.snapshot import Job
from pg_tensile.tools.top.state import ViewState
from pg_tensile.tools.top.table import Chosen

LOW = 16  # lines, below which the strip is left out
HELP = """\
q, Ctrl-C      quit
↑ ↓, k j       select a job; PgUp, PgDn: by ten; Home, End: the first, the last
Enter          details of the selected job; Esc goes back
c              cancel the selected job, after a question
s              order: job, memory, stall, samples/s, start (newest first)
?              this page

Device memory  █ granted to jobs  ▒ the predictor's  · free
Link           bytes moved now, both ways, of what both ways could
ETA            at the pace of the last seconds; ≤: the job may stop earlier
SLOWER         a step now, as a multiple of one when nothing else ran
COURSE         the loss over the epochs, from its lowest to its highest
MEMORY         of the device, for a step: by its plan, or without one at most
PEAK, KEPT     measured: at most so far, and between two steps
SWAPPED STALL  moved over the link, and waited for it, since its trainer began
PLAN           generation of the plan in use
PRIO           priority; the queue is in the order of priority and waiting time
PHASE          silent: nothing was heard of its trainer for so long

You see your own jobs; members of pg_read_all_stats see all of them."""


def view(state: ViewState, width: int, height: int | None = None) -> list[Text]:
    """Return at most `height` lines, each of at most `width` cells.

    A height of None means all lines, without strip and footer."""
    top = panels.header(state, width)
    bottom = [] if height is None else [panels.footer(state, width)]
    if state.page == "jobs":
        top += [*panels.devices(state, width, height), *panels.tunings(state, width, height)]
        if height is not None and height >= LOW:
            bottom = [*panels.strip(state, width), *bottom]
    room = None if height is None else max(0, height - len(top) - len(bottom))
    middle = _tables(state, width, room) if state.page == "jobs" else _page(state, width, room)
    if room is not None:
        middle = middle[:room] + [Text("")] * (room - len(middle))
    lines = [*top, *middle, *bottom]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines if height is None else lines[: max(0, height - 1)] + lines[-1:]


def page_lines(state: ViewState, width: int) -> int:
    """Return the number of lines of the page of details or help, visible or not."""
    return len(_page(state, width, None))


def _page(state: ViewState, width: int, room: int | None) -> list[Text]:
    """Return `room` lines of details or help, from the current offset on; None means all lines."""
    if state.page == "help":
        lines = [Text(fit(text, width).rstrip()) for text in HELP.splitlines()]
    else:
        lines = details.page(state.details, width) if state.details else []
    room = len(lines) if room is None else room
    start = max(0, min(state.offset, len(lines) - room))
    return lines[start : start + room]


def _tables(state: ViewState, width: int, room: int | None) -> list[Text]:
    """Return rule, heading and lines of the running jobs, and of the queue."""
    running, queue = state.running, state.queue
    if not state.jobs:
        mine = "" if state.snapshot.sees_all else " You see your own jobs only."
        return [Text(""), *map(Text, wrap(f"No open jobs: SELECT train_model(…) submits one.{mine}", width, 2))]
    rows = None if room is None else room - 2 * bool(running) - 2 * bool(queue)
    most, rest = _share(len(running), len(queue), rows)
    lines: list[Text] = []
    if running:
        chosen = table.choose(table.running(state.snapshot, state.history, running), width)
        lines += _table(f"running, by {state.order}", chosen, running, state.selected, most, width)
    if queue:
        chosen = table.choose(table.queue(state.snapshot, queue), width)
        lines += _table("queue, the next one first", chosen, queue, state.selected, rest, width)
    return lines


def _share(running: int, queue: int, rows: int | None) -> tuple[int, int]:
    """Return how many lines of each table are state.

    If not all fit, the queue has a third of them, or more if the running jobs leave more."""
    if rows is None:
        return running, queue
    rows = max(0, rows)
    most = max(0, min(running, max(rows - queue, rows - max(1, rows // 3))))
    return most, min(queue, rows - most)


def _table(title: str, chosen: Chosen, jobs: Sequence[Job], selected: int | None, rows: int, width: int) -> list[Text]:
    """Return rule, heading and the lines of `rows` jobs around the selected one."""
    index = next((index for index, job in enumerate(jobs) if job.job == selected), 0)
    start = max(0, min(index - rows // 2, len(jobs) - rows))
    seen = jobs[start : start + rows]
    part = f"{start + 1}–{start + len(seen)} of {len(jobs)}" if 0 < len(seen) < len(jobs) else ""
    lines = [table.line(chosen, job, job.job == selected) for job in seen]
    return [panels.rule(title, part, width), table.heading(chosen), *lines]
