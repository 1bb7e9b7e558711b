"""The predictor's models: asked for, received from the supervisor, loaded in their threads, kept and dropped.

A version is asked for once (LOAD). MODEL and its weights come from the supervisor, a little at a time, while the
sessions are served. Then the model's thread loads it, once the models that had to make room for it are closed. Its
memory counts from before that: with the supervisor since it was reserved, here since the weights are complete.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from pg_tensile.planning.device.profile import DeviceProfile
from pyworker.children.idle_models import IdleModels
from pyworker.children.loaded_models import HOST, Model, load
from pyworker.children.model_cache import Key, ModelCache
from pyworker.children.model_thread import Deliveries, ModelThread, Result, Steps, Wanted, one_at_a_time
from pyworker.children.overhead import earlier_overhead, overhead_bytes
from pyworker.connection import Connection
from pyworker.state_frames import StateReader
from pyworker.wire import Frame, FrameType, ProtocolError

ROOM_TIMEOUT = 30.0  # seconds that a model waits for those that it replaces
TURN_BYTES = 1 << 18  # of weights that are received before the sessions are served again


class NoRoomError(MemoryError):
    """A dropped model does not end."""

    hint = "Try again, or raise pg_tensile.model_cache; pg_tensile.predict_timeout ends no computation."


class Arriving(NamedTuple):
    """A model whose weights are being received."""

    key: Key
    header: dict[str, Any]
    reader: StateReader
    chunks: list[memoryview]


class Events(NamedTuple):
    """Callbacks of the predictor: a model is there; one is refused, with the header of an ERROR frame; another share of
    the rows counts for drift.

    `error_header` makes that header of an exception."""

    loaded: Callable[[Key], None]
    refused: Callable[[Key, dict[str, Any]], None]
    sampled: Callable[[float], None]
    error_header: Callable[[Exception], dict[str, Any]]


class ServedModels:
    """The models of a predictor. All methods are called by its loop."""

    def __init__(self, supervisor: Connection, cache_bytes: int, deliveries: Deliveries, events: Events) -> None:
        self._supervisor = supervisor
        self._deliveries = deliveries
        self._events = events
        self._cache = ModelCache(cache_bytes, self._close)
        self._computing: Counter[Key] = Counter()  # requests that models' threads have
        self._idle = IdleModels(self._cache, lambda key: self._computing[key] > 0)
        self._threads: dict[Key, ModelThread] = {}
        self._closing: list[ModelThread] = []
        self._imported: set[bool] = set()  # whether models without and with a memory budget have been loaded
        self._locks: dict[str, threading.Lock] = {}  # by accelerator
        self._arriving: Arriving | None = None

    def get(self, key: Key) -> Model | None:
        return self._cache.get(key)

    def compute(self, key: Key, model: Model, steps: Steps, done: Callable[[Result], None], wanted: Wanted) -> None:
        """Have the thread of a loaded model take the steps; see ModelThread.submit."""
        self._computing[key] += 1

        def computed(result: Result) -> None:
            self._computing[key] -= 1
            self._cache.get(key)  # it was used until now
            done(result)

        self._threads[key].submit(self._in_turn(model.device, steps), computed, wanted)

    def give_way(self) -> float | None:
        """Drop idle models that jobs lack the memory of; return the seconds until that is to be tried again."""
        return self._idle.give_way()

    def _in_turn(self, device: str, steps: Steps) -> Steps:
        """Return the steps, of which no two are taken at once on an accelerator.

        Its allocator has one record of its peak, from which workspaces are planned."""
        if device == HOST:
            return steps
        return one_at_a_time(steps, self._locks.setdefault(device, threading.Lock()))

    def ask_for(self, key: Key) -> None:
        """Ask the supervisor for a model; an event follows."""
        self._supervisor.send(FrameType.LOAD, key.version, header={"memory_budget": key.memory_budget})

    def receive(self) -> bool:
        """Receive a little from the supervisor; return True after STOP or the end of the connection."""
        frame = self._supervisor.poll(TURN_BYTES)
        if frame is None:
            return self._supervisor.closed
        if frame.type == FrameType.STOP:
            return True
        if frame.type == FrameType.MODEL and frame.header.get("error"):
            self._arriving = None  # the error may be about a model that has come in part
            self._events.refused(model_key(frame), frame.header["error"])
        elif frame.type == FrameType.DEVICE:
            self._describe(*(frame.header[field] for field in ("name", "profiles", "overheads")))
        elif frame.type == FrameType.LACKING:
            self._idle.tell(frame.header)
        elif frame.type == FrameType.DRIFT:
            self._events.sampled(frame.header["rate"])
        elif frame.type == FrameType.MODEL:
            self._arriving = Arriving(model_key(frame), frame.header, StateReader(), [])
        elif frame.type == FrameType.STATE and self._arriving is not None:
            self._collect(frame, self._arriving)
        else:
            raise ProtocolError(f"unexpected {frame.type.name} frame")
        return False

    # ---- loading ----

    def _collect(self, frame: Frame, arriving: Arriving) -> None:
        chunk = arriving.reader.chunk(frame)
        arriving.chunks.append(chunk.data)
        if chunk.last:
            self._arriving = None
            self._load(arriving.key, arriving.header, arriving.chunks)

    def _load(self, key: Key, header: dict[str, Any], chunks: list[memoryview]) -> None:
        device = header["device"]
        weight_bytes = sum(chunk.nbytes for chunk in chunks)
        host_bytes = header.get("reserved_bytes", key.memory_budget or weight_bytes) if device == HOST else 0
        self._cache.shrink(device, header.get("keep_bytes", sys.maxsize))
        self._cache.begin(key, host_bytes + (weight_bytes if key.memory_budget else 0))
        thread = self._threads[key] = self._new_thread()
        steps = self._in_turn(device, _loading(header, chunks))
        thread.submit(_after(tuple(self._closing), steps), partial(self._loaded, key))

    def _new_thread(self) -> ModelThread:
        import torch

        return ModelThread(self._deliveries, torch.inference_mode)

    def _loaded(self, key: Key, result: Result) -> None:
        if result.error is None:
            self._cache.add(key, result.value)
            self._collect_garbage(bool(key.memory_budget))
            self._report(key)
            self._events.loaded(key)
            return
        error = self._events.error_header(result.error)
        self._cache.abandon(key)
        self._threads.pop(key).end()
        self._report(key)
        self._events.refused(key, error)

    def _collect_garbage(self, within_budget: bool) -> None:
        """Collect what loading has left; the first time, exempt what it has imported from later collections.

        Later models are not exempt: their graphs have cycles, which only a collection frees once they are dropped."""
        gc.collect()
        if within_budget not in self._imported:
            self._imported.add(within_budget)
            gc.freeze()

    # ---- dropping ----

    def _close(self, key: Key, model: Model) -> None:
        """Have the thread of a dropped model close it, after the requests that it has."""
        thread = self._threads.pop(key)
        self._closing.append(thread)
        steps = self._in_turn(model.device, _closing(model))
        thread.submit(steps, partial(self._closed, thread, model.device, model.nbytes))
        thread.end()

    def _closed(self, thread: ModelThread, device: str, nbytes: int, _result: Result) -> None:
        self._closing.remove(thread)
        gc.collect()
        self._cache.closed(device, nbytes)
        self._report()

    def _report(self, key: Key | None = None) -> None:
        """Report the models and their memory, for the devices' ledger and tensile.loaded_models.

        `key`: the model that has been loaded, or could not be."""
        version, memory_budget = key or (0, 0)
        header = {
            "memory_budget": memory_budget,
            "device_bytes": self._cache.device_bytes,
            "closed_bytes": self._cache.closed_bytes,
            "models": self._cache.shown(),
        }
        self._supervisor.send(FrameType.PROGRESS, version, header=header)

    # ---- devices ----

    def _describe(self, name: str, profiles: dict[str, dict[str, Any]], overheads: list[dict[str, Any]]) -> None:
        """Answer DEVICE: the device that pg_tensile.device `name` stands for, as jobs resolve it, with its profile."""
        thread = self._new_thread()
        thread.submit(_described(name, profiles, overheads), self._answer_description)
        thread.end()

    def _answer_description(self, result: Result) -> None:
        header = result.value or {"error": result.error and self._events.error_header(result.error)}
        self._supervisor.send(FrameType.DEVICE, header=header)


def model_key(frame: Frame) -> Key:
    """Return the model that a PREDICT, EMBED or MODEL frame is about. Raises ProtocolError."""
    memory_budget = frame.header.get("memory_budget") or 0
    if not isinstance(memory_budget, int) or memory_budget < 0:
        raise ProtocolError(f"a memory budget of {memory_budget!r}")
    return Key(frame.job, memory_budget)


# ---- work of threads ----


def _after(closing: Sequence[ModelThread], steps: Steps) -> Steps:
    """Take the steps once these threads have closed their models."""
    for thread in closing:
        if not thread.ended.wait(ROOM_TIMEOUT):
            raise NoRoomError("a model that has to make room for this one still computes")
    return (yield from steps)


def _loading(header: dict[str, Any], chunks: list[memoryview]) -> Generator[None, None, Model]:
    profile = None
    if header.get("memory_budget"):
        _import_planning()
        profile = DeviceProfile.from_json(header["profile"])
    return load(header, chunks, profile, header["device"])
    yield


def _import_planning() -> None:
    """Import what captures and plans, which makes so many objects that collecting them would stop the loop."""
    gc.disable()
    try:
        import pg_tensile.execution.runtime.open_device
        import pg_tensile.execution.training.prediction  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _closing(model: Model) -> Generator[None, None, None]:
    model.close()
    return
    yield


def _described(
    name: str, profiles: dict[str, dict[str, Any]], overheads: list[dict[str, Any]]
) -> Generator[None, None, dict[str, Any]]:
    """Describe the device; without its profile among those of the catalogue, by device, it is measured now.

    `overheads` is what jobs have measured (`earlier_overhead`)."""
    from pg_tensile.execution.device_choice import choose_device
    from pg_tensile.execution.measuring.device import measure

    device = choose_device(name)
    fields = profiles.get(str(device))
    profile = measure(device) if fields is None else DeviceProfile.from_json(fields)
    overhead = overhead_bytes(str(device), profile, earlier_overhead(overheads, str(device)))
    return {"error": None, "device": str(device), "profile": asdict(profile), "overhead_bytes": overhead}
    yield
