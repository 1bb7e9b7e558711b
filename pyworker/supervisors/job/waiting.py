"""What a job waits for: memory, processors of a Ray cluster, or both. Standard library only."""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.server import Server


class Waiting:
    """Keeps the state of this process's job `waiting`, with the reason, until it waits for nothing any more."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._for_memory = False
        self._for_cluster: str | None = None  # in words
        self._phase: str | None = None  # that was reported last

    def begin_for_memory(self) -> None:
        """Follow a TRACE, which has changed the state."""
        self._for_memory = True

    def end_for_memory(self) -> None:
        """End waiting for memory, if the job does."""
        if self._for_memory:
            self._for_memory = False
            self._write()

    def follow_cluster(self, progress: dict[str, Any]) -> None:
        """Follow a PROGRESS frame: `waits_for` begins it, null or another phase ends it."""
        phase = progress.get("phase") or self._phase
        if "waits_for" not in progress and phase == self._phase:
            return
        self._phase = phase
        reason = self._server.text(progress.get("waits_for"))
        if reason != self._for_cluster:
            self._for_cluster = reason
            self._write()

    def _write(self) -> None:
        if self._for_cluster is not None:
            self._server.call("tensile_worker._job_waits_for(text)", self._for_cluster)
        elif self._for_memory:
            self._server.call("tensile_worker._job_waits_for()")
        else:
            self._server.call("tensile_worker._job_admitted()")
        self._server.commit()
