"""Keys of a terminal, without threads: cbreak mode, and one wait for keys, signals and the time to refresh.

Signals that change the terminal (its size, stop and continue) come in as if they were keys. Whatever ends the program,
short of SIGKILL, the terminal gets its mode back: SIGTERM and SIGHUP are made exceptions.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import termios
import tty
from collections.abc import Iterator
from types import FrameType

RESIZE, SUSPEND, RESUME, END = "resize", "suspend", "resume", "end"
EVENTS: dict[int, str] = {signal.SIGWINCH: RESIZE, signal.SIGTSTP: SUSPEND, signal.SIGCONT: RESUME}
SEQUENCES = {
    "up": "\x1b[A \x1bOA",
    "down": "\x1b[B \x1bOB",
    "page up": "\x1b[5~",
    "page down": "\x1b[6~",
    "home": "\x1b[H \x1bOH \x1b[1~",
    "last": "\x1b[F \x1bOF \x1b[4~",
    "enter": "\r \n",
    "escape": "\x1b",
    "back": "\x7f \x08",
}
NAMES = {sequence: name for name, sequences in SEQUENCES.items() for sequence in sequences.split(" ")}
TOKEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
PARTIAL = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")  # the rest of it may be on its way
PATIENCE_S = 0.05  # for that


def parse(data: bytes) -> list[str]:
    """Keys by name, or as the character that they make; unknown sequences stay whole."""
    return [NAMES.get(token, token) for token in TOKEN.findall(data.decode(errors="ignore"))]


class Keyboard:
    """What `keyboard` makes of a terminal."""

    def __init__(self, fd: int, signals: socket.socket) -> None:
        self._fd = fd
        self._signals = signals

    def wait(self, seconds: float) -> list[str]:
        """Keys and events as soon as there are some; none when the time is over. END: the terminal is gone."""
        watched: list[int | socket.socket] = [self._fd, self._signals]
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        found: list[str] = []
        if self._signals in ready:
            found += [EVENTS[number] for number in self._signals.recv(4096) if number in EVENTS]
        if self._fd in ready:
            data = self._read()
            while PARTIAL.search(data) and select.select([self._fd], [], [], PATIENCE_S)[0]:
                more = self._read()
                if not more:
                    break
                data += more
            found += parse(data) if data else [END]
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 4096)
        except OSError:  # of a terminal that was closed
            return b""


@contextlib.contextmanager
def keyboard(fd: int) -> Iterator[Keyboard]:
    """The keys of a terminal while the context lasts. Only in the main thread. Raises termios.error: it is none."""
    before = termios.tcgetattr(fd)
    reader, writer = socket.socketpair()
    with reader, writer, contextlib.ExitStack() as undo:
        reader.setblocking(False)
        writer.setblocking(False)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        for number in EVENTS:
            undo.callback(signal.signal, number, signal.signal(number, _nothing) or signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGHUP):
            undo.callback(signal.signal, number, signal.signal(number, _end) or signal.SIG_DFL)
        undo.callback(_restore, fd, before)
        tty.setcbreak(fd)
        yield Keyboard(fd, reader)


def _restore(fd: int, mode: list[int | list[bytes | int]]) -> None:
    with contextlib.suppress(termios.error):  # it was closed
        termios.tcsetattr(fd, termios.TCSAFLUSH, mode)


def _nothing(number: int, frame: FrameType | None) -> None:
    """The number has been written to the socket."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def suspend() -> None:
    """Stops this process, as Ctrl-Z does, until it is continued. Outside of `keyboard`."""
    os.kill(os.getpid(), signal.SIGTSTP)
