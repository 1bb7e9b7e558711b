"""The driver of a job with ranks: the job's process on the server's machine, which trains nothing itself.

It has received and preprocessed the rows. It connects to the Ray cluster, reserves processors, stores the rows there
once, and starts a rank on each. From then on it passes frames on: rank 0's to the supervisor, as if this process had
sent them, and the supervisor's to the ranks. Progress is that of all ranks.

A rank that dies or fails ends the attempt, and all ranks with it: the next attempt forms a new group.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, NamedTuple

from pyworker.children.channel import Channel, Stopped
from pyworker.children.prepared import Begun
from pyworker.ranks import cluster
from pyworker.ranks.cluster import Access
from pyworker.ranks.errors import RankLostError, RayConnectionError
from pyworker.ranks.frame_queue import Sent
from pyworker.ranks.rank import Group, RankActor
from pyworker.wire import FrameType

POLL_S = 0.2  # that a rank waits for a frame, and that the driver waits for a rank
REPORT_INTERVAL_S = 0.5
THREADS = 4  # of an actor: for `frames`, which waits, and for what comes meanwhile
STOP_S = 5.0  # for a last checkpoint, after which ranks are killed
CAUSE_S = 2.0  # to learn from the other ranks why a group has failed
OF_RANK_0 = (
    *(FrameType.TRACE, FrameType.LATENCY, FrameType.SPARSITY, FrameType.METRICS, FrameType.STATE, FrameType.VERSION),
    *(FrameType.SETTINGS, FrameType.CHOICE),
)
TO_ALL = (FrameType.PLAN, FrameType.STOP)


class Member(NamedTuple):
    """A rank as the driver sees it: its actor, the address of its node, and the last that it has told."""

    actor: Any
    node: str
    report: dict[str, Any]


class Driver:
    """Trains one job by `ranks` (least and most) on the cluster."""

    def __init__(self, channel: Channel, begun: Begun) -> None:
        self._channel = channel
        self._begun = begun
        spec = channel.spec
        self._least, self._most = spec["ranks"]
        self._access = Access(**spec["ray"])
        self._warnings = list(begun.warnings)
        self._members: list[Member] = []
        self._polls: dict[Future[list[Sent]], int] = {}  # ranks by their next frames
        self._ended: dict[int, dict[str, Any]] = {}  # headers of DONE, by rank
        self._failed: dict[int, dict[str, Any]] = {}  # headers of ERROR, by rank
        self._lost: dict[int, str] = {}  # reasons of deaths, by rank
        self._reported_at = 0.0

    def run(self) -> None:
        """Train, and send the supervisor what a job's process sends. Raises the errors of cluster.py, RankLostError."""
        self._warnings += cluster.connect(self._access, self._alive)
        placed = None
        try:
            threads = self._begun.spec["options"].get("threads") or 1
            bundle = cluster.bundle_of(self._begun.spec["device"], threads)
            start = partial(self._start, bundle)
            placed = cluster.place(start, bundle, self._least, self._most, self._access.timeout_s, self._wait)
            self._begin(placed.actors, bundle, threads)
            self._relay()
        except ConnectionError as error:
            message = f"the connection to the Ray cluster at {self._access.target} is lost"
            raise RayConnectionError(message, detail=str(error)) from error
        finally:
            self._close(placed)

    # ---- start and end ----

    def _start(self, bundle: dict[str, float], group: Any, rank: int) -> Any:
        """Return the actor of a rank, which starts as soon as the placement group has its processors."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor: Any = ray.remote(RankActor)
        return actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        ).remote(rank)

    def _begin(self, actors: list[Any], bundle: dict[str, float], threads: int) -> None:
        """Have the ranks begin to train."""
        import ray

        self._report("building", {})
        asked = [actor.node.remote() for actor in actors], [actor.load.remote() for actor in actors]
        begun = ray.put(self._begun._replace(spec=self._spec(len(actors), bundle, threads)))  # while they start
        nodes, _ = map(self._get, asked)
        ((host, port),) = self._get([actors[0].open.remote(len(actors))])
        group = Group(len(actors), host, port, self._access.timeout_s)
        self._members = [
            Member(actor, node, {"rank": rank, "node": node, "device": "", "state": "starting", "step": None})
            for rank, (actor, node) in enumerate(zip(actors, nodes, strict=True))
        ]
        self._get([actor.start.remote(group, begun) for actor in actors])
        for rank in range(len(actors)):
            self._poll(rank)

    def _spec(self, ranks: int, bundle: dict[str, float], threads: int) -> dict[str, Any]:
        """Return the job's spec for its ranks: what is known of this machine's devices is not for theirs."""
        own = {"world_size": ranks, "threads": threads, "device": "cuda" if "GPU" in bundle else "cpu"}
        return self._begun.spec | own | {"profiles": {}, "codecs": {}, "overheads": [], "ranks": None, "ray": None}

    def _get(self, references: list[Any]) -> list[Any]:
        """Return the values of the references. Raises RankLostError if a rank dies meanwhile."""
        import ray

        futures = [reference.future() for reference in references]
        try:
            while wait(futures, timeout=POLL_S).not_done:
                self._alive()
            return [future.result() for future in futures]
        except ray.exceptions.RayActorError as error:
            raise RankLostError(f"a rank has died before it began: {_first_line(error)}", detail=str(error)) from error

    def _close(self, placed: cluster.Placed | None) -> None:
        """End the ranks, and give their processors back."""
        try:
            if placed is not None:
                cluster.release(placed)
            cluster.disconnect()
        except Exception as error:  # the cluster ends them itself when this process is gone
            print(f"the ranks' processors were not given back: {error!r}")

    # ---- frames ----

    def _relay(self) -> None:
        """Pass frames on until all ranks have ended, one has failed, or the job was stopped."""
        stop_at = None
        while not self._over():
            try:
                self._relay_down()
            except Stopped as stop:
                if stop_at is None:
                    self._deliver(range(len(self._members)), Sent(FrameType.STOP, {"checkpoint": stop.checkpoint}, []))
                    stop_at = time.monotonic() + STOP_S
            self._relay_up()
            if stop_at is not None and time.monotonic() > stop_at:
                break
            self._report_ranks()
        if stop_at is None and (self._failed or self._lost):
            self._fail()
            return
        stopped = stop_at is not None and not (self._finished() and not self._ended[0]["stopped"])
        warnings = [*self._warnings, *(self._ended.get(0, {}).get("warnings") or [])]
        self._channel.send(FrameType.DONE, {"stopped": True} if stopped else {"stopped": False, "warnings": warnings})

    def _finished(self) -> bool:
        return len(self._ended) == len(self._members)

    def _over(self) -> bool:
        return bool(self._failed or self._lost) or self._finished()

    def _relay_down(self) -> None:
        """Pass on what the supervisor has sent. Raises Stopped."""
        while (frame := self._channel.poll_any()) is not None:
            everyone = range(len(self._members)) if frame.type in TO_ALL else (0,)
            self._deliver(everyone, Sent(frame.type, frame.header, [bytes(buffer) for buffer in frame.buffers]))

    def _deliver(self, ranks: Any, sent: Sent) -> None:
        for rank in ranks:
            self._members[rank].actor.deliver.remote(sent)

    def _relay_up(self) -> None:
        """Pass on what ranks have sent; wait POLL_S for the first of it."""
        import ray

        for future in wait(self._polls, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
            rank = self._polls.pop(future)
            try:
                frames = future.result()
            except ray.exceptions.RayError as error:
                self._lost[rank] = _first_line(error)
                continue
            for sent in frames:
                self._handle(rank, sent)
            if rank not in self._ended and rank not in self._failed:
                self._poll(rank)

    def _poll(self, rank: int) -> None:
        self._polls[self._members[rank].actor.frames.remote(POLL_S).future()] = rank

    def _handle(self, rank: int, sent: Sent) -> None:
        match sent.type:
            case FrameType.DONE:
                self._ended[rank] = sent.header
            case FrameType.ERROR:
                self._failed[rank] = sent.header
            case FrameType.PROGRESS:
                self._keep_report(rank, sent.header)
                if rank == 0:
                    self._channel.send(FrameType.PROGRESS, sent.header | self._progress())
            case type if rank == 0 and type in OF_RANK_0:
                self._channel.send(FrameType(type), sent.header, sent.buffers)

    # ---- progress ----

    def _alive(self) -> None:
        """Give a sign of life during lengthy work before the ranks have begun. Raises Stopped."""
        self._channel.poll_early("building")

    def _wait(self, what: str) -> None:
        """Report what the job waits for. Raises Stopped."""
        self._report("waiting", {"waits_for": what})
        self._channel.poll(())

    def _report(self, phase: str, fields: dict[str, Any]) -> None:
        self._channel.send(FrameType.PROGRESS, {"phase": phase, **fields})

    def _keep_report(self, rank: int, header: dict[str, Any]) -> None:
        report = self._members[rank].report
        report["state"] = header.get("phase") or report["state"]
        for key in ("device", "step", "samples_per_s", "device_bytes"):
            if header.get(key) is not None:
                report[key] = header[key]

    def _progress(self) -> dict[str, Any]:
        """Return the fields of PROGRESS that all ranks have part in."""
        rates = [member.report.get("samples_per_s") for member in self._members]
        known = [rate for rate in rates if rate is not None]
        self._reported_at = time.monotonic()
        return {"ranks": [member.report for member in self._members]} | ({"samples_per_s": sum(known)} if known else {})

    def _report_ranks(self) -> None:
        """Report the ranks from time to time, whatever rank 0 does."""
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._channel.send(FrameType.PROGRESS, self._progress())

    # ---- failures ----

    def _fail(self) -> None:
        """Report why the group has failed: what a rank has met itself, and not that it has lost the others."""
        deadline = time.monotonic() + CAUSE_S
        while self._polls and not (self._lost or self._causes()) and time.monotonic() < deadline:
            self._relay_up()
        if self._lost:
            rank, reason = min(self._lost.items())
            raise RankLostError(f"rank {rank} on {self._members[rank].node} has died: {reason}")
        for rank, header in sorted(self._causes().items()):
            where = {} if rank == 0 else {"detail": _joined(header.get("detail"), f"It happened on rank {rank}.")}
            self._channel.send(FrameType.ERROR, {key: value for key, value in header.items() if key != "lost"} | where)
            return
        rank, header = min(self._failed.items())
        raise RankLostError(f"rank {rank} on {self._members[rank].node} has lost the others: {header['message']}")

    def _causes(self) -> dict[int, dict[str, Any]]:
        return {rank: header for rank, header in self._failed.items() if not header.get("lost")}


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _joined(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)
