"""The trainer's part in compressing swaps (CSWAP, sections IV-A and IV-C; docs/internals.md, "Memory").

Before training it measures the device's codecs for a few seconds, unless that has been done already. During training,
zeros are counted in the tensors that are swapped: in the first step, soon after, in the first of each epoch, and after
a change of plan. The counts are sent as SPARSITY. Its revision rises when they differ so much from those of the last
revision that other plans may be better: the scheduler then plans again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.planning.compression.sparsity import Statistics
from pyworker.children.channel import Channel
from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.training.steps import PlannedSteps
    from pg_tensile.planning.trace.trace import Int64s

SECONDS = 2.0  # of measuring the codecs before training
QUICK_SIZES = (1 << 18, 1 << 20)  # bytes of the tensors that are measured then
THOROUGH_SECONDS = 20.0
RECOUNTS = (10, 100)  # steps with another count: early on, momentum builds up and units die
NEWS = 0.02  # share of the swapped bytes by which zeros must change to be a reason to plan again


def measure_codecs(device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the device's codecs for `seconds`; return a row of tensile_internal.codec_times.

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

    def __init__(self, channel: Channel, device: torch.device, compression: str) -> None:
        self._channel = channel
        self._device = device
        self._wanted = compression != "none"
        self._codec_times: dict[str, Any] | None = None  # the codecs' times, until they are sent
        self._steps: PlannedSteps | None = None
        self._counting = False
        self._ticks = 0
        self._statistics: dict[int, Statistics] = {}
        self._reported: dict[int, Statistics] = {}  # statistics at the last revision
        self._revision = 0

    def learn_codecs(self, listen: Callable[[], None]) -> None:
        """Measure the codecs unless this device's are known, calling `listen` repeatedly meanwhile."""
        if not self._wanted or str(self._device) in self._channel.spec["codecs"]:
            return
        measurement = self._channel.background.submit(measure_codecs, self._device, SECONDS)
        while not wait([measurement], timeout=0.1).done:
            listen()
        self._codec_times = measurement.result()

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
        if not self._counting or self._steps is None:
            return
        statistics = self._steps.sparsity()
        if statistics is None:
            return
        self._counting = False
        self._statistics |= statistics  # another plan may swap other tensors
        if not self._statistics:
            return
        if is_news(self._statistics, self._reported, self._steps.traces()["train"].tensor_bytes):
            self._revision += 1
            self._reported = dict(self._statistics)
        self._send(self._steps.moved_bytes())

    def _send(self, moved: Mapping[int, int]) -> None:
        tensors = sorted(self._statistics)
        shares = np.array([self._statistics[tensor] for tensor in tensors], "<f4")
        columns = [np.array(tensors, "<i4"), *shares.T, np.array([moved.get(tensor, -1) for tensor in tensors], "<i8")]
        header = {"revision": self._revision, "codecs": self._codec_times}
        self._channel.send(FrameType.SPARSITY, header, [column.tobytes() for column in columns])
        self._codec_times = None


def is_news(statistics: Mapping[int, Statistics], reported: Mapping[int, Statistics], tensor_bytes: Int64s) -> bool:
    """Return whether other plans may be better with these statistics than with those that were reported before.

    True if there are more tensors, or if the zeros of more than NEWS of the bytes have changed.
    """
    if not statistics.keys() <= reported.keys():
        return True
    changed = sum(
        abs(zeros.zero_share - reported[tensor].zero_share) * tensor_bytes[tensor]
        for tensor, zeros in statistics.items()
    )
    return bool(changed > NEWS * sum(tensor_bytes[tensor] for tensor in statistics))
