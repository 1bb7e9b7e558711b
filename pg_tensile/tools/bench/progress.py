"""Progress of a benchmark on stderr: one line that changes on a terminal, else a line for each message."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console


class Progress:
    """Progress display, a context manager; on a terminal `say` replaces the previous message."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("") if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        if self._status:
            self._status.update(text)
        else:
            print(text, file=sys.stderr, flush=True)
