"""The predictor's memory of one device: what its models take, and what the device's ledger grants.

Models take memory of the device that they are kept on, so the ledger has to grant it before one is loaded. Without
room, other models are dropped, the least recently used first; if that is not enough, jobs are planned into less memory.
Standard library only.
"""

from __future__ import annotations

import time

from pyworker.supervisors.server import Server

ROOM_TIMEOUT = 10.0  # seconds that jobs may take to make room for a model


class DeviceMemory:
    """The predictor's memory of a device, in bytes; `total_bytes` is all that the device has, unless a job said so."""

    def __init__(self, server: Server, device: str, total_bytes: int) -> None:
        self._server = server
        self._total_bytes = total_bytes
        self.device = device
        self.overhead_bytes = 0  # that the predictor takes besides its models
        self.loaded_bytes = 0  # of the models that the predictor has loaded
        self.closed_bytes = 0  # of the models that the predictor had loaded, in all
        self.arriving_bytes = 0  # of the models that are being sent to it
        self._granted_bytes = 0  # by the ledger

    async def reserve(self, size: int) -> int | None:
        """Reserve memory for one more arriving model of `size` bytes, and for those loaded if there is room.

        Returns the bytes that the loaded ones may keep, or None if jobs need all memory and do not make room in time.
        """
        deadline = time.monotonic() + ROOM_TIMEOUT
        least = self.overhead_bytes + self.arriving_bytes + size
        while True:
            granted = self._request(least, least + self.loaded_bytes)
            if granted is not None:
                self.arriving_bytes += size
                return granted - least
            if time.monotonic() > deadline:
                self.return_unused()  # withdraws the request that jobs make room
                return None
            await self._server.wait(-1, 0.05)

    def return_unused(self) -> None:
        """Return unused memory to the ledger.

        Nothing is claimed: the predictor may still report models as loaded that give way to one that is arriving.
        """
        used = self.overhead_bytes + self.arriving_bytes + self.loaded_bytes
        self._request(min(used, self._granted_bytes), used)

    def forget(self) -> None:
        """Forget what a predictor took that has ended; `return_unused` returns it."""
        self.overhead_bytes = self.arriving_bytes = self.loaded_bytes = self.closed_bytes = 0

    def limit(self) -> int:
        """Return the bytes of the device that jobs and models may use together."""
        self.return_unused()  # registers the device if it has not been used yet
        budget = "SELECT budget_bytes FROM tensile_worker._devices() WHERE name = $1"
        limit = int(self._server.rows(budget, ["text"], self.device)[0]["budget_bytes"])
        return max(0, limit - self.overhead_bytes)

    def _request(self, least: int, wanted: int) -> int | None:
        granted: int | None = self._server.call(
            "tensile_internal._inference_memory(text,int8,int8,int8)", self.device, self._total_bytes, least, wanted
        )
        self._server.commit()
        if granted is not None:
            self._granted_bytes = granted
        return granted
