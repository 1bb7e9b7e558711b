"""The comparison of a job's version with the deployed one, for a job that deploys its version only if it is better.

Two executors, one for each version, evaluate the same rows: those of one run of the gate query, as the role that has
submitted the job (csrc/gate.c). Whatever goes wrong with the comparison keeps the deployed version; an executor that
dies is replaced, as often as a job's would be. The decision, the deployment and the end of the job are one transaction,
so that an attempt that ends earlier decides nothing, and the next one compares again.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.evaluation import Result, drain, send_version
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_sql
from pyworker.supervisors.job.spec import session_spec
from pyworker.supervisors.server import Server
from pyworker.wire import ProtocolError

TICK = 1.0  # seconds between two checks of the job
FEED = "tensile._gate_feed(int4,int4,int8,int8,text,jsonb)"
DECIDE = "SELECT * FROM tensile._job_decide($1, $2, $3, $4, $5, $6)"
TYPES = ("int8", "text", "float8", "float8", "text", "text")


class _Compared(NamedTuple):
    """Values of the metric, or the failure of the comparison."""

    value: float | None = None
    previous_value: float | None = None
    failure: Failure | None = None


class Gate:
    """Decides whether the version of this process's job is deployed; `row` is what `_job_begin` returned."""

    def __init__(self, server: Server, row: dict[str, Any], threads: int, timeout: float) -> None:
        self.closed = row["options"].get("deploy") == "if_better"  # until a comparison opens it
        self._server = server
        self._settings = row["settings"]
        self._threads = threads
        self._timeout = timeout

    async def decide(self, check_job: Callable[[], None]) -> str | None:
        """Decide, in a transaction that the caller ends by finishing the job.

        Returns a warning if the version is not deployed. `check_job` raises an exception if the job is to end."""
        while True:
            text = self._server.call("tensile._job_gate()")
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
                return _Compared(failure=Failure("08P01", f"an executor broke the protocol: {error}"))
            except ChildDied as death:
                if self._server.stopping:
                    raise Stopped from None
                if retries == 0:
                    return _Compared(failure=Failure("58000", death.reason))
                retries -= 1

    async def _evaluate(self, gate: dict[str, Any], check_job: Callable[[], None]) -> _Compared:
        """Evaluate both versions on the same rows."""
        specs = (gate["version"], gate["previous"])
        runs = [
            (Child(self._server, "executor", threads=self._threads, timeout=self._timeout, forked=True), Result())
            for _ in specs
        ]
        try:
            for (child, result), spec in zip(runs, specs, strict=True):
                await child.start()
                header = session_spec(self._server, spec, self._threads)
                await send_version(self._server, child, header, "tensile._job_gate_weights", result)
            await self._server.wait(-1, 0)  # clears older wake-ups: those from here on interrupt the query
            check_job()
            await self._feed(gate, runs)
            for child, result in runs:
                while not result.complete:
                    if self._server.stopping:
                        raise Stopped
                    result.add(await child.receive(TICK))
                    check_job()
        finally:
            for child, _ in runs:
                await child.close()
        value, previous_value = (_value(gate["metric"], result) for _, result in runs)
        return _Compared(value, previous_value)

    async def _feed(self, gate: dict[str, Any], runs: list[tuple[Child, Result]]) -> None:
        """Send the rows of the gate query to both executors.

        If one dies meanwhile, its error or death is raised, not the broken connection that the query saw."""
        plpy = self._server.plpy
        fds = [child.fd for child, _ in runs]
        versions = (gate["version"]["version"], gate["previous"]["version"])
        try:
            for child, result in runs:
                await drain(child, result)
            self._server.call(FEED, *fds, *versions, gate["query"], self._settings)
            self._server.commit()
        except plpy.spiexceptions.QueryCanceled:
            raise
        except plpy.SPIError as error:
            self._server.rollback()
            failure = failure_of_sql(error)
            if failure.sqlstate.startswith("08"):
                for child, result in runs:
                    while (frame := await child.receive(TICK)) is not None:
                        result.add(frame)
            raise failure from None
        for child, _ in runs:
            child.restart_timeout()


def _value(metric: str, result: Result) -> float | None:
    """Return the metric's value in the rows of evaluate_model, None if it is not defined. Raises Failure."""
    for group, name, label, _, quantile, value in result.rows:
        if name == metric and group is None and label is None and quantile is None:
            return None if value is None else float(value)
    raise Failure("22023", f'a version has no metric "{metric}"', hint="Name one of its task in the option gate.")
