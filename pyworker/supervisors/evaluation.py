"""Trainers that evaluate a version of a model: its weights to them, and their results. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import Failure, Stopped, failure_of_frame, failure_of_sql
from pyworker.supervisors.job.spec import session_spec
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError

TICK = 1.0  # seconds between two checks of the job


class Result:
    """Rows of a trainer's result, from its frames."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.complete = False

    def add(self, frame: Frame | None) -> None:
        """Take a frame, or None if none came. Raises what the trainer raised."""
        if frame is None or frame.type == FrameType.PROGRESS:
            return
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        if frame.type != FrameType.RESULT or self.complete:
            raise ProtocolError(f"unexpected {frame.type.name} frame")
        self.rows += frame.header["rows"]
        self.complete = frame.header["last"]


async def drain(child: Child, result: Result) -> None:
    """Send what is queued."""
    async for frame in child.drain():
        result.add(frame)


async def send_version(server: Server, child: Child, spec: dict[str, Any], weights: str, result: Result) -> None:
    """Send the JOB frame `spec`, then the weights, each chunk when the one before has left, so that the model is never
    whole in the server process.

    `weights` is the SQL function that returns a chunk of a version. Raises Failure if the version is gone, or its
    description is too large.
    """
    try:
        child.queue(FrameType.JOB, header=spec | {"latency_models": []})
    except ProtocolError as error:
        hint = "The categories and labels of a model may take 12 MB."
        raise Failure("54000", "the model's description is too large", hint=hint, detail=str(error)) from None
    sent = seq = 0
    while sent < spec["weight_bytes"]:
        chunk = server.call(f"{weights}(int8,int4)", spec["version"], seq)
        server.commit()
        if chunk is None:
            raise Failure("42704", "this version of the model does not exist any more", hint="Use another one.")
        sent += len(chunk)
        header = {"kind": "weights", "seq": seq, "last": sent >= spec["weight_bytes"], "meta": None}
        child.queue(FrameType.STATE, header=header, buffers=[chunk])
        del chunk
        await drain(child, result)
        seq += 1


class Trainers:
    """Trainers of a worker, each of which evaluates a version on the same rows."""

    def __init__(self, server: Server, threads: int, timeout: float) -> None:
        self._server = server
        self._threads = threads
        self._timeout = timeout

    async def run(
        self,
        specs: Sequence[dict[str, Any]],
        weights: str,
        feed: Callable[[list[int]], None],
        check_job: Callable[[], None],
    ) -> list[Result]:
        """Return the result for each of the versions that `specs` describe.

        `weights` is the SQL function that returns a chunk of a version; `feed` sends the rows to sockets, and
        `check_job` raises an exception if the job is to end. Raises Failure, ChildDied, ProtocolError, Stopped."""
        server = self._server
        runs = [(self._child(is_light=spec["evaluator"] is not None), Result()) for spec in specs]
        try:
            for (child, result), spec in zip(runs, specs, strict=True):
                await child.start()
                await send_version(server, child, session_spec(server, spec, self._threads), weights, result)
            await server.wait(-1, 0)  # clears older wake-ups: those from here on interrupt the query
            check_job()
            await self._feed(feed, runs)
            for child, result in runs:
                while not result.complete:
                    if server.stopping:
                        raise Stopped
                    result.add(await child.receive(TICK))
                    check_job()
        finally:
            for child, _ in runs:
                await child.close()
        return [result for _, result in runs]

    def _child(self, is_light: bool) -> Child:
        threads, timeout = self._threads, self._timeout
        return Child(self._server, "trainer", threads=threads, timeout=timeout, forked=True, is_light=is_light)

    async def _feed(self, feed: Callable[[list[int]], None], runs: list[tuple[Child, Result]]) -> None:
        """Send the rows of the query to all trainers.

        If one dies meanwhile, its error or death is raised, not the broken connection that the query saw."""
        plpy = self._server.plpy
        try:
            for child, result in runs:
                await drain(child, result)
            if self._server.stopping:  # since an earlier wait; only a SIGTERM from here on ends the query
                raise Stopped
            feed([child.fd for child, _ in runs])
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


def metrics(result: Result) -> dict[str, float | None]:
    """Return the metrics of all rows in a result of evaluate_model; None: not defined."""
    return {name: value for name, (value, _) in _measured(result)}


def baselines(result: Result) -> dict[str, float | None]:
    """Return the baseline of each of these metrics; None: not defined, or the version has no baseline."""
    return {name: baseline for name, (_, baseline) in _measured(result)}


def _measured(result: Result) -> Iterator[tuple[str, list[float | None]]]:
    """Yield the name, the value and the baseline of each metric of all rows."""
    for group, name, label, _, quantile, *numbers in result.rows:
        if group is None and label is None and quantile is None:
            yield name, [None if number is None else float(number) for number in numbers]
