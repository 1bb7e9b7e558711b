"""`pg-tensile top`: prints the view once, writes JSON, or shows the view live until q or Ctrl-C.

The live view needs a terminal for both input and output; without one, the error points to --once and --json. When the
server cannot be reached, the live view shows the last snapshot with an alarm and reconnects; --once and --json end with
the error.
"""

from __future__ import annotations

import errno
import io
import sys
import time

from rich.console import Console, Group

from pg_tensile.client.connection import Connection, ServerError
from pg_tensile.errors import OptionError
from pg_tensile.tools.top import keys
from pg_tensile.tools.top.details import Row
from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.json_view import document
from pg_tensile.tools.top.reader import Reader
from pg_tensile.tools.top.state import ViewState
from pg_tensile.tools.top.table import ORDERS
from pg_tensile.tools.top.view import page_lines, view

RETRY_S = 1.0  # at least, between two attempts to connect
ANSWER_S = 5.0  # for which an answer stays in the footer
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10, "home": -(10**9), "last": 10**9}


def run(connection: Connection, *, once: bool, as_json: bool, interval: float) -> int:
    """Run the command and return its exit status.

    `interval` is the time between two refreshes, in seconds. Raises ServerError, OptionError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals that are not UTF-8 show ? for missing characters
    console = Console(highlight=False)
    if not once and not as_json:
        _check_terminal(console)
    reader = Reader(connection)
    try:
        if as_json:
            return _write(reader, once, interval)
        if once:
            return _print(reader, console)
        return Live(reader, console, interval).run()
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return 129  # the terminal was closed: the status is that of SIGHUP
    finally:
        reader.close()


def _check_terminal(console: Console) -> None:
    if not sys.stdin.isatty() or not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
        hint = "--once prints the view once; --json writes a line for each refresh, or one with --once."
        raise OptionError("the live view needs a terminal for input and output", hint)


def _write(reader: Reader, once: bool, interval: float) -> int:
    history = History()
    while True:
        due = time.monotonic() + interval
        print(document(reader.observe(history), history), flush=True)
        if once:
            return 0
        time.sleep(max(0.0, due - time.monotonic()))


def _print(reader: Reader, console: Console) -> int:
    history = History()
    for line in view(ViewState(reader.observe(history), history, reader.where), console.width):
        line.rstrip()
        console.print(line)
    return 0


class Live:
    """The live view on a terminal, with the actions of its keys."""

    def __init__(self, reader: Reader, console: Console, interval: float) -> None:
        self._reader = reader
        self._console = console
        self._interval = interval
        self._history = History()
        self._snapshot = reader.observe(self._history)  # not caught: an error of the first one ends the command
        self._due = time.monotonic() + interval
        self._order, self._page, self._offset = "job", "jobs", 0
        self._selected: int | None = None  # number of a job
        self._place = 0  # index of the selected job among the lines
        self._details: Row | None = None
        self._to_cancel: int | None = None  # the job that the footer's question is about
        self._alarm = self._note = ""
        self._noted = 0.0
        self._ended = False

    def run(self) -> int:
        while not self._ended:
            with keys.keyboard(sys.stdin.fileno()) as keyboard, self._console.screen():
                event = self._watch(keyboard)
            if event == keys.SUSPEND:
                keys.suspend()
        return 0

    def _watch(self, keyboard: keys.Keyboard) -> str:
        """Show the view until the terminal has to be left, for good or to be set up again; return the key or event."""
        while True:
            if time.monotonic() >= self._due:
                self._refresh()
            self._draw()
            for key in keyboard.wait(self._due - time.monotonic()):
                if key in (keys.SUSPEND, keys.RESUME):
                    return key
                asked = self._to_cancel
                self._press(key)
                if self._ended:
                    return key
                if self._to_cancel is not None and asked is None:
                    break  # keys typed before the question was shown do not answer it

    # -- what is shown ------------------------------------------------------------------------------------------------

    def _view_state(self) -> ViewState:
        return ViewState(
            self._snapshot,
            self._history,
            self._reader.where,
            order=self._order,
            selected=self._selected,
            page=self._page,
            details=self._details,
            offset=self._offset,
            alarm=self._alarm,
            note=self._note,
        )

    def _draw(self) -> None:
        width, height = self._console.size
        self._select(0)
        self._console.update_screen(Group(*view(self._view_state(), width, height)))

    def _refresh(self) -> None:
        if self._to_cancel is None and time.monotonic() > self._noted + ANSWER_S:
            self._note = ""
        try:
            self._snapshot = self._reader.observe(self._history)
            if self._page == "details" and self._details is not None:
                self._details = self._reader.details(self._details["job"])
            self._alarm = ""
            pause = self._interval
        except ServerError as error:
            self._alarm = f"trying again: {_said(error)}"
            pause = max(self._interval, RETRY_S)
        self._due = time.monotonic() + pause

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _press(self, key: str) -> None:
        if key == keys.RESIZE:
            return
        self._note, self._noted = "", time.monotonic()
        if self._to_cancel is not None:
            job, self._to_cancel = self._to_cancel, None
            if key in ("y", "Y"):
                self._cancel(job)
        elif key in ("q", "Q", keys.END):
            self._ended = True
        elif key in MOVES:
            self._move(MOVES[key])
        elif key == "enter" and self._page == "jobs":
            self._open()
        elif key in ("escape", "back", "enter"):
            self._page = "jobs"
        elif key in ("?", "h"):
            self._page, self._offset = "help", 0
        elif key == "s":
            names = list(ORDERS)
            self._order = names[(names.index(self._order) + 1) % len(names)]
        elif key == "c" and self._page != "help":
            self._ask_to_cancel()
        if key == keys.END:
            self._ended = True

    def _move(self, by: int) -> None:
        if self._page == "jobs":
            self._select(by)
        else:
            most = page_lines(self._view_state(), self._console.width) - 1
            self._offset = max(0, min(self._offset + by, most))

    def _select(self, by: int) -> None:
        """Select the job `by` lines further down. An ended job is replaced by the one that is now on its line."""
        jobs = [job.job for job in self._view_state().jobs]
        if self._selected in jobs:
            self._place = jobs.index(self._selected)
        self._place = max(0, min(self._place + by, len(jobs) - 1))
        self._selected = jobs[self._place] if jobs else None

    def _open(self) -> None:
        if self._selected is None:
            return
        try:
            self._details = self._reader.details(self._selected)
            self._page, self._offset = "details", 0
        except ServerError as error:
            self._note = _said(error)

    def _ask_to_cancel(self) -> None:
        job = self._details["job"] if self._page == "details" and self._details else self._selected
        if job is not None:
            self._to_cancel = job
            self._note = f"Cancel job {job}? y cancels it, any other key does not."

    def _cancel(self, job: int) -> None:
        try:
            cancelled = self._reader.cancel(job)
            self._note = f"Job {job} is being cancelled." if cancelled else f"Job {job} had ended already."
            self._due = 0.0
        except ServerError as error:
            self._note = _said(error)


def _said(error: ServerError) -> str:
    return f"{error.message}. {error.hint}" if error.hint else error.message
