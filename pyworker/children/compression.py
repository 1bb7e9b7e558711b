"""The executor's part in compressing swaps (CSWAP, sections IV-A and IV-C; docs/internals.md, "Memory").

Before training it measures the device's codecs for a few seconds, unless that has been done already. During training,
zeros are counted in the tensors that are swapped: in the first step, soon after, in the first of each epoch, and after
a change of plan. The counts are sent as SPARSITY. Its revision rises when they differ so much from those of the last
revision that other plans may be better: the scheduler then plans anew.
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

SECONDS = 2.0  # of measuring the codecs before training
QUICK_SIZES = (1 << 18, 1 << 20)  # bytes of the tensors that are measured then
THOROUGH_SECONDS = 20.0
RECOUNTS = (10, 100)  # steps with another count: early on, momentum builds up and units die
NEWS = 0.02  # share of the swapped bytes by which zeros must change to be a reason to plan anew


def measure_codecs(device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the device's codecs for `seconds`; return a row of tensile.codec_times.

    With THOROUGH_SECONDS or more, tensors of all sizes and word sizes are measured.
    """
    from pg_tensile.execution.measuring.codecs import SIZES, calibrate
    from pg_tensile.planning.compression.coding import CHUNK_BYTES

    thorough = seconds >= THOROUGH_SECONDS
    sizes, word_bytes = (SIZES, (2, 4)) if thorough else (QUICK_SIZES, (4,))
    times, error = calibrate(device, seconds, CHUNK_BYTES[device.type], sizes, word_bytes, busy=thorough)
    return {"device": str(device), "times": json.loads(times.to_json()), "relative_error": error}


class CompressionClient:
    """One job's side of compression; does nothing without the option `compression`."""

    def __init__(self, executor: Executor, device: torch.device, compression: str) -> None:
        self._executor = executor
        self._device = device
        self._wanted = compression != "none"
        self._measured: dict[str, Any] | None = None  # the codecs' times, until they are sent
        self._steps: PlannedSteps | None = None
        self._counting = False
        self._ticks = 0
        self._found: dict[int, Statistics] = {}
        self._told: dict[int, Statistics] = {}  # statistics at the last revision
        self._revision = 0

    def learn_codecs(self, listen: Callable[[], None]) -> None:
        """Measure the codecs unless this device's are known, calling `listen` repeatedly meanwhile."""
        if not self._wanted or str(self._device) in self._executor._spec["codecs"]:
            return
        measuring = self._executor._background.submit(measure_codecs, self._device, SECONDS)
        while not wait([measuring], timeout=0.1).done:
            listen()
        self._measured = measuring.result()

    def begin(self, steps: PlannedSteps) -> None:
        """Have the first step, which is next, count zeros."""
        self._steps = steps
        self.count()

    def count(self) -> None:
        """Have the next step count zeros: an epoch has ended, or another plan is used."""
        if self._wanted and self._steps is not None:
            self._steps.measure_sparsity()
            self._counting = True

    def tick(self) -> None:
        """Send what has been counted; called between two steps."""
        self._ticks += 1
        if self._ticks in RECOUNTS:
            self.count()
        found = self._steps.sparsity() if self._counting and self._steps is not None else None
        if found is None:
            return
        assert self._steps is not None
        self._counting = False
        self._found |= found  # another plan may swap other tensors
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
    """Return whether other plans may be better with the statistics `found` than with `told`, which were sent before.

    True if there are more tensors, or if the zeros of more than NEWS of the bytes have changed.
    """
    if not found.keys() <= told.keys():
        return True
    changed = sum(abs(found[tensor].zero_share - told[tensor].zero_share) * tensor_bytes[tensor] for tensor in found)
    return bool(changed > NEWS * sum(tensor_bytes[tensor] for tensor in found))
