"""The models that the predictor keeps loaded, and their memory."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from pyworker.children.loaded_models import HOST, Model


class Key(NamedTuple):
    """Key of a loaded model: a version, and the device memory that it is executed within (0 means in one piece).

    A negative number (tensile_worker._base_number) is that of a model as its folder has it, without a version.
    """

    version: int
    memory_budget: int = 0


class ModelCache:
    """Loaded models, the least recently used first, that take at most `limit_bytes` of host memory.

    A model that is being loaded counts with the memory that it is going to take. A model that is dropped is passed to
    `close(key, model)`, and takes memory until `closed` says that it has none any more."""

    def __init__(
        self,
        limit_bytes: int,
        close: Callable[[Key, Model], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit_bytes
        self._clock = clock
        self._used_at: dict[Key, float] = {}
        self._close = close or self._close_now
        self._models: OrderedDict[Key, Model] = OrderedDict()
        self._kept_bytes: Counter[str] = Counter()  # by device
        self.dropped_bytes: Counter[str] = Counter()  # in all, by device; of these
        self.closed_bytes: Counter[str] = Counter()  # take no memory any more
        self._host_bytes = 0  # besides those of the CPU as a device
        self._loading: dict[Key, int] = {}  # host memory of models that are being loaded

    @property
    def device_bytes(self) -> dict[str, int]:
        """Memory that loaded and dropped models take, by device."""
        return {
            device: kept + self.dropped_bytes[device] - self.closed_bytes[device]
            for device, kept in self._kept_bytes.items()
        }

    def get(self, key: Key) -> Model | None:
        model = self._models.get(key)
        if model is not None:
            self._models.move_to_end(key)
            self._used_at[key] = self._clock()
        return model

    def on_device(self, device: str) -> list[tuple[Key, int, float]]:
        """Return the models on the device with their bytes of it and the time of their last use.

        The least recently used come first; those that are dropped already are not among them."""
        return [
            (key, model.nbytes, self._used_at[key]) for key, model in self._models.items() if model.device == device
        ]

    def shown(self) -> list[dict[str, Any]]:
        """Return the rows of tensile.loaded_models."""
        return [
            {
                "version": key.version,
                "device": model.device,
                "memory_budget": key.memory_budget or None,
                "device_bytes": model.nbytes,
                "planned_bytes": model.planned_bytes,
                "host_bytes": model.host_bytes,
            }
            for key, model in self._models.items()
        ]

    def begin(self, key: Key, host_bytes: int) -> None:
        """Count a model that is going to be loaded, dropping others to make room for it."""
        self._loading[key] = host_bytes
        self._make_room(0)

    def abandon(self, key: Key) -> None:
        """Count a model no more that could not be loaded."""
        self._loading.pop(key, None)

    def add(self, key: Key, model: Model) -> None:
        """Keep the model, dropping others to make room for it."""
        self._loading.pop(key, None)
        self._models[key] = model
        self._used_at[key] = self._clock()
        self._kept_bytes[model.device] += model.nbytes
        self._host_bytes += model.host_bytes
        self._make_room(1)

    def _make_room(self, least: int) -> None:
        """Drop models, the least recently used first, until `least` are left or all fit."""
        while self._taken() > self._limit and len(self._models) > least:
            self.drop(next(iter(self._models)))

    def _taken(self) -> int:
        return self._kept_bytes[HOST] + self._host_bytes + sum(self._loading.values())

    def shrink(self, device: str, limit_bytes: int) -> None:
        """Drop models on `device`, the least recently used first, until they take at most `limit_bytes` of it."""
        for key in [key for key, model in self._models.items() if model.device == device]:
            if self._kept_bytes[device] <= limit_bytes:
                return
            self.drop(key)

    def drop(self, key: Key) -> None:
        """Drop a loaded model: its thread closes it when it has ended the requests that it has."""
        dropped = self._models.pop(key)
        del self._used_at[key]
        self._kept_bytes[dropped.device] -= dropped.nbytes
        self.dropped_bytes[dropped.device] += dropped.nbytes
        self._host_bytes -= dropped.host_bytes
        self._close(key, dropped)

    def _close_now(self, _key: Key, model: Model) -> None:
        model.close()
        self.closed(model.device, model.nbytes)

    def closed(self, device: str, nbytes: int) -> None:
        """Count a dropped model no more, which took `nbytes` of the device and has been closed."""
        self.closed_bytes[device] += nbytes
