"""Keys of a terminal, without threads: cbreak mode, and one wait for keys, signals and the time to refresh.

Signals that concern the terminal (resize, stop and continue) are delivered as if they were keys. The terminal's mode is
restored however the program ends, short of SIGKILL: SIGTERM and SIGHUP are turned into exceptions.
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
PARTIAL = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")  # the start of a sequence, the rest of which may be still to come
PATIENCE_S = 0.05  # to wait for that rest


def parse(data: bytes) -> list[str]:
    """Return the keys by name, or as the character that they produce; unknown escape sequences stay whole."""
    return [NAMES.get(token, token) for token in TOKEN.findall(data.decode(errors="ignore"))]


class Keyboard:
    """The keys and signals of a terminal, as `keyboard` yields it."""

    def __init__(self, fd: int, signals: socket.socket) -> None:
        self._fd = fd
        self._signals = signals

    def wait(self, seconds: float) -> list[str]:
        """Return keys and events as soon as some arrive, or an empty list after `seconds`.

        END means that the terminal was closed."""
        watched: list[int | socket.socket] = [self._fd, self._signals]
        ready, _, _ = select.select(watched, [], [], max(0.0, seconds))
        keys: list[str] = []
        if self._signals in ready:
            keys += [EVENTS[number] for number in self._signals.recv(4096) if number in EVENTS]
        if self._fd in ready:
            data = self._read()
            while PARTIAL.search(data) and select.select([self._fd], [], [], PATIENCE_S)[0]:
                more = self._read()
                if not more:
                    break
                data += more
            keys += parse(data) if data else [END]
        return keys

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 4096)
        except OSError:  # the terminal was closed
            return b""


@contextlib.contextmanager
def keyboard(fd: int) -> Iterator[Keyboard]:
    """Yield the keyboard of the terminal `fd`, which is in cbreak mode while the context lasts.

    Works in the main thread only. Raises termios.error if `fd` is not a terminal."""
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
    with contextlib.suppress(termios.error):  # the terminal was closed
        termios.tcsetattr(fd, termios.TCSAFLUSH, mode)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the number to the wakeup socket already."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def suspend() -> None:
    """Stop this process, as Ctrl-Z does, until it is continued. To be called outside of `keyboard`."""
    os.kill(os.getpid(), signal.SIGTSTP)
