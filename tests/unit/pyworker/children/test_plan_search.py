"""The search process, over its socket: what it is told, and what it finds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.scheduling.keeping import GAIN
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pyworker.child import FD_VARIABLE, PARENT_VARIABLE
from pyworker.connection import Connection
from pyworker.supervisors.scheduling.plan_searches import memory_bucket
from pyworker.version import VERSION
from pyworker.wire import Frame, FrameType
from tests.repository import REPOSITORY
from tests.unit.handmade import network
from tests.unit.planning.scheduling.test_scheduling import MIB, branches


@pytest.fixture
def started() -> Iterator[tuple[Connection, subprocess.Popen[bytes]]]:
    """A search process that waits for its question, in a process group of its own."""
    ours, theirs = socket.socketpair()
    bindings = {FD_VARIABLE: str(theirs.fileno()), PARENT_VARIABLE: str(os.getpid())}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pyworker", "plan_search"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **bindings},
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    connection = Connection(ours)
    assert receive(connection).type == FrameType.HELLO
    connection.send(FrameType.HELLO, header={"version": VERSION})
    yield connection, process
    connection.close()
    assert process.wait(10) in (1, -signal.SIGKILL)  # as every child whose supervisor has gone


@pytest.fixture
def child(started: tuple[Connection, subprocess.Popen[bytes]]) -> Connection:
    return started[0]


def receive(connection: Connection) -> Frame:
    frame = connection.recv(30)
    assert frame is not None, "the search does not answer"
    return frame


def ask(child: Connection, trace: Trace, start: Plan, latency_us: Any = (), share: float = 1.0) -> list[Frame]:
    """All that is found."""
    send(child, trace, start, latency_us, share)
    frames = [receive(child)]
    while frames[-1].type == FrameType.FOUND and not frames[-1].header["done"]:
        frames.append(receive(child))
    return frames


def send(child: Connection, trace: Trace, start: Plan, latency_us: Any = (), share: float = 1.0, **fields: Any) -> None:
    header = {
        "policy": "swapadvisor",
        "profile": asdict(RTX_A6000),
        "link_share": share,
        "budget_bytes": 4 * MIB,
        "seconds": 1.0,
        "seed": 5,
    }
    header |= {"processes": 1, "host_bytes": 1 << 40, "plan_events": 1024}
    average = np.asarray(latency_us, "<f4").tobytes()
    buffers = [trace.to_bytes(), average, start.rows, start.order_bytes]
    child.send(FrameType.PLAN_SEARCH, 8, header=header | fields, buffers=buffers)


def test_what_is_found_is_a_better_plan_within_the_memory(child: Connection) -> None:
    trace, _ = branches()
    start = JobPlanner(trace, RTX_A6000, 0.5).within(4 * MIB).plan
    slower = np.where(np.arange(trace.operator_count) == 3, np.nan, trace.latency_us * 2)
    frames = ask(child, trace, start, slower, share=0.5)
    assert {frame.type for frame in frames} == {FrameType.FOUND} and frames[-1].job == 8
    header = frames[-1].header
    timed = trace.with_latencies(np.where(np.isnan(slower), trace.latency_us, slower))
    half = RTX_A6000.with_link(RTX_A6000.out_bytes_per_s / 2, RTX_A6000.in_bytes_per_s / 2, RTX_A6000.duplex_factor)
    before, after = (
        simulate([SimulatedJob(timed, plan)], half)[0].iteration_us for plan in (start, plan_of(frames[-1]))
    )
    assert header["first_us"] == pytest.approx(before) and header["iteration_us"] == pytest.approx(after)
    assert after < (1 - GAIN) * before and any(frame.header["worth"] for frame in frames)
    validate(trace, plan_of(frames[-1]))
    assert footprint(timed, plan_of(frames[-1])).device_peak_bytes == header["device_peak_bytes"] <= 4 * MIB
    assert plan_of(frames[-1]) == plan_of(frames[-1]).with_bytes(trace)


def plan_of(frame: Frame) -> Plan:
    rows, order = frame.buffers
    return Plan.from_rows(bytes(rows), order=bytes(order))


def test_the_policy_joint_searches_in_its_own_way(child: Connection) -> None:
    """The plan of the least memory is slow, and there is room for a faster one."""
    trace = network(12)
    budget = least_bytes(trace) * 3 // 2
    start = swaps(trace, idle_intervals(trace))
    send(child, trace, start, policy="joint", budget_bytes=budget, seconds=30)
    frames = [receive(child)]
    while not frames[-1].header["done"]:
        frames.append(receive(child))
    header, plan = frames[-1].header, plan_of(frames[-1])
    (before,) = simulate([SimulatedJob(trace, start)], RTX_A6000)
    assert header["first_us"] == pytest.approx(before.iteration_us)
    assert header["iteration_us"] <= JobPlanner(trace, RTX_A6000).within(budget).us < before.iteration_us
    assert header["evaluations"] > 0 and header["generation"] == 0
    validate(trace, plan)
    assert footprint(trace, plan).device_peak_bytes == header["device_peak_bytes"] <= budget


def test_a_plan_that_nothing_beats_stays(child: Connection) -> None:
    trace, order = branches()
    frames = ask(child, trace, Plan.build([], order=order))
    assert [frame.header["worth"] for frame in frames] == [False]
    assert plan_of(frames[0]) == Plan.build([], order=order)


def test_what_cannot_be_searched_for_is_an_error(child: Connection) -> None:
    trace, _ = branches(size=8 * MIB)
    (frame,) = ask(child, trace, NO_EVENTS)
    assert frame.type == FrameType.ERROR and frame.header["sqlstate"] == "53200"
    assert f"the budget is {4 * MIB:,}" in frame.header["message"]


def test_processes_that_search_end_with_the_one_that_has_started_them(
    started: tuple[Connection, subprocess.Popen[bytes]],
) -> None:
    child, process = started
    trace = network(16, latency_us=1.0)
    start = JobPlanner(trace, RTX_A6000).within(least_bytes(trace) * 11 // 10).plan
    send(child, trace, start, seconds=600, processes=2, budget_bytes=footprint(trace, start).device_peak_bytes)
    assert receive(child).header["evaluations"] > 0
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # nobody is left in its group
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.02)


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 1), (63, 63), (65, 64), (1000, 992), (1 << 30, 1 << 30)])
def test_memory_is_rounded_down_to_steps(nbytes: int, rounded: int) -> None:
    assert memory_bucket(nbytes) == rounded
    assert memory_bucket(memory_bucket(nbytes)) == rounded > nbytes * 31 / 32 - 1
