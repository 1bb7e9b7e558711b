"""The planner process, over its socket: what it is told, what it answers, and what it does without."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import model_bytes
from pg_tensile.planning.memory_flow.groups import bytes_to_groups
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Trace
from pyworker.child import FD_VARIABLE, PARENT_VARIABLE
from pyworker.connection import Connection
from pyworker.version import VERSION
from pyworker.wire import Frame, FrameType
from tests.repository import REPOSITORY
from tests.unit.handmade import network
from tests.unit.slowed import slowed_by_load


class Process:
    """A planner and the scheduler's end of its socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            FD_VARIABLE: str(theirs.fileno()),
            PARENT_VARIABLE: str(os.getpid()),
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pyworker", "planner"],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.DEVNULL,
            )
        self.connection = Connection(ours)
        assert self.receive().type == FrameType.HELLO
        self.connection.send(FrameType.HELLO, header={"version": VERSION})

    def receive(self) -> Frame:
        frame = self.connection.recv(30)
        assert frame is not None, "the planner does not answer"
        return frame

    def trace(self, job: int, data: bytes, device: str = "cpu", load: float | None = None) -> None:
        self.connection.send(FrameType.TRACE, job, header={"device": device, "load": load}, buffers=[data])

    def latency(self, job: int, latency_us: np.ndarray, load: float | None = None) -> None:
        data = latency_us.astype(np.float32).tobytes()
        self.connection.send(FrameType.LATENCY, job, header={"load": load}, buffers=[data])

    def schedule(self, budget: int, *jobs: dict[str, Any], rows: tuple[bytes, ...] = (), **fields: Any) -> Frame:
        self.request(7, budget, *jobs, rows=rows, **fields)
        self.connection.flush()
        frame = self.receive()
        device = fields.get("name", "cpu")
        assert (frame.type, frame.header["request"], frame.header["device"]) == (FrameType.SCHEDULED, 7, device)
        return frame

    def request(
        self,
        number: int,
        budget: int,
        *jobs: dict[str, Any],
        rows: tuple[bytes, ...] = (),
        may_be_brief: bool = False,
        thorough_s: float = 60.0,
        **fields: Any,
    ) -> None:
        device = {"name": "cpu", "profile": asdict(RTX_A6000), "budget_bytes": budget, "inference_bytes": 0}
        device |= {"ending_bytes": 0, "host_bytes": 1 << 40, "most_events": 65536, "ageing_s": 300.0} | fields
        header = {"request": number, "device": device, "jobs": list(jobs)}
        header |= {"may_be_brief": may_be_brief, "thorough_s": thorough_s}
        self.connection.queue(FrameType.SCHEDULE, header=header, buffers=rows)

    def end(self) -> None:
        self.connection.close()
        assert self.process.wait(10) == 1  # as every child whose supervisor has gone, or that was told nonsense


@pytest.fixture
def planner() -> Iterator[Process]:
    process = Process()
    yield process
    process.end()


def job(number: int, least: int, **fields: Any) -> dict[str, Any]:
    header = {"job": number, "traced": True, "least_bytes": least, "operator": "", "policy": "joint", "priority": 0.0}
    header |= {"rank": 0.0, "waited_s": 0.0, "overhead_bytes": 0, "most_bytes": None, "given": None, "stuck": False}
    return header | fields


def decisions(frame: Frame) -> dict[int, str]:
    return {answer["job"]: answer["decision"] for answer in frame.header["jobs"]}


def middle(trace: Trace) -> int:
    return (least_bytes(trace) + footprint(trace).device_peak_bytes) // 2


def test_a_plan_comes_with_its_rows_and_the_memory_of_each_step(planner):
    trace = network(8)
    planner.trace(4, trace.to_bytes())
    frame = planner.schedule(middle(trace), job(4, least_bytes(trace)))
    (answer,) = frame.header["jobs"]
    rows, order, operators, planned, vanilla, groups = frame.buffers
    plan = Plan.from_rows(bytes(rows), order=bytes(order))
    validate(trace, plan)
    assert len(plan) > 0 and plan == plan.with_bytes(trace) and len(groups) == 0
    memory = footprint(trace, plan)
    assert answer["planned_bytes"] == memory.device_peak_bytes <= answer["granted_bytes"] <= middle(trace)
    assert np.frombuffer(operators, np.int32).tolist() == memory.steps.tolist()
    assert np.frombuffer(planned, np.int64).max() == answer["planned_bytes"]
    assert np.frombuffer(vanilla, np.int64).max() == footprint(trace).device_peak_bytes
    assert answer["iteration_us"] >= answer["vanilla_us"] == pytest.approx(frame.header["totals_us"]["4"])
    assert frame.header["seconds"] > 0


def test_memory_that_flows_comes_with_groups_and_is_kept(planner):
    layers = [1 << 20] * 4 + [8 << 20] + [1 << 20] * 4
    trace = network(9, layers, latency_us=5000.0)  # only the layer in the middle needs most of the memory
    device = {"memory_flow": True, "profile": asdict(replace(RTX_A6000.with_link(1e8), kind="host"))}
    budget = round(1.4 * footprint(trace).device_peak_bytes)
    for number in (4, 5):
        planner.trace(number, trace.to_bytes())
    jobs = [job(number, least_bytes(trace)) for number in (4, 5)]
    frame = planner.schedule(budget, *jobs, **device)
    assert decisions(frame) == {4: "planned", 5: "planned"}
    plans = [tuple(map(bytes, frame.buffers[first : first + 6])) for first in (0, 6)]
    known: list[bytes] = []
    for each, answer, plan in zip(jobs, frame.header["jobs"], plans, strict=True):
        groups = bytes_to_groups(plan[5])
        assert max(group.most_bytes for group in groups) == answer["granted_bytes"] > budget / 2
        assert "groups" not in answer
        fields = {name: answer[name] for name in ("granted_bytes", "link_share")}
        each["given"] = fields | {"known": True, "flows": True}
        known += [plan[0], plan[1], plan[5]]
    assert decisions(planner.schedule(budget, *jobs, rows=tuple(known), **device)) == {4: "kept", 5: "kept"}
    jobs[0]["given"]["known"] = False
    frame = planner.schedule(budget, *jobs, rows=tuple(known[3:]), **device)
    assert decisions(frame) == {4: "planned", 5: "kept"}
    frame = planner.schedule(budget, *jobs, rows=tuple(known[3:]), **device | {"memory_flow": False})
    assert decisions(frame) == {4: "planned", 5: "planned"} and not len(frame.buffers[5]) + len(frame.buffers[11])


def two_long_jobs(planner: Process) -> tuple[int, list[dict[str, Any]]]:
    """Send two traces for which many passes take long; return a budget for both, and the jobs."""
    trace = network(160)
    for number in (4, 5):
        planner.trace(number, trace.to_bytes())
    return 2 * middle(trace), [job(number, least_bytes(trace)) for number in (4, 5)]


def test_memory_is_divided_in_few_passes_if_that_is_wanted_and_traces_are_long(planner):
    budget, jobs = two_long_jobs(planner)
    frame = planner.schedule(budget, *jobs, may_be_brief=True)
    assert frame.header["brief"] and decisions(frame) == {4: "planned", 5: "planned"}
    assert sum(answer["granted_bytes"] for answer in frame.header["jobs"]) <= budget
    short = network(8)
    planner.trace(4, short.to_bytes())
    frame = planner.schedule(middle(short), job(4, least_bytes(short)), may_be_brief=True)
    assert not frame.header["brief"] and decisions(frame) == {4: "planned"}


def test_many_passes_are_abandoned_for_the_next_request(planner):
    budget, jobs = two_long_jobs(planner)
    planner.request(7, budget, *jobs)
    planner.request(8, budget, *jobs, may_be_brief=True)
    planner.request(9, budget, *jobs, may_be_brief=True)
    planner.connection.flush()
    answers = [planner.receive().header for _ in range(3)]
    assert [answer["request"] for answer in answers] == [7, 8, 9]
    assert answers[0] == {"request": 7, "device": "cpu", "abandoned": "newer"}
    assert all(answer["brief"] for answer in answers[1:])  # what is brief is never abandoned


def test_many_passes_are_abandoned_when_time_is_up(planner):
    budget, jobs = two_long_jobs(planner)
    planner.request(7, budget, *jobs, thorough_s=0.0)
    planner.connection.flush()
    assert planner.receive().header == {"request": 7, "device": "cpu", "abandoned": "time"}


@pytest.mark.long
def test_thorough_requests_of_two_devices_do_not_replace_each_other(planner):
    """If they did, none would ever be answered. A brief one of another device does. Plans are made thoroughly."""
    budget, jobs = two_long_jobs(planner)
    trace = network(8)
    planner.trace(6, trace.to_bytes(), device="other")
    other = job(6, least_bytes(trace))
    planner.request(7, budget, *jobs, thorough_s=2.0)
    planner.request(8, middle(trace), other, name="other")
    planner.connection.flush()
    answers = [planner.receive().header for _ in range(2)]
    assert [answer["request"] for answer in answers] == [7, 8]
    assert answers[0].get("abandoned") != "newer" and "abandoned" not in answers[1]
    planner.request(9, budget, *jobs)
    planner.request(10, middle(trace), other, name="other", may_be_brief=True)
    planner.connection.flush()
    answers = [planner.receive().header for _ in range(2)]
    assert answers[0].get("abandoned") == "newer" and answers[1]["request"] == 10


def test_what_was_given_is_kept_and_newer_latencies_count(planner):
    trace = network(16, latency_us=10.0)
    planner.trace(4, trace.to_bytes())
    frame = planner.schedule(middle(trace), job(4, least_bytes(trace)))
    (answer,) = frame.header["jobs"]
    rows = bytes(frame.buffers[0])
    given = {"known": True, "granted_bytes": answer["granted_bytes"], "link_share": answer["link_share"]}
    given["flows"] = False
    running = job(4, least_bytes(trace), given=given)
    assert decisions(planner.schedule(middle(trace), running, rows=(rows, b"", b""))) == {4: "kept"}
    slower = (trace.latency_us * 100).astype(np.float32)
    slower[3] = np.nan  # not measured: as it was
    planner.latency(4, slower)
    planner.latency(4, slower[1:])  # of another trace: no matter
    frame = planner.schedule(middle(trace), running, rows=(rows, b"", b""))
    assert decisions(frame) == {4: "planned"}
    expected = np.nansum(slower) + trace.latency_us[3]
    assert frame.header["totals_us"]["4"] == pytest.approx(expected, rel=1e-4)


def test_jobs_are_planned_for_the_load_that_the_device_has_now(planner):
    """By the models, load makes latencies longer: predicted ones, and measured ones unless measured under that load."""
    trace = network(8)
    models = slowed_by_load(trace, RTX_A6000)
    trace = trace.with_latencies(models.predict(trace, RTX_A6000, 0.0))

    def total_us(load: float | None, *rows: bytes, **device: Any) -> float:
        frame = planner.schedule(1 << 40, job(4, least_bytes(trace), load=load), rows=rows, **device)
        return float(frame.header["totals_us"]["4"])

    alone, loaded = (models.predict(trace, RTX_A6000, load).sum() for load in (0.0, 1.0))
    assert loaded > 1.2 * alone
    planner.trace(4, trace.to_bytes(), load=0.0)
    assert total_us(1.0) == pytest.approx(alone)  # no models yet
    data = model_bytes.encode(models)
    assert total_us(1.0, data, latency_models=True) == pytest.approx(loaded)
    assert total_us(0.04) == total_us(None) == pytest.approx(alone)
    planner.latency(4, 10 * trace.latency_us, 0.0)
    assert total_us(1.0) == pytest.approx(10 * loaded, rel=1e-4)
    planner.latency(4, 3 * trace.latency_us, 0.95)
    assert total_us(1.0) == pytest.approx(3 * alone, rel=1e-4)
    assert total_us(1.0, data[:-5], latency_models=True) == pytest.approx(3 * alone, rel=1e-4)
    planner.latency(4, trace.latency_us, 0.0)
    assert total_us(1.0) == pytest.approx(alone, rel=1e-4)  # the models were damaged


def test_a_damaged_trace_concerns_its_job_alone(planner):
    trace = network(4)
    data = trace.to_bytes()
    planner.trace(1, data[:-7])
    planner.trace(2, data)
    given = {"known": False, "granted_bytes": 100, "link_share": 1.0}
    whole = footprint(trace).device_peak_bytes
    jobs = [job(1, 10, given=given), job(2, least_bytes(trace)), job(3, 10)]
    frame = planner.schedule(whole + 100, *jobs)
    assert decisions(frame) == {1: "failed", 2: "planned", 3: "failed"}
    reasons = {answer["job"]: answer.get("reason", "") for answer in frame.header["jobs"]}
    assert "cannot be read" in reasons[1] and "has not come" in reasons[3]
    (answer,) = (answer for answer in frame.header["jobs"] if answer["job"] == 2)
    assert answer["granted_bytes"] == whole  # what job 1 was given stays with it


@pytest.mark.parametrize(
    "profile",
    [None, [], "A6000", {}, asdict(RTX_A6000) | {"memory_bytes": "many"}, asdict(RTX_A6000) | {"more": 1},
     asdict(RTX_A6000) | {"in_bytes_per_s": 0}],
)  # fmt: skip
def test_a_damaged_profile_fails_the_jobs_of_its_device_alone(planner, profile):
    trace = network(4)
    planner.trace(1, trace.to_bytes())
    frame = planner.schedule(1 << 30, job(1, least_bytes(trace)), profile=profile)
    assert decisions(frame) == {1: "failed"}
    assert "profile of the device cannot be used" in frame.header["jobs"][0]["reason"]
    frame = planner.schedule(1 << 30, job(1, least_bytes(trace)))
    assert decisions(frame) == {1: "planned"}


@pytest.mark.parametrize(
    "times", ["", "[]", "{}", '{"version": 1, "models": [1]}', '{"version": 1, "models": {}, "a": 1}']
)
def test_damaged_times_of_codecs_are_as_if_codecs_had_not_been_measured(planner, times):
    trace = network(4)
    planner.trace(1, trace.to_bytes())
    frame = planner.schedule(1 << 30, job(1, least_bytes(trace)), codec_times=times)
    assert decisions(frame) == {1: "planned"}


def test_an_eager_job_needs_no_trace(planner):
    frame = planner.schedule(1000, job(5, 600, traced=False, policy="none"), job(6, 600, traced=False, policy="none"))
    assert decisions(frame) == {5: "planned", 6: "waits"}
    assert [len(buffer) for buffer in frame.buffers] == [0, 0, 0, 0, 0, 0]


def test_traces_of_jobs_that_ended_are_forgotten_but_not_those_of_other_devices(planner):
    trace = network(4)
    whole = footprint(trace).device_peak_bytes
    planner.trace(1, trace.to_bytes())
    planner.trace(2, trace.to_bytes(), device="cuda:0")
    planner.schedule(whole)
    assert decisions(planner.schedule(whole, job(1, 10))) == {1: "failed"}
    assert decisions(planner.schedule(whole, job(2, 10), name="cuda:0")) == {2: "planned"}


def test_it_does_without_torch(planner):
    planner.schedule(1000)  # everything is imported by now
    maps = Path(f"/proc/{planner.process.pid}/maps").read_text()
    assert "numpy" in maps and "torch" not in maps


def test_what_makes_no_sense_ends_it_with_an_error(planner):
    planner.connection.send(FrameType.ROWS)
    frame = planner.receive()
    assert (frame.type, frame.header["sqlstate"]) == (FrameType.ERROR, "08P01")
