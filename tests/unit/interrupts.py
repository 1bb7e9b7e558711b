"""Ctrl-C at random moments."""

from __future__ import annotations

import _weakrefset
import gc
import signal
import threading
from random import Random
from types import FrameType


class Interrupts:
    """Send this thread KeyboardInterrupt at a random moment after each request for one."""

    wanted = False

    def __enter__(self) -> Interrupts:
        self.callbacks, gc.callbacks[:] = gc.callbacks[:], []  # an interrupt in one, as torch.compile's, is lost
        self.before = signal.signal(signal.SIGUSR1, self.strike)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.send, args=(threading.get_ident(),))
        self.thread.start()
        return self

    def strike(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:  # from a callback of a weak reference and from __del__ nothing can be raised, either
            if frame.f_code.co_filename == _weakrefset.__file__ or frame.f_code.co_name == "__del__":
                return
            frame = frame.f_back
        if self.wanted:
            self.wanted = False
            raise KeyboardInterrupt

    def send(self, target: int) -> None:
        random = Random(0)
        while not self.ended.wait(random.random() * 0.005):
            signal.pthread_kill(target, signal.SIGUSR1)

    def __exit__(self, *exception: object) -> None:
        self.wanted = False
        self.ended.set()
        self.thread.join()
        signal.signal(signal.SIGUSR1, self.before)
        gc.callbacks[:] = self.callbacks
