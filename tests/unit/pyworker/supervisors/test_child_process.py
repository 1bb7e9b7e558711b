"""A supervisor's child without a server: how its end is waited for, and how much output is kept."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from pyworker import child
from pyworker.supervisors import child_process, processes
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import CancelRequest, ChildDied
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Request, Wait
from tests.unit.pyworker.supervisors.plpy import Plpy

NOTHING = Wait(0)


def drive(coroutine: Coroutine[Request, Wait, Any], bits: Wait = NOTHING) -> Any:
    """The coroutine's result; every wait ends with these bits besides its own."""
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as end:
            return end.value
        answer = bits | wait_for(request)


def wait_for(request: Request) -> Wait:
    """Wait as a coroutine of a supervisor asks, and return the answer."""
    assert request.timeout_ms is not None
    files = [request.fd] if request.fd >= 0 else []
    readable, _, _ = select.select(files, [], [], request.timeout_ms / 1000)
    return Wait.READABLE if readable else Wait.TIMEOUT


@pytest.fixture
def planner() -> Iterator[Child]:
    """A child that has started; the planner needs no torch."""
    started = Child(Server(Plpy()), "planner", threads=1)
    drive(started.start())
    yield started
    drive(started.close())


def test_a_child_that_is_killed_is_reaped_and_described(planner: Child) -> None:
    pid = planner.pid
    os.kill(pid, 9)
    with pytest.raises(ChildDied, match="planner was killed by signal 9"):
        while True:
            drive(planner.receive(1))
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in uninterruptible sleep: SIGKILL has no effect, for now."""
    monkeypatch.setattr(processes.SpawnedProcess, "kill", lambda self: None)
    monkeypatch.setattr(child_process, "KILL_LIMIT", 0.3)


def test_a_child_that_cannot_be_killed_does_not_keep_its_supervisor(
    planner: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, server = planner.pid, planner._server
    with monkeypatch.context() as patch:
        stuck(patch)
        drive(planner.close())
    assert server.plpy.lines == [f"pg_tensile: the planner (PID {pid}) does not end: SIGKILL has had no effect"]
    os.kill(pid, 9)
    until(child_process.unreaped[0].has_exited)
    drive(planner.start())  # the next one reaps it
    assert child_process.unreaped == []
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_dying_child_that_cannot_be_killed_is_given_up(planner: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = planner.pid
    with monkeypatch.context() as patch:
        stuck(patch)
        patch.setattr(child_process, "EXIT_LIMIT", 0.1)
        death = drive(planner._death())
    assert str(death) == "planner closed its connection and had to be killed"
    os.kill(pid, 9)
    until(lambda: child_process.unreaped[0].reap() == -9)
    child_process.unreaped.clear()


def test_what_a_cancel_or_a_drop_ends_is_closed_all_the_same(planner: Child) -> None:
    pid = planner.pid
    drive(planner.close(), Wait.CANCEL | Wait.GONE | Wait.STOP)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


CHATTER = """
import os, threading, time
from pyworker import child
threading.Thread(target=child._keep_output_short, daemon=True).start()
for _ in range(5):
    os.write(1, b"x" * child.LOG_LIMIT)
os.write(2, b".")
time.sleep(600)
"""


def test_a_childs_output_is_cut_while_nobody_listens() -> None:
    log = os.memfd_create(child.LOG_NAME)
    fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
    process = subprocess.Popen([sys.executable, "-c", CHATTER], stdout=log, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None and process.stderr.read(1) == b"."
        until(lambda: os.fstat(log).st_size <= child.LOG_LIMIT)
    finally:
        process.kill()
        process.communicate()
        os.close(log)


def test_a_child_that_is_heard_all_the_time_does_not_keep_its_supervisor_from_waiting(
    planner: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a busy child would keep it from hearing of cancel and stop."""
    monkeypatch.setattr(planner, "_poll", lambda: "a frame")
    planner._server.resumed_at = time.monotonic() - child_process.BUSY_LIMIT - 1
    waiting = planner.receive(1)
    assert waiting.send(None).timeout_ms == 0
    with pytest.raises(CancelRequest):
        waiting.send(Wait.CANCEL)
