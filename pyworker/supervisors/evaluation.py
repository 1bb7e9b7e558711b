"""Executors that evaluate a version of a model: its weights to them, and their results. Standard library only."""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import Failure, failure_of_frame
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType, ProtocolError


class Result:
    """Rows of an executor's result, from its frames."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.complete = False

    def add(self, frame: Frame | None) -> None:
        """Take a frame, or None if none came. Raises what the executor raised."""
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
