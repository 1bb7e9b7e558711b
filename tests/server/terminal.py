"""A program in a pseudo-terminal: keys to send to it, and the contents of its screen."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.repository import REPOSITORY

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[^\[]|(.)", re.DOTALL)
PARTIAL = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Screen:
    """The screen of a terminal, which interprets the few escape sequences of rich's full-screen programs."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.modes = {"?25": True, "?1049": False}  # the cursor is shown, the alternate screen

    def resize(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._cells = {
            (row, column): cell for (row, column), cell in self._cells.items() if row < height and column < width
        }

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decoder.decode(data)
        partial = PARTIAL.search(text)
        self._rest = partial[0] if partial else ""
        for arguments, final, character in TOKEN.findall(text[: len(text) - len(self._rest)]):
            if character:
                self._put(character)
            elif final:
                self._obey(arguments, final)

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row, self._column = self._row + 1, 0
        elif character == "\r":
            self._column = 0
        else:
            if self._column < self._width and (self._row < self._height or not self.modes["?1049"]):
                self._cells[self._row, self._column] = character
            self._column += 1

    def _obey(self, arguments: str, final: str) -> None:
        if final == "H":
            row, _, column = arguments.partition(";")
            self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
        elif final in "hl":
            self.modes[arguments] = final == "h"
            if arguments == "?1049":
                self._cells.clear()
                self._row = self._column = 0

    def lines(self) -> list[str]:
        """Return the lines up to the last one written to; lines are not scrolled away."""
        rows: list[dict[int, str]] = [{} for _ in range(1 + max((row for row, _ in self._cells), default=-1))]
        for (row, column), character in self._cells.items():
            rows[row][column] = character
        return ["".join(cells.get(position, " ") for position in range(1 + max(cells, default=-1))) for cells in rows]


class Terminal:
    """A context that runs a program and kills it at the end if it still runs. `wait_until`: the fixture."""

    def __init__(
        self, command: Sequence[str], wait_until: Callable[..., Any], width: int = 80, height: int = 24
    ) -> None:
        self._wait_until = wait_until
        self._master, self._slave = os.openpty()
        self._lock = threading.Lock()
        self._screen = Screen(width, height)
        self.resize(width, height)
        self.before = termios.tcgetattr(self._slave)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        # setsid makes the pseudo-terminal the program's own, so that Ctrl-C and changes of its size arrive; who started
        # the tests in the background has SIGINT ignored
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "env", "--default-signal=INT", *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=REPOSITORY,
            env=environment | {"TERM": "xterm-256color"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._slave)  # ends the reader
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                with self._lock:
                    self._screen.feed(data)

    def resize(self, width: int, height: int) -> None:
        with self._lock:
            self._screen.resize(width, height)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def text(self) -> str:
        with self._lock:
            return "\n".join(self._screen.lines())

    def until(self, *parts: str, without: str | None = None, timeout: float = 30) -> str:
        """Wait until the screen shows all `parts` and not `without`; return the screen's text."""

        def shown() -> str | None:
            text = self.text()
            return text if all(part in text for part in parts) and (without is None or without not in text) else None

        text: str = self._wait_until(shown, timeout, lambda: f"{parts} on the screen, which shows\n{self.text()}")
        return text

    def status(self, timeout: float = 20) -> int:
        """Wait until the program has ended and return its exit status."""
        return self.process.wait(timeout)

    def is_restored(self) -> bool:
        """True if the terminal has the settings that it had before the program."""
        with self._lock:
            shown = self._screen.modes["?25"] and not self._screen.modes["?1049"]
        return shown and termios.tcgetattr(self._slave) == self.before

    def await_restored(self) -> None:
        self._wait_until(self.is_restored, 5, lambda: f"modes {self._screen.modes}, {termios.tcgetattr(self._slave)}")
