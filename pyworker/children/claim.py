"""Claims of device memory without graphs, like those of a job of policy none."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pg_tensile.planning.device.profile import DeviceProfile
from pyworker.children.channel import Channel
from pyworker.wire import Frame, FrameType


class Claims:
    """Claims of one process on a device, one after the other: each replaces the one before."""

    def __init__(self, channel: Channel, device: str, profile: DeviceProfile, overhead_bytes: int) -> None:
        self.revision = 0  # of the last TRACE
        self._channel = channel
        self._header: dict[str, Any] = {
            "device": device,
            "profile": asdict(profile),
            "policy": "none",
            "fingerprint": None,
            "overhead_bytes": overhead_bytes,
            "overhead_measured": False,
            "persistent_bytes": 0,
            "parameters": 0,
            "vanilla_bytes": None,
            "operator": None,
            "graphs": [],
        }

    def request(self, size: int) -> Frame:
        """Request `size` bytes, and return the PLAN frame that grants them, or REFUSE. Raises channel.Stopped."""
        self.revision += 1
        self._channel.send(FrameType.TRACE, self._header | {"revision": self.revision, "least_bytes": size})
        answer = self._channel.wait_for_frame("waiting", {FrameType.PLAN, FrameType.REFUSE})
        if answer.type == FrameType.PLAN:
            self._channel.send(FrameType.PROGRESS, {"plan_generation": answer.header["generation"]})
        return answer
