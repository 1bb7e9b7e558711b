"""Compressed copies on an accelerator (CSWAP, section V): a stream of their own encodes and decodes, the lane's moves.

The encoded size of a chunk is only known when its kernel has ended, and its copy can only be submitted then. So a
thread submits the copies out, and `wait` blocks until it has submitted all of a transfer: the host runs ahead no
further than that. Sizes of copies in are known beforehand, so they are submitted at once. Each direction has two
chunks of staging: one is encoded or decoded while the other is on the link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from pg_tensile.execution.backends import Backend, Streams
from pg_tensile.execution.runtime.compressed_copies import Chunks
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import CHUNK_BYTES
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.codecs.device import Coder


class Buffer:
    """One chunk of staging on the device; after the event `free`, None before its first use, it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(CHUNK_BYTES[device.type], dtype=torch.uint8, device=device)
        self.free: torch.Event | None = None


class Asked:
    """A submission: not over until all work of a transfer has been given to the streams, or has failed."""

    __slots__ = ("_error", "_lock", "ended")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not an Event: an interrupt inside its Condition may leave it locked
        self._lock.acquire()
        self._error: BaseException | None = None
        self.ended = False

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self.ended = True
        self._lock.release()

    @property
    def succeeded(self) -> bool:
        """True once the submission is over, and its error, if there was one, has been reported."""
        return self.ended and self._error is None

    def join(self) -> BaseException | None:
        """Wait until the submission is over and return the error that it failed with, the first time only.

        An interrupt may leave the lock taken, but only after the end."""
        if not self.ended:
            self._lock.acquire()
            self._lock.release()
        error, self._error = self._error, None
        return error


class CodedLink:
    """Both directions of one device's link.

    It is created inside `iteration()`, so that its staging belongs to the compute's stream. Raises CodecError."""

    def __init__(self, device: torch.device, streams: Streams, backend: Backend) -> None:
        self.used = True  # by the current iteration
        self._device = device
        self._lanes, self._coding = streams.lanes, streams.coding
        self._coder: Coder = backend.coder(device)
        created = torch.accelerator.current_stream(device).record_event()
        for stream in (*self._lanes, *self._coding):
            stream.wait_event(created)
        self._staging = tuple((Buffer(device), Buffer(device)) for _ in Direction)
        with self._coding[Direction.OUT]:
            self._coder.warm_up()
        self._queue: SimpleQueue[tuple[Callable[[], None], Asked] | None] = SimpleQueue()
        self._asked: deque[Asked] = deque()  # not known to be over without an error
        self._thread = threading.Thread(target=self._run, name="pg_tensile coded link out", daemon=True)
        self._thread.start()

    # ---- out ----

    def ask(self, copy: Callable[[], None]) -> Asked:
        """Have the thread call `copy` after all earlier requests."""
        while self._asked and self._asked[0].succeeded:
            self._asked.popleft()
        asked = Asked()
        self._asked.append(asked)
        self._queue.put((copy, asked))
        return asked

    def encode(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor, ready: torch.Event) -> None:
        """Submit all work of a transfer out; coding starts after `ready`, as the lane does. Runs in the thread."""
        lane, coding = self._lanes[Direction.OUT], self._coding[Direction.OUT]
        coding.wait_event(ready)
        for number, part in enumerate(chunks.ranges(source.numel())):
            buffer, raw = self._staging[Direction.OUT][number % 2], source[part]
            with coding:
                if buffer.free is not None:
                    coding.wait_event(buffer.free)
                chunk = self._coder.encode(chunks.codec, raw, chunks.word_bytes, buffer.memory[: raw.numel()])
            chunks.coded.append(chunk)
            lane.wait_event(coding.record_event())
            with lane:
                moved = raw if chunk.codec == Codec.NONE else buffer.memory[: chunk.coded_bytes]
                target[part][: chunk.coded_bytes].copy_(moved, non_blocking=True)
            buffer.free = lane.record_event()

    def _run(self) -> None:
        with torch.accelerator.device_index(self._device.index), torch.inference_mode(False):
            while (item := self._queue.get()) is not None:
                _submit(*item)
                del item  # it refers to the device, which is not to stay alive while this waits

    # ---- in ----

    def decode(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor) -> None:
        """Submit all work of a transfer in. The lane, which has waited for the compute, waits for the decoding."""
        lane, coding = self._lanes[Direction.IN], self._coding[Direction.IN]
        for number, (part, chunk) in enumerate(zip(chunks.ranges(target.numel()), chunks.coded, strict=True)):
            moved = source[part][: chunk.coded_bytes]
            if chunk.codec == Codec.NONE:
                with lane:
                    target[part].copy_(moved, non_blocking=True)
                continue
            buffer = self._staging[Direction.IN][number % 2]
            staged = buffer.memory[: chunk.coded_bytes]
            with lane:
                if buffer.free is not None:
                    lane.wait_event(buffer.free)
                staged.copy_(moved, non_blocking=True)
            coding.wait_event(lane.record_event())
            with coding:
                self._coder.decode(chunk, staged, chunks.word_bytes, target[part])
            buffer.free = coding.record_event()
        lane.wait_event(coding.record_event())

    # ---- the end ----

    def idle(self) -> BaseException | None:
        """Wait until everything requested so far has been given to the streams, which may still be busy with it.

        Returns the first error that nothing has reported yet."""
        first = None
        while self._asked:
            error = self._asked[0].join()
            first = first or error
            self._asked.popleft()
        return first

    def close(self) -> None:
        """End the thread after its pending requests. Staging may be freed once the lanes are synchronised, too."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        for stream in self._coding:
            stream.synchronize()


def _submit(copy: Callable[[], None], asked: Asked) -> None:
    try:
        copy()
    except BaseException as error:
        asked.end(error)
    else:
        asked.end()
