"""The scheduler's searches for better plans, for jobs of policy swapadvisor.

One search runs at a time, the others queue. Each is a child process of its own (children/search.py), which ends when
the job ends, sends another trace or is given other memory. Results are stored in the catalogue, by the graph's
fingerprint and the memory: another job with both takes the result at once and need not search.

Nothing is decided about plans here: the result of a search is one more plan that the planner may choose. Standard
library only.
"""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType

PATIENCE = 60.0  # seconds by which a search may exceed its time
POLICY = "swapadvisor"


class Wanted(NamedTuple):
    """Job whose plan may be improved: the plan that it was given, and what that was made for."""

    job: int
    device: str
    captured: str  # when its trace was captured
    budget_bytes: int  # that a plan may take
    link_share: float
    host_bytes: int
    iteration_us: float
    rows: bytes
    order: bytes
    seconds: float


@dataclass
class Search:
    """Search for one job.

    `number` identifies the newest plan that was worth a change, counted over all jobs (0 if none was); `rows` and
    `order` are that plan.
    """

    wanted: Wanted
    state: str = "queued"
    cached: bool = False
    number: int = 0
    rows: bytes = b""
    order: bytes = b""
    best_us: float | None = None
    generation: int = 0
    evaluations: int = 0

    def serves(self, wanted: Wanted) -> bool:
        """Return whether the search is still of use for `wanted`.

        It has to be about the same trace and, unless the job's plan is its own result, about the same memory.
        """
        if wanted.captured != self.wanted.captured:
            return False
        own = self.number > 0 and (wanted.rows, wanted.order) == (self.rows, self.order)
        return own or wanted.budget_bytes == self.wanted.budget_bytes


class Searches:
    """Searches of the scheduler; one instance per scheduler."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._searches: dict[int, Search] = {}
        self._child: Child | None = None
        self._job = 0  # whose search runs
        self._until = 0.0
        self._found = 0  # number of plans that were worth a change, of all jobs

    @property
    def searching(self) -> bool:
        return self._child is not None

    def of(self, job: int) -> Search | None:
        """Return the job's search if it has found a plan, else None."""
        search = self._searches.get(job)
        return search if search is not None and search.number else None

    async def turn(self, wanted: dict[int, Wanted]) -> bool:
        """End searches that are of no use, receive results, start the next; return whether one is a better plan."""
        found = self._found
        for job in [
            job for job, search in self._searches.items() if job not in wanted or not search.serves(wanted[job])
        ]:
            await self._drop(job, ended=job not in wanted)
        for job in sorted(wanted.keys() - self._searches.keys()):
            self._begin(wanted[job])
        try:
            await self._listen()
            if self._child is None:
                await self._start()
        except ChildDied as death:
            await self._fail(death.reason)
        except Stopped:
            await self.close()
        except Failure as failure:
            await self._fail(failure.message)
        return self._found > found

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close()
            self._child = None

    # ---- start and end ----

    def _begin(self, wanted: Wanted) -> None:
        """Take the result of an earlier search, and queue a new search unless that one is as good."""
        search = self._searches[wanted.job] = Search(wanted)
        sql = "SELECT * FROM tensile._searched($1, $2)"
        for found in self._server.rows(sql, ["int8", "int8"], wanted.job, wanted.budget_bytes):
            search.cached = True
            self._take(search, found["events"], found["plan_order"], found["iteration_us"], found["generations"], 0)
            if found["bucket_bytes"] == wanted.budget_bytes and found["seconds"] >= wanted.seconds:
                search.state = "finished"
        self._tell(search)

    def _take(self, search: Search, rows: bytes, order: bytes, us: float, generation: int, evaluations: int) -> None:
        self._found += 1
        search.number, search.rows, search.order = self._found, rows, order
        search.best_us, search.generation, search.evaluations = us, generation, evaluations

    async def _drop(self, job: int, ended: bool) -> None:
        search = self._searches.pop(job)
        if job == self._job and self._child is not None:
            await self.close()
        if ended and search.state in ("queued", "searching"):
            search.state = "stopped"
            self._tell(search)

    async def _fail(self, reason: str) -> None:
        """End the search after its process has failed: the job goes on with the best plan that it has."""
        await self.close()
        search = self._searches[self._job]
        search.state = "failed"
        self._log(search, f"the search for a better plan has failed: {reason}", {})
        self._tell(search)

    # ---- the child ----

    async def _start(self) -> None:
        search = next((each for each in self._searches.values() if each.state == "queued"), None)
        if search is None:
            return
        wanted = search.wanted
        request = self._request(wanted)
        if request is None:
            return
        self._job, search.state = wanted.job, "searching"
        self._child = Child(self._server, "search", threads=1)
        await self._child.start()
        header, trace, average = request
        buffers = [trace, average, search.rows if search.number else wanted.rows]
        buffers.append(search.order if search.number else wanted.order)
        self._child.queue(FrameType.SEARCH, wanted.job, header=header, buffers=buffers)
        self._until = time.monotonic() + wanted.seconds + PATIENCE
        self._tell(search)

    def _request(self, wanted: Wanted) -> tuple[dict[str, Any], bytes, bytes] | None:
        """Return the header of SEARCH, the trace and its latencies now, or None if the job is ending."""
        sql = """
            SELECT t.traces[1] AS trace, l.average, j.seed, p.profile::text AS profile
            FROM tensile.traces t JOIN tensile.jobs j ON j.id = t.job
                 JOIN tensile.device_profiles p ON p.device = t.device
                 LEFT JOIN tensile.latencies l ON l.job = t.job
            WHERE t.job = $1 AND t.captured_at::text = $2
        """
        found = self._server.rows(sql, ["int8", "text"], wanted.job, wanted.captured)
        events, processes = (self._server.number(f"pg_tensile.{name}") for name in ("plan_events", "search_processes"))
        self._server.commit()
        if not found:
            return None
        header = {
            "profile": json.loads(found[0]["profile"]),
            "link_share": wanted.link_share,
            "budget_bytes": wanted.budget_bytes,
            "seconds": wanted.seconds,
            "seed": (found[0]["seed"] or 0) & ((1 << 63) - 1),
            "processes": processes,
            "host_bytes": wanted.host_bytes,
            "plan_events": events,
        }
        return header, found[0]["trace"], array("f", found[0]["average"] or []).tobytes()

    async def _listen(self) -> None:
        while self._child is not None:
            if time.monotonic() > self._until:
                raise ChildDied(f"it found no end within {PATIENCE:.0f} s of its time and was killed", None)
            frame = await self._child.receive(0)
            if frame is None:
                return
            await self._hear(frame)

    async def _hear(self, frame: Frame) -> None:
        if frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        if frame.type != FrameType.FOUND or frame.job != self._job:
            raise Failure("08P01", f"the search sent an unexpected {frame.type.name} frame")
        header, (rows, order) = frame.header, map(bytes, frame.buffers)
        search = self._searches[self._job]
        search.best_us, search.generation, search.evaluations = (
            header[name] for name in ("iteration_us", "generation", "evaluations")
        )
        search.wanted = search.wanted._replace(iteration_us=header["first_us"])
        if header["worth"]:
            self._take(search, rows, order, search.best_us or 0.0, search.generation, search.evaluations)
        if header["done"]:
            await self._finish(search, rows, order, header["device_peak_bytes"])
        self._tell(search)

    async def _finish(self, search: Search, rows: bytes, order: bytes, peak_bytes: int) -> None:
        await self.close()
        wanted, search.state = search.wanted, "finished"
        self._server.call(
            "tensile._search_result(int8,int8,int8,bytea,bytea,float8,float8,int4)",
            *(wanted.job, wanted.budget_bytes, peak_bytes, rows, order),
            *(search.best_us, wanted.seconds, search.generation),
        )
        details = {"first_us": wanted.iteration_us, "best_us": search.best_us, "generation": search.generation}
        details |= {"evaluations": search.evaluations, "budget_bytes": wanted.budget_bytes, "seconds": wanted.seconds}
        self._log(search, "the search for a better plan has ended", details)

    # ---- reporting ----

    def _tell(self, search: Search) -> None:
        wanted = search.wanted
        self._server.call(
            "tensile._search(int8,text,int8,float8,bool,float8,float8,int4,int8)",
            *(wanted.job, search.state, wanted.budget_bytes, wanted.seconds, search.cached, wanted.iteration_us),
            *(search.best_us, search.generation, search.evaluations),
        )
        self._server.commit()

    def _log(self, search: Search, reason: str, details: dict[str, Any]) -> None:
        signature = "tensile._log(text,int8,int8,text,text,jsonb)"
        self._server.call(signature, "search", search.wanted.job, None, search.wanted.device, reason, details)


def bucket(nbytes: int) -> int:
    """Round down to one of 32 steps between two powers of two.

    So searches and their results treat nearly equal memory as equal.
    """
    step = 1 << max(0, nbytes.bit_length() - 6)
    return nbytes // step * step
