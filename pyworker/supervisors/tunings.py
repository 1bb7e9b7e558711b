"""The controller's part that advances tunings: trials are submitted, pruned and compared in SQL, chosen by the tuner.

Each turn advances each open tuning in one transaction (sql/tuning/runs.sql). What that returns when a trial is
to be chosen goes to the tuner, a child process (pyworker/children/tuner.py), and its answer to the table of trials in a
later turn. All state is in the tables: a tuner that dies is asked again, and so is that of the next controller.

The rows of a tuning are in a file among the server's temporary files (tensile_internal._rows_file), which its first
trial writes. It is deleted when the tuning has ended, and by PostgreSQL when the server starts. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from pyworker.supervisors.child_environment import cores, spool_folder
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame
from pyworker.supervisors.server import Server
from pyworker.wire import FrameType

ANSWER_LIMIT = 120.0  # seconds that the tuner may take
UNUSED_LIMIT = 60.0  # seconds without an open tuning after which the tuner ends
MOST_DEATHS = 3  # of tuners in a row that were asked for the same trial
ROWS_FILES = "pgsql_tmp.pg_tensile_tuning.*"


class Tunings:
    """Advances the open tunings; `turn` is part of each of the controller's turns."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tuner: Child | None = None
        self._asked: dict[str, Any] | None = None  # the request that the tuner has not answered yet
        self._asked_at = 0.0
        self._used_at = 0.0
        self._deaths = 0  # since the last answer
        self._had_files = True  # of a controller before this one, perhaps

    @property
    def fd(self) -> int:
        """Socket on which the tuner's answer comes; -1: none is awaited."""
        return -1 if self._asked is None or self._tuner is None else self._tuner.fd

    async def turn(self) -> None:
        """Advance the open tunings."""
        tunings = self._server.rows("SELECT tuning, rows_file FROM tensile_internal._open_tunings()")
        self._server.commit()
        await self._hear()
        requests = [request for row in tunings if (request := self._advance(row["tuning"])) is not None]
        self._delete_files({row["rows_file"] for row in tunings})
        if tunings:
            self._used_at = time.monotonic()
        elif self._tuner is not None and time.monotonic() - self._used_at > UNUSED_LIMIT:
            await self.close()
        if requests and self._asked is None:
            await self._ask(requests[0])

    def _advance(self, tuning: int) -> dict[str, Any] | None:
        request = self._attempt(tuning, "tensile_internal._advance_tuning(int8,int4)", tuning, cores())
        return None if request is None else json.loads(request)

    def _attempt(self, tuning: int, signature: str, *values: Any) -> Any:
        """Call a function for one tuning; an error of it must not keep others from going on."""
        return self._server.attempt(f"tuning {tuning} cannot be advanced", signature, *values)

    # -- the tuner ----------------------------------------------------------------------------------------------------

    async def _ask(self, request: dict[str, Any]) -> None:
        try:
            if self._tuner is None:
                self._tuner = Child(self._server, "tuner", threads=1)
                await self._tuner.start()
            self._asked, self._asked_at = request, time.monotonic()
            self._tuner.queue(FrameType.SUGGEST, header=request)
            await self._hear()
        except ChildDied as death:
            await self._died(request, death)
        except Failure as failure:
            await self._fail(request, failure)
        except Stopped:
            pass  # the controller ends

    async def _hear(self) -> None:
        """Take the tuner's answer if it has come."""
        request = self._asked
        if request is None or self._tuner is None:
            return
        try:
            frame = await self._tuner.receive(0)
            if frame is None:
                if time.monotonic() - self._asked_at > ANSWER_LIMIT:
                    raise ChildDied(f"tuner chose no values within {ANSWER_LIMIT:.0f} s and was killed", None)
                return
            if frame.type == FrameType.ERROR:
                raise failure_of_frame(frame.header)
            if frame.type != FrameType.SUGGESTED:
                raise Failure("08P01", f"the tuner sent an unexpected {frame.type.name} frame")
        except ChildDied as death:
            await self._died(request, death)
            return
        except Failure as failure:
            await self._fail(request, failure)
            return
        self._asked, self._deaths = None, 0
        tuning, params = request["tuning"], frame.header["params"]
        self._attempt(tuning, "tensile_internal._add_trial(int8,int4,jsonb)", tuning, request["number"], params)

    async def _died(self, request: dict[str, Any], death: ChildDied) -> None:
        """Have another tuner asked, or end the tuning if none survives the request."""
        self._deaths += 1
        if self._deaths < MOST_DEATHS:
            self._server.log_once(death.reason)
            await self.close()
            self._server.call("tensile_internal._notify(int8)", -1)  # the next turn starts another one
            self._server.commit()
        else:
            await self._fail(request, Failure("58000", death.reason, hint="The server's log may have details."))

    async def _fail(self, request: dict[str, Any], failure: Failure) -> None:
        await self.close()
        self._deaths = 0
        texts = [self._server.text(text) for text in (failure.sqlstate, failure.message, failure.hint)]
        self._attempt(
            request["tuning"], "tensile_internal._fail_tuning(int8,text,text,text)", request["tuning"], *texts
        )

    async def close(self) -> None:
        """End the tuner."""
        self._asked = None
        if self._tuner is not None:
            tuner, self._tuner = self._tuner, None
            await tuner.close()

    # -- files --------------------------------------------------------------------------------------------------------

    def _delete_files(self, kept: set[str]) -> None:
        """Delete the rows of tunings that have ended."""
        if kept or self._had_files:
            for path in spool_folder().glob(ROWS_FILES):
                if path.name not in kept:
                    with contextlib.suppress(OSError):
                        path.unlink()
        self._had_files = bool(kept)
