"""An executor's part in compressing what is swapped (CSWAP, sections IV-A and IV-C; docs/internals.md, "Memory").

Before training it measures the device's codecs for a few seconds, if nobody has done so yet. While it trains, zeros are
counted in the tensors that are swapped: in the first step, soon after, and in the first of each epoch; a plan that
swaps others has them counted again. What was counted goes up as SPARSITY. Its revision rises when it is so different
from what it was at the last one that other plans may be better: the scheduler plans anew then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.planning.compression.sparsity import Statistics
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.training.steps import PlannedSteps
    from pg_tensile.planning.trace.trace import Int64s
    from pyworker.children.executor import Executor

SECONDS = 2.0  # for measuring the codecs before training
QUICK_SIZES = (1 << 18, 1 << 20)  # bytes of what is measured then
THOROUGH_SECONDS = 20.0
RECOUNTS = (10, 100)  # steps: early on momentum fills up, and units die
NEWS = 0.02  # of the bytes that are swapped: so many more or fewer zeros are a reason to plan anew


def measure_codecs(device: torch.device, seconds: float) -> dict[str, Any]:
    """A row of tensile.codec_times. With time enough tensors of all sizes and word sizes are measured."""
    from pg_tensile.execution.measuring.codecs import SIZES, calibrate
    from pg_tensile.planning.compression.coding import CHUNK_BYTES

    thorough = seconds >= THOROUGH_SECONDS
    sizes, word_bytes = (SIZES, (2, 4)) if thorough else (QUICK_SIZES, (4,))
    times, error = calibrate(device, seconds, CHUNK_BYTES[device.type], sizes, word_bytes, busy=thorough)
    return {"device": str(device), "times": json.loads(times.to_json()), "relative_error": error}


class CompressionClient:
    """One job's side of it. Without the option `compression` it does nothing."""

    def __init__(self, executor: Executor, device: torch.device, compression: str) -> None:
        self._executor = executor
        self._device = device
        self._wanted = compression != "none"
        self._measured: dict[str, Any] | None = None  # of the codecs, until it is sent
        self._steps: PlannedSteps | None = None
        self._counting = False
        self._ticks = 0
        self._found: dict[int, Statistics] = {}
        self._told: dict[int, Statistics] = {}  # at the last revision
        self._revision = 0

    def learn_codecs(self, listen: Callable[[], None]) -> None:
        """Measures the codecs, if that has not been done on this device; `listen` is called all the time."""
        if not self._wanted or str(self._device) in self._executor._spec["codecs"]:
            return
        measuring = self._executor._background.submit(measure_codecs, self._device, SECONDS)
        while not wait([measuring], timeout=0.1).done:
            listen()
        self._measured = measuring.result()

    def begin(self, steps: PlannedSteps) -> None:
        """The first step is next."""
        self._steps = steps
        self.count()

    def count(self) -> None:
        """An epoch has ended, or another plan is used: the next step counts zeros."""
        if self._wanted and self._steps is not None:
            self._steps.measure_sparsity()
            self._counting = True

    def tick(self) -> None:
        """Between two steps: sends what has been counted."""
        self._ticks += 1
        if self._ticks in RECOUNTS:
            self.count()
        found = self._steps.sparsity() if self._counting and self._steps is not None else None
        if found is None:
            return
        assert self._steps is not None
        self._counting = False
        self._found |= found  # another plan swaps others
        if not self._found:
            return
        if is_news(self._found, self._told, self._steps.traces()["train"].tensor_bytes):
            self._revision += 1
            self._told = dict(self._found)
        self._send(self._steps.moved_bytes())

    def _send(self, moved: Mapping[int, int]) -> None:
        tensors = sorted(self._found)
        shares = np.array([self._found[tensor] for tensor in tensors], "<f4")
        columns = [np.array(tensors, "<i4"), *shares.T, np.array([moved.get(tensor, -1) for tensor in tensors], "<i8")]
        header = {"revision": self._revision, "codecs": self._measured}
        self._executor._send(FrameType.SPARSITY, header, [column.tobytes() for column in columns])
        self._measured = None


def is_news(found: Mapping[int, Statistics], told: Mapping[int, Statistics], tensor_bytes: Int64s) -> bool:
    """Other plans may be better than with what was told before: there are more tensors, or other zeros in them."""
    if not found.keys() <= told.keys():
        return True
    changed = sum(abs(found[tensor].zero_share - told[tensor].zero_share) * tensor_bytes[tensor] for tensor in found)
    return bool(changed > NEWS * sum(tensor_bytes[tensor] for tensor in found))
