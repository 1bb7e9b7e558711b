"""Compressed copies on CUDA (CSWAP, section V): kernels encode and decode on a stream of their own, the lane's moves.

The encoded size of a chunk is only known when its kernel has ended, and its copy can only be submitted then. So a
thread submits the copies out, and `wait` blocks until it has submitted all of a transfer: the host runs ahead no
further than that. Sizes of copies in are known beforehand, so they are submitted at once. Each direction has two
chunks of staging: one is encoded or decoded while the other is on the link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import torch

from pg_tensile.execution.codecs.device import Coder, coder_of
from pg_tensile.execution.runtime.compressed_copies import Chunks
from pg_tensile.planning.compression.codec import Codec, CodedChunk
from pg_tensile.planning.compression.coding import CHUNK_BYTES
from pg_tensile.planning.device.profile import Direction


class Buffer:
    """One chunk of staging on the device; after the event `free`, None before its first use, it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(CHUNK_BYTES["cuda"], dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None


class Asked(NamedTuple):
    """A submission: the lock is held until all work of a transfer has been given to the streams, or has failed."""

    lock: threading.Lock
    errors: list[BaseException]

    @classmethod
    def new(cls) -> Asked:
        lock = threading.Lock()  # not an Event: an interrupt inside its Condition may leave it locked
        lock.acquire()
        return cls(lock, [])

    def join(self) -> None:
        """Wait until everything is submitted. Raises the error of a failed submission."""
        self.lock.acquire()
        self.lock.release()
        if self.errors:
            raise self.errors[0]


class CodedLink:
    """Both directions of one device's link.

    It is created inside `iteration()`, so that its staging belongs to the compute's stream."""

    def __init__(self, device: torch.device, lanes: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> None:
        self.used = True  # by the current iteration
        self._device = device
        self._lanes = lanes
        self._coding = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self._coder: Coder = coder_of(device)
        created = torch.cuda.current_stream(device).record_event()
        for stream in (*lanes, *self._coding):
            stream.wait_event(created)
        self._staging = tuple((Buffer(device), Buffer(device)) for _ in Direction)
        self._queue: SimpleQueue[tuple[Callable[[], None], Asked] | None] = SimpleQueue()
        self._last: Asked | None = None
        self._thread = threading.Thread(target=self._run, name="pg_tensile coded link out", daemon=True)
        self._thread.start()

    # ---- out ----

    def ask(self, copy: Callable[[], None]) -> Asked:
        """Have the thread call `copy` after all earlier requests."""
        self._last = asked = Asked.new()
        self._queue.put((copy, asked))
        return asked

    def encode(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor, ready: torch.cuda.Event) -> None:
        """Submit all work of a transfer out, which starts after `ready`. Runs in the thread."""
        lane, coding = self._lanes[Direction.OUT], self._coding[Direction.OUT]
        for stream in (lane, coding):
            stream.wait_event(ready)
        for number, part in enumerate(chunks.ranges(source.numel())):
            buffer, raw = self._staging[Direction.OUT][number % 2], source[part]
            with torch.cuda.stream(coding):
                if buffer.free is not None:
                    coding.wait_event(buffer.free)
                size = self._coder.encode(chunks.codec, raw, chunks.word_bytes, buffer.memory[: raw.numel()])
            chunk = CodedChunk(Codec.NONE, raw.numel()) if size < 0 else CodedChunk(chunks.codec, size)
            chunks.coded.append(chunk)
            lane.wait_event(coding.record_event())
            with torch.cuda.stream(lane):
                moved = raw if size < 0 else buffer.memory[:size]
                target[part][: chunk.coded_bytes].copy_(moved, non_blocking=True)
            buffer.free = lane.record_event()

    def _run(self) -> None:
        with torch.cuda.device(self._device), torch.inference_mode(False):
            while (item := self._queue.get()) is not None:
                copy, asked = item
                try:
                    copy()
                except BaseException as error:
                    asked.errors.append(error)
                asked.lock.release()

    # ---- in ----

    def decode(self, chunks: Chunks, source: torch.Tensor, target: torch.Tensor, ready: torch.cuda.Event) -> None:
        """Submit all work of a transfer in, which starts after `ready`. The lane waits for the decoding at the end."""
        lane, coding = self._lanes[Direction.IN], self._coding[Direction.IN]
        for stream in (lane, coding):
            stream.wait_event(ready)
        for number, (part, chunk) in enumerate(zip(chunks.ranges(target.numel()), chunks.coded, strict=True)):
            moved = source[part][: chunk.coded_bytes]
            if chunk.codec == Codec.NONE:
                with torch.cuda.stream(lane):
                    target[part].copy_(moved, non_blocking=True)
                continue
            buffer = self._staging[Direction.IN][number % 2]
            staged = buffer.memory[: chunk.coded_bytes]
            with torch.cuda.stream(lane):
                if buffer.free is not None:
                    lane.wait_event(buffer.free)
                staged.copy_(moved, non_blocking=True)
            coding.wait_event(lane.record_event())
            with torch.cuda.stream(coding):
                self._coder.decode(chunk.codec, staged, chunks.word_bytes, target[part])
            buffer.free = coding.record_event()
        lane.wait_event(coding.record_event())

    # ---- the end ----

    def idle(self) -> None:
        """Wait until everything submitted so far has been encoded or decoded; the lanes may still be copying."""
        if self._last is not None:
            self._last.join()
        for stream in self._coding:
            stream.synchronize()

    def close(self) -> None:
        """End the thread after its pending requests. Staging may be freed once the lanes are synchronised, too."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        for stream in self._coding:
            stream.synchronize()
