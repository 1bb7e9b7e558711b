"""A program in a pseudo-terminal of its own: keys for it, and what its screen shows."""

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

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[^\[]|(.)", re.DOTALL)
PARTIAL = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Screen:
    """What a terminal makes of the few sequences that full-screen programs of rich's write."""

    def __init__(self, width: int, height: int) -> None:
        self._rows = height
        self._cells: dict[tuple[int, int], str] = {}
        self._row = self._column = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.modes: dict[str, bool] = {}  # ?25: the cursor is shown, ?1049: the alternate screen

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decoder.decode(data)
        partial = PARTIAL.search(text)
        self._rest = partial[0] if partial else ""
        for arguments, final, character in TOKEN.findall(text.removesuffix(self._rest) if self._rest else text):
            if character:
                self._put(character)
            elif final:
                self._obey(arguments, final)

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
        elif character == "\r":
            self._column = 0
        else:
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

    def lines(self) -> list[str]:
        last = max((row for row, _ in self._cells), default=-1)
        rows: list[dict[int, str]] = [{} for _ in range(max(self._rows, last + 1))]
        for (row, column), character in self._cells.items():
            rows[row][column] = character
        return ["".join(cells.get(place, " ") for place in range(max(cells, default=-1) + 1)) for cells in rows]


class Terminal:
    """A context; the program is killed at its end if it still runs. `wait_until`: the fixture."""

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
        ends = {"stdin": self._slave, "stdout": self._slave, "stderr": self._slave}
        # setsid makes the pseudo-terminal the program's own, so that Ctrl-C and changes of its size arrive
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], env=environment | {"TERM": "xterm-256color"}, **ends
        )
        self._reader = threading.Thread(target=self._read)
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
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def text(self) -> str:
        with self._lock:
            return "\n".join(self._screen.lines())

    def until(self, *parts: str, without: str | None = None, timeout: float = 30) -> str:
        """What the screen shows, once it shows all of this, and not that."""

        def shown() -> str | None:
            text = self.text()
            return text if all(part in text for part in parts) and (without is None or without not in text) else None

        found: str = self._wait_until(shown, timeout, lambda: f"{parts} on the screen, which shows\n{self.text()}")
        return found

    def status(self, timeout: float = 20) -> int:
        """The exit status, once the program has ended."""
        return self.process.wait(timeout)

    def is_restored(self) -> bool:
        """Whether the terminal is as it was before the program."""
        with self._lock:
            modes = self._screen.modes
            shown = modes.get("?25", True) and not modes.get("?1049", False)
        return shown and termios.tcgetattr(self._slave) == self.before
