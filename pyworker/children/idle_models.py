"""Idle models give way to jobs: those that a job lacks the memory of are dropped, the least recently used first.

A model is idle if no call uses it and none has used it for a while. The scheduler says what jobs lack
(LACKING): models are dropped for the first waiting job that they suffice for, and for none if they suffice for no job,
because loading them again costs time. Those that have been idle for longer also give way to running jobs that would
lose less time. The predictor loads all of them again when they are needed. The scheduler decides again once the memory
of a dropped model is free. Until the ledger knows that it is, dropped models are taken off what jobs lack: a decision
about the memory of the first of them may come before that of the second is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pyworker.children.model_cache import Key, ModelCache

PATIENCE = 60.0  # seconds that a model is idle, at least, before running jobs take its memory


class Lacking(NamedTuple):
    """Bytes of a device that waiting jobs lack, those first that start first, and that running jobs lack."""

    waiting: list[int]
    running: int


class IdleModels:
    """The models of a predictor that give way to jobs; `is_busy(key)` says whether a call uses a model."""

    def __init__(
        self, cache: ModelCache, is_busy: Callable[[Key], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._is_busy = is_busy
        self._clock = clock
        self._idle_s = 0.0
        self._lacking: dict[str, Lacking] = {}  # by device; empty once models have been dropped for it

    def tell(self, header: dict[str, Any]) -> None:
        """Take over what jobs lack from the header of a LACKING frame."""
        self._idle_s, device = header["idle_s"], header["device"]
        coming = self._cache.dropped_bytes[device] - header["closed_bytes"]
        lacking = Lacking([max(0, bytes - coming) for bytes in header["waiting"]], header["running"] - coming)
        if lacking.running > 0 or lacking.waiting:
            self._lacking[device] = lacking
        else:
            self._lacking.pop(device, None)

    def give_way(self) -> float | None:
        """Drop models that are idle by now and that a job lacks the memory of.

        Return the seconds until another model may be, or None if only a call or the scheduler can change that."""
        seconds = [self._give_way(device) for device in list(self._lacking)]
        return min((each for each in seconds if each is not None), default=None)

    def _give_way(self, device: str) -> float | None:
        lacking, patience = self._lacking[device], max(PATIENCE, self._idle_s)
        idle = self._unused(device)
        needed = next((bytes for bytes in lacking.waiting if bytes <= _sum(idle, self._idle_s)), 0)
        if needed:
            self._drop(device, idle, needed)
            return None
        if lacking.running > 0 and _sum(idle, patience):
            self._drop(device, [model for model in idle if model.seconds >= patience], lacking.running)
            return None
        limits = [self._idle_s] if lacking.waiting else []
        limits += [patience] if lacking.running > 0 else []
        return min((limit - each.seconds for each in idle for limit in limits if each.seconds < limit), default=None)

    def _unused(self, device: str) -> list[_Unused]:
        """Return the models that no call uses, the least recently used first."""
        now = self._clock()
        return [
            _Unused(key, nbytes, now - used_at)
            for key, nbytes, used_at in self._cache.on_device(device)
            if not self._is_busy(key)
        ]

    def _drop(self, device: str, models: list[_Unused], needed: int) -> None:
        del self._lacking[device]
        for model in models:
            if needed <= 0:
                return
            self._cache.drop(model.key)
            needed -= model.nbytes


class _Unused(NamedTuple):
    """A model that no call uses, and the seconds for which that is so."""

    key: Key
    nbytes: int
    seconds: float


def _sum(models: list[_Unused], seconds: float) -> int:
    """Return the bytes of the models that have been unused for so long."""
    return sum(model.nbytes for model in models if model.seconds >= seconds)
