"""Ctrl-C at random moments."""

from __future__ import annotations

import _weakrefset
import gc
import signal
import sys
import threading
import weakref
from random import Random
from types import FrameType
from typing import TYPE_CHECKING

import torch.utils.weak

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Modules with callbacks of weak references: nothing can be raised from one, nor from `__del__`.
CALLBACKS = {_weakrefset.__file__, weakref.__file__, torch.utils.weak.__file__}


class Interrupts:
    """Send this thread KeyboardInterrupt at a random moment after each request for one."""

    wanted = False

    def __enter__(self) -> Interrupts:
        self.callbacks, gc.callbacks[:] = gc.callbacks[:], []  # an interrupt in one, as torch.compile's, is lost
        self.unraisable, sys.unraisablehook = sys.unraisablehook, self.lose
        self.before = signal.signal(signal.SIGUSR1, self.strike)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.send, args=(threading.get_ident(),))
        self.thread.start()
        return self

    def strike(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename in CALLBACKS or frame.f_code.co_name == "__del__":
                return
            frame = frame.f_back
        if self.wanted:
            self.wanted = False
            raise KeyboardInterrupt

    def lose(self, unraisable: UnraisableHookArgs) -> None:
        """Ignore an interrupt in another callback, as Python does after a line on stderr; report what else is lost."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.unraisable(unraisable)

    def send(self, target: int) -> None:
        random = Random(0)
        while not self.ended.wait(random.random() * 0.005):
            signal.pthread_kill(target, signal.SIGUSR1)

    def __exit__(self, *exception: object) -> None:
        self.wanted = False
        self.ended.set()
        self.thread.join()
        signal.signal(signal.SIGUSR1, self.before)
        sys.unraisablehook = self.unraisable
        gc.callbacks[:] = self.callbacks
