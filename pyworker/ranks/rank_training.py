"""Training in a rank: it takes over a job that the driver has begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pg_tensile.execution.distributed.group import Group, check_alike
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import LoadMeter
from pyworker.children.channel import Channel
from pyworker.children.job import Job
from pyworker.children.memory import MemoryClient
from pyworker.children.prepared import Begun
from pyworker.children.training_run import TrainingRun
from pyworker.cluster_device import cluster_device
from pyworker.ranks.following_memory import FollowingMemory
from pyworker.ranks.frame_queue import FrameQueue


class RankTraining(TrainingRun):
    """Rank number `rank` of `size`. Rank 0 speaks for all: its frames are the job's."""

    def __init__(self, frames: FrameQueue, begun: Begun, rank: int, size: int) -> None:
        channel = Channel(frames, ThreadPoolExecutor(1))
        channel.begin(begun.job, begun.spec)
        super().__init__(channel, begun.identity, begun.recipe)
        self._begun = begun
        self._rank, self._size = rank, size

    def train(self) -> None:
        """Train, from the preprocessed rows to the weights."""
        self.fit(self._begun.prepared, self._begun.checkpoint, self._channel.background.submit(self._measure_device))

    def _make_memory(self, job: Job, profile: DeviceProfile) -> MemoryClient:
        """Return the memory of a device of the job's own: as much as the smallest of all ranks' has."""
        if self._size > 1:
            import platform

            import torch

            check_alike("their versions of Python and PyTorch", f"{platform.python_version()}, {torch.__version__}")
        least = min(Group(self._size).collected(profile.memory_bytes))
        profile = replace(profile, memory_bytes=least)
        kind = MemoryClient if self._rank == 0 else FollowingMemory
        return kind(self._channel, job, profile, LoadMeter(), cluster_device(self._begun.job))

    def checkpoint(self, checkpoint: Checkpoint, written: Callable[[float], None]) -> None:
        if self._rank == 0:
            super().checkpoint(checkpoint, written)
        else:
            written(time.monotonic())  # rank 0's is that of all

    def _send_results(self, *results: Any) -> None:
        if self._rank == 0:
            super()._send_results(*results)
