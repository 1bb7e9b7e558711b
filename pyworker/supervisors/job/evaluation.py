"""The evaluation of a deployed version for a schedule: a job that trains nothing.

Its trainer evaluates the version on the rows of the query, which runs once, as the role that has made the schedule
(csrc/training/gate.c). Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyworker.supervisors.evaluation import Trainers, baselines, metrics
from pyworker.supervisors.failures import Failure
from pyworker.supervisors.server import Server


class Evaluation:
    """Evaluates for this process's job; `row` is what `_job_begin` returned."""

    def __init__(self, server: Server, row: dict[str, Any], trainers: Trainers) -> None:
        self._server = server
        self._row = row
        self._trainers = trainers

    async def run(self, check_job: Callable[[], None]) -> None:
        """Store the values, in a transaction that the caller ends by finishing the job.

        `check_job` raises an exception if the job is to end. Raises Failure, ChildDied, ProtocolError."""
        server, row = self._server, self._row
        text = server.call("tensile_worker._job_evaluation()")
        server.commit()
        if text is None:
            raise Failure("42704", "the model or its schedule was dropped", hint="Schedule the evaluation again.")
        spec = json.loads(text)
        rows = 0

        def feed(fds: list[int]) -> None:
            nonlocal rows
            values = (fds[0], spec["version"], row["query"], row["settings"])
            rows = server.call("tensile_worker._evaluation_feed(int4,int8,text,jsonb)", *values)

        (result,) = await self._trainers.run([spec], "tensile_worker._job_evaluation_weights", feed, check_job)
        values = (spec["version"], rows, metrics(result), baselines(result))
        server.call("tensile_worker._job_evaluated(int8,int8,jsonb,jsonb)", *values)
