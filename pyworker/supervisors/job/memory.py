"""A job's memory: its traces go to the catalogue, the scheduler's plans and refusals to the trainer.

Standard library only.
"""

from __future__ import annotations

import json
import time
from typing import Any

from pyworker.cluster_device import cluster_device, on_cluster
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import Failure
from pyworker.supervisors.job.ranks import asked_ranks
from pyworker.supervisors.job.waiting import Waiting
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError

REFUSAL_TIMEOUT = 300.0  # seconds that a trainer may take to answer REFUSE if pg_tensile.executor_timeout is 0
MOST_REFUSALS = 1000  # in a row: the trainer follows each with the trace of a smaller batch


class JobMemory:
    """Memory scheduling of one attempt at a job, between the catalogue and the trainer."""

    def __init__(
        self, server: Server, child: Child, waiting: Waiting, job: int, options: dict[str, Any], timeout: float
    ) -> None:
        self._server = server
        self._child = child
        self._waiting = waiting
        self._job = job
        self._cluster_device = None if asked_ranks(options) is None else cluster_device(job)
        self._refusal_timeout = timeout or REFUSAL_TIMEOUT
        self._generation_sent = 0  # of the newest plan sent to the trainer
        self._generation_used = 0
        self._refused = False
        self._refusals = 0  # since the last plan
        self._registered: tuple[Any, ...] = ()  # the device of the last trace, with its memory and rates
        self._refused_at = 0.0

    def forward_plans(self) -> None:
        """Send newer plans to the trainer; the first one ends the job's waiting."""
        plans = self._server.rows("SELECT * FROM tensile_worker._fetch_plan($1)", ["int8"], self._generation_sent)
        self._server.commit()
        for plan in plans:
            buffers = [plan.pop("events"), plan.pop("plan_order"), plan.pop("groups")]
            self._child.queue(FrameType.PLAN, self._job, header=plan, buffers=buffers)
            self._generation_sent = plan["generation"]
            self._refusals = 0
            self._waiting.end_for_memory()

    def forward_refusal(self) -> None:
        """Tell the trainer that its trace has been refused memory, unless it has been told."""
        if self._refused:
            return
        self._refused = True
        refusal = json.loads(self._server.call("tensile_worker._job_refusal()"))
        self._server.commit()
        self._child.queue(FrameType.REFUSE, self._job, header=refusal)
        self._refused_at = time.monotonic()

    def check_refused(self) -> None:
        """Raise Failure if a trainer that was refused memory continues: it must not keep memory of others."""
        silent = self._refused and time.monotonic() - self._refused_at > self._refusal_timeout
        if silent or self._refusals > MOST_REFUSALS:
            message = "the trainer continues although there is no device memory for it"
            raise Failure("53200", message, hint="The code of the model may keep it from stopping.")

    def keep_trace(self, frame: Frame) -> None:
        """Store a TRACE frame in the catalogue, where the scheduler finds it."""
        header, profile = frame.header, frame.header["profile"]
        self._check_device(header["device"])
        graphs = len(header["graphs"])
        traces = [bytes(buffer) for buffer in frame.buffers[:graphs]]
        tables = [bytes(buffer).decode() for buffer in frame.buffers[graphs:]]
        rates = profile["out_bytes_per_s"], profile["in_bytes_per_s"]
        self._registered = header["device"], profile["memory_bytes"], *rates
        self._register(header["overhead_bytes"])
        values = (self._server.json(header | {"torch": self._child.torch}), traces, tables[0] if tables else None)
        sql = "SELECT tensile_worker._job_trace($1::jsonb, $2, $3::jsonb)"
        self._server.rows(sql, ["text", "bytea[]", "text"], *values)
        self._server.commit()
        if self._generation_sent == 0 or not graphs:
            self._waiting.begin_for_memory()
        if self._refused:
            self._refused = False  # the refusal was of an earlier trace
            self._refusals += 1

    def _register(self, overhead_bytes: int) -> None:
        """Enter the trainer's device and overhead into the ledger."""
        function = "tensile_worker._register_device(text,int8,float8,float8,int8)"
        self._server.call(function, *self._registered, overhead_bytes)

    def _check_device(self, device: str) -> None:
        """Raise ProtocolError unless the job may use the device: one of a cluster is a single job's."""
        own = self._cluster_device
        if device != own if own is not None else on_cluster(device):
            raise ProtocolError(f'a job that may not use device "{device}" does')

    def record_use(self, progress: dict[str, Any]) -> None:
        """Record what a PROGRESS frame says of the plan, an iteration under it or that it cannot be used, and of the
        trainer's overhead."""
        used = progress.get("plan_generation") or 0
        if used > self._generation_used:
            self._generation_used = used
            self._server.call("tensile_worker._acknowledge_plan(int8)", used)
        rejected = progress.get("plan_rejected")
        if rejected is not None:
            reason = self._server.text(rejected["reason"])
            self._server.call("tensile_worker._job_log(text,text,int8)", "rejected", reason, rejected["generation"])
        overhead = progress.get("overhead")
        if overhead is not None and self._registered:
            self._register(overhead["overhead_bytes"])
            self._server.call("tensile_worker._job_overhead(jsonb)", overhead)
