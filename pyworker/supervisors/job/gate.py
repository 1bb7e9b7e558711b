"""The comparison of a job's version with the deployed one, for a job that deploys its version only if it is better.

Two trainers, one for each version, evaluate the same rows: those of one run of the gate query, as the role that has
submitted the job (csrc/training/gate.c). Whatever goes wrong with the comparison keeps the deployed version; a trainer
that dies is replaced, as often as a job's would be. The decision, the deployment and the end of the job are one
transaction, so that an attempt that ends earlier decides nothing, and the next one compares again.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from pyworker.supervisors.evaluation import Result, Trainers, metrics
from pyworker.supervisors.failures import ChildDied, Failure, Stopped
from pyworker.supervisors.server import Server
from pyworker.wire import ProtocolError

FEED = "tensile_worker._gate_feed(int4,int4,int8,int8,text,jsonb)"
DECIDE = "SELECT * FROM tensile_worker._job_decide($1, $2, $3, $4, $5, $6)"
TYPES = ("int8", "text", "float8", "float8", "text", "text")


class _Compared(NamedTuple):
    """Values of the metric, or the failure of the comparison."""

    value: float | None = None
    previous_value: float | None = None
    failure: Failure | None = None


class Gate:
    """Decides whether the version of this process's job is deployed; `row` is what `_job_begin` returned."""

    def __init__(self, server: Server, row: dict[str, Any], trainers: Trainers) -> None:
        self.closed = row["options"].get("deploy") == "if_better"  # until a comparison opens it
        self._server = server
        self._settings = row["settings"]
        self._trainers = trainers

    async def decide(self, check_job: Callable[[], None]) -> str | None:
        """Decide, in a transaction that the caller ends by finishing the job.

        Returns a warning if the version is not deployed. `check_job` raises an exception if the job is to end."""
        while True:
            text = self._server.call("tensile_worker._job_gate()")
            self._server.commit()
            if text is None:
                check_job()
                raise Failure("42704", "the model was dropped", hint="Register it again and submit a new job.")
            gate = json.loads(text)
            previous = gate["previous"]
            compared = _Compared() if previous is None else await self._compare(gate, check_job)
            check_job()
            failure = compared.failure
            values = (
                None if previous is None else previous["version"],
                None if previous is None else gate["metric"],
                compared.value,
                compared.previous_value,
                None if failure is None else failure.sqlstate,
                None if failure is None else self._server.text(failure.message),
            )
            (decision,) = self._server.rows(DECIDE, TYPES, *values)
            if decision["decided"]:
                warning: str | None = decision["warning"]
                return warning
            self._server.commit()  # another version was deployed meanwhile

    async def _compare(self, gate: dict[str, Any], check_job: Callable[[], None]) -> _Compared:
        """Return the values of the metric, or what every attempt has failed with."""
        retries = self._server.number("pg_tensile.max_retries")
        while True:
            try:
                return await self._evaluate(gate, check_job)
            except Failure as failure:
                return _Compared(failure=failure)
            except ProtocolError as error:
                return _Compared(failure=Failure("08P01", f"a trainer broke the protocol: {error}"))
            except ChildDied as death:
                if self._server.stopping:
                    raise Stopped from None
                if retries == 0:
                    return _Compared(failure=Failure("58000", death.reason))
                retries -= 1

    async def _evaluate(self, gate: dict[str, Any], check_job: Callable[[], None]) -> _Compared:
        """Evaluate both versions on the same rows."""
        versions = (gate["version"]["version"], gate["previous"]["version"])

        def feed(fds: list[int]) -> None:
            self._server.call(FEED, *fds, *versions, gate["query"], self._settings)

        specs = (gate["version"], gate["previous"])
        results = await self._trainers.run(specs, "tensile_worker._job_gate_weights", feed, check_job)
        value, previous_value = (_value(gate["metric"], result) for result in results)
        return _Compared(value, previous_value)


def _value(metric: str, result: Result) -> float | None:
    """Return the metric's value in the rows of evaluate_model, None if it is not defined. Raises Failure."""
    values = metrics(result)
    if metric not in values:
        raise Failure("22023", f'a version has no metric "{metric}"', hint="Name one of its task in the option gate.")
    return values[metric]
