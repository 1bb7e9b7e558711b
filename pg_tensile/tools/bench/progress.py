"""What a benchmark is doing, on stderr: one line that changes on a terminal, else one line for each thing."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console


class Progress:
    """Used as a context; `say` replaces what was said before on a terminal."""

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
