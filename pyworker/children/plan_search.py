"""The search process: looks for a better plan of one job while that trains.

Its supervisor is the scheduler (supervisors/scheduling/plan_searches.py), which ends it when the job has no use for it
any more. The frames (docs/internals.md):

- PLAN_SEARCH: `policy` (swapadvisor or joint: each searches in its own way), `profile` (its fields), `link_share`,
  `budget_bytes`, `seconds`, `seed`, `processes` (0: one for each core), `host_bytes`, `plan_events` → the trace,
  float32[operators] latencies now (µs; may be empty), rows and order of the plan that the job has.
- FOUND, the best plan so far, at most one every INTERVAL_S: `first_us` (of the plan that the job has), `iteration_us`,
  `device_peak_bytes`, `generation`, `evaluations`, `worth` (whether it is better by GAIN than the last one that was
  worth it, or than the first, so that the job should change to it), `done` → its rows and its order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.plan import EVENT_ROW, ORDER, Plan
from pg_tensile.planning.policies.joint.plan_search import PlanSearch
from pg_tensile.planning.policies.swapadvisor.plan_search import Found, search_plan
from pg_tensile.planning.scheduling.keeping import GAIN
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType, ProtocolError

INTERVAL_S = 0.5  # between two frames


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: one search."""
    frame = connection.recv()
    assert frame is not None  # no time-out
    if frame.type != FrameType.PLAN_SEARCH:
        raise ProtocolError(f"unexpected {frame.type.name} frame")
    request, trace = frame.header, timed(frame)
    start = Plan.from_rows(bytes(frame.buffers[2]), order=bytes(frame.buffers[3]))
    profile = _profile(request["profile"], request["link_share"])
    (before,) = simulate([SimulatedJob(trace, start)], profile)
    reporter = Reporter(connection, frame.job, trace, before.iteration_us)
    first = Found(start, before.iteration_us, before.device_peak_bytes, 0, 1, 0.0)
    with reporter:
        searching = _search_joint if request["policy"] == "joint" else _search_swapadvisor
        best = searching(request, trace, profile, first, reporter)
    reporter.report(best, done=True)
    connection.recv()  # waits until the scheduler ends the process


def _search_swapadvisor(
    request: Mapping[str, Any], trace: Trace, profile: DeviceProfile, first: Found, reporter: Reporter
) -> Found:
    order_rows = -(-trace.operator_count * ORDER.itemsize // EVENT_ROW.itemsize)
    return search_plan(
        trace,
        profile,
        request["budget_bytes"],
        seconds=request["seconds"],
        seed=request["seed"],
        processes=request["processes"] or None,
        start=first.plan,
        host_bytes=request["host_bytes"],
        most_events=max(0, request["plan_events"] - order_rows),
        found=reporter.keep,
    )


def _search_joint(
    request: Mapping[str, Any], trace: Trace, profile: DeviceProfile, first: Found, reporter: Reporter
) -> Found:
    """Search as the policy joint does, in one process."""
    began, best = time.monotonic(), first
    planner = JobPlanner(trace, profile, most_events=request["plan_events"])

    def keep(candidate: Candidate) -> None:
        nonlocal best
        fits = candidate.device_peak_bytes <= request["budget_bytes"]
        if fits and candidate.us < best.iteration_us and planner.host_bytes(candidate) <= request["host_bytes"]:
            seconds = time.monotonic() - began
            best = Found(candidate.plan, candidate.us, candidate.device_peak_bytes, 0, joint.evaluations, seconds)
            reporter.keep(best)

    def over() -> bool:
        return time.monotonic() - began > request["seconds"]

    joint = PlanSearch(planner, seed=request["seed"], found=keep, over=over)
    joint.best(request["budget_bytes"])
    return best._replace(evaluations=joint.evaluations)


def timed(frame: Frame) -> Trace:
    """Return the trace of a PLAN_SEARCH frame with the latencies that are known now."""
    trace = Trace.from_bytes(bytes(frame.buffers[0]))
    latency_us = np.frombuffer(frame.buffers[1], "<f4").astype(np.float64)
    if len(latency_us) != trace.operator_count:
        return trace
    measured = np.isfinite(latency_us) & (latency_us >= 0)
    return trace.with_latencies(np.where(measured, latency_us, trace.latency_us))


def _profile(given: dict[str, Any], share: float) -> DeviceProfile:
    """Return the device's profile with the share of the link that the job has."""
    return DeviceProfile.from_json(given).with_share(share)


class Reporter:
    """Sends the best plan so far every INTERVAL_S, if there is a new one.

    It uses a thread of its own, because the search calls `keep` only now and then.
    """

    def __init__(self, connection: Connection, job: int, trace: Trace, first_us: float) -> None:
        self._connection = connection
        self._job = job
        self._trace = trace
        self._first_us = self._worth_us = first_us
        self._newest: Found | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def keep(self, best: Found) -> None:
        self._newest = best

    def _repeat(self) -> None:
        reported: Found | None = None
        while not self._over.wait(INTERVAL_S):
            newest = self._newest
            if newest is not None and newest is not reported:
                self.report(newest)
                reported = newest

    def report(self, best: Found, done: bool = False) -> None:
        worth = best.iteration_us < (1 - GAIN) * self._worth_us
        if worth:
            self._worth_us = best.iteration_us
        header = {
            "first_us": self._first_us,
            "iteration_us": best.iteration_us,
            "device_peak_bytes": best.device_peak_bytes,
            "generation": best.generation,
            "evaluations": best.evaluations,
            "worth": worth,
            "done": done,
        }
        plan = best.plan.with_bytes(self._trace)
        self._connection.send(FrameType.FOUND, self._job, header=header, buffers=[plan.rows, plan.order_bytes])
