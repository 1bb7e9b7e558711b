"""The fork server without a database server: its children live and end like those that a supervisor starts itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyworker import fork_server as served
from pyworker.supervisors import fork_server
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.failures import ChildDied
from pyworker.supervisors.fork_server import ForkServer
from pyworker.supervisors.processes import ForkedProcess, SpawnedProcess
from pyworker.supervisors.server import Server
from pyworker.wire import Frame
from tests.repository import REPOSITORY
from tests.unit.pyworker.supervisors.plpy import Plpy
from tests.unit.pyworker.supervisors.test_child_process import drive, until


class Settings(Plpy):
    """PL/Python with settings that a test may change."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"pg_tensile.python": sys.executable, "pg_tensile.fork_server": "on", "pg_tensile.model_path": ""}

    def execute(self, sql: str, values: Any = ()) -> list[dict[str, Any]]:
        if values and values[0] in self.values:
            return [{"value": self.values[values[0]]}]
        return super().execute(sql, values)


@pytest.fixture
def plpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a server whose data directory is the working directory."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    return Settings()


@pytest.fixture
def controller(plpy: Settings) -> Iterator[ForkServer]:
    """A fork server that has been started, seen from the controller."""
    server = ForkServer(Server(plpy))
    server.ensure()
    yield server
    server.close()
    for process in server._retired:
        process.kill()
        process.wait()


@pytest.fixture
def trainer(plpy: Settings, controller: ForkServer) -> Iterator[Child]:
    """A trainer that waits for its job."""
    started = Child(Server(plpy), "trainer", threads=2, nice=3, forked=True)
    drive(started.start())
    yield started
    drive(started.close())


def start(plpy: Settings) -> type:
    """Start and end a trainer; return the kind of its process."""
    child = Child(Server(plpy), "trainer", threads=1, forked=True)
    try:
        drive(child.start())
        return type(child._process)
    finally:
        drive(child.close())


def process_of(controller: ForkServer) -> subprocess.Popen[bytes]:
    assert controller._process is not None
    return controller._process


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_forked_child_is_one_of_its_supervisors_in_all_that_shows(trainer: Child, controller: ForkServer) -> None:
    pid = trainer.pid
    assert parent(pid) == process_of(controller).pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    assert arguments == [sys.executable, "-m", "pyworker", "trainer", str(os.getpid())]
    assert os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0) == 3
    assert trainer.torch
    # LightGBM starts threads of OpenMP, after which a process must not fork
    assert "lightgbm" not in Path(f"/proc/{pid}/maps").read_text()
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    assert not any("eventpoll" in file for file in files), files  # those of the fork server are closed
    assert sum("socket" in file for file in files) == 1, files  # the connection's, though it has two descriptors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("forked", [True, False])
def test_a_child_that_a_signal_ends_in_its_first_moment_has_been_killed_and_not_proved_unusable(
    plpy: Settings,
    controller: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    forked: bool,
    number: signal.Signals,
) -> None:
    if forked:
        start(plpy)  # the fork server has imported what takes a while
    child = Child(Server(plpy), "trainer", threads=1, forked=forked)
    receive_first = child._first_frame

    async def end_and_receive_first() -> Frame:
        os.kill(child.pid, number)
        return await receive_first()

    monkeypatch.setattr(child, "_first_frame", end_and_receive_first)
    try:
        with pytest.raises(ChildDied, match=f"trainer was killed by signal {number:d} "):
            drive(child.start())
            while True:  # it has sent its first frame before
                drive(child.receive(1))
    finally:
        drive(child.close())


@pytest.mark.parametrize("forked", [True, False])
def test_a_job_has_a_socket_on_which_it_asks_for_memory(plpy: Settings, controller: ForkServer, forked: bool) -> None:
    """Its other end stays open until the child is gone, and no descriptor is inherited by what the child starts."""
    child = Child(Server(plpy), "trainer", threads=1, forked=forked, memory_flow=True)
    try:
        drive(child.start())
        assert type(child._process) is (ForkedProcess if forked else SpawnedProcess)
        files = [os.readlink(file) for file in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert len({file for file in files if "socket" in file}) == 2, files
        groups = child._groups
        assert groups is not None
        with pytest.raises(BlockingIOError):
            groups.recv(1, socket.MSG_DONTWAIT)
        os.kill(child.pid, signal.SIGKILL)
        groups.settimeout(60)
        assert groups.recv(1) == b""
    finally:
        drive(child.close())
    assert child._groups is None


def test_a_forked_child_that_is_killed_is_reaped_and_described(trainer: Child) -> None:
    pid = trainer.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="trainer was killed by signal 9"):
        while True:
            drive(trainer.receive(1))
    until(lambda: is_gone(pid))


def test_the_output_of_a_forked_child_is_its_supervisors(trainer: Child) -> None:
    os.kill(trainer.pid, signal.SIGABRT)
    with pytest.raises(ChildDied, match="signal 6") as death:
        while True:
            drive(trainer.receive(1))
    assert "Fatal Python error: Aborted" in str(death.value.traceback)


def test_a_forked_child_ends_when_it_is_closed(trainer: Child) -> None:
    pid = trainer.pid
    drive(trainer.close())
    until(lambda: is_gone(pid))


SUPERVISOR = """
import sys, time
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.server import Server
from tests.unit.pyworker.supervisors.test_child_process import drive
from tests.unit.pyworker.test_fork_server import Settings
child = Child(Server(Settings()), "trainer", threads=1, forked=True)
drive(child.start())
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_forked_child_dies_with_its_supervisor(controller: ForkServer, stopped: bool) -> None:
    """Even one that does nothing."""
    command = [sys.executable, "-c", SUPERVISOR]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert parent(pid) == process_of(controller).pid
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        supervisor.kill()
    until(lambda: is_gone(pid))


def test_children_die_with_the_fork_server_and_the_next_one_starts_without(
    trainer: Child, controller: ForkServer, plpy: Settings
) -> None:
    pid = trainer.pid
    process_of(controller).kill()
    with pytest.raises(ChildDied, match="trainer was killed by signal 9"):
        while True:
            drive(trainer.receive(1))
    until(lambda: is_gone(pid))
    assert start(plpy) is SpawnedProcess


def test_a_closed_fork_server_ends_with_its_last_child(trainer: Child, controller: ForkServer, plpy: Settings) -> None:
    process = process_of(controller)
    controller.close()
    assert not list(Path("base/pgsql_tmp").iterdir())
    assert start(plpy) is SpawnedProcess  # it takes no more requests
    assert process.poll() is None and not is_gone(trainer.pid)
    drive(trainer.close())
    assert process.wait(60) == 0


def test_without_a_fork_server_a_supervisor_starts_its_child_itself(plpy: Settings) -> None:
    assert start(plpy) is SpawnedProcess


def test_settings_decide_whether_and_with_which_python_children_are_forked(
    controller: ForkServer, plpy: Settings, tmp_path: Path
) -> None:
    assert start(plpy) is ForkedProcess
    plpy.values["pg_tensile.python"] = other = str(tmp_path / "python")
    Path(other).symlink_to(sys.executable)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", tmp_path)
    first = process_of(controller)
    child = Child(Server(plpy), "planner", threads=1, forked=True)
    assert drive(fork_server.fork(child._server, other, "planner", {}, (0, 1))) is None
    controller.ensure()
    assert process_of(controller) is not first and first.wait(60) == 0
    plpy.values["pg_tensile.fork_server"] = "off"
    second = process_of(controller)
    controller.ensure()
    assert controller._process is None
    second.wait(60)


def test_a_fork_server_that_does_not_answer_is_done_without(
    controller: ForkServer, plpy: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_LIMIT", 0.1)
    os.kill(process_of(controller).pid, signal.SIGSTOP)
    assert start(plpy) is SpawnedProcess


def test_a_python_that_cannot_run_the_fork_server_is_logged_and_not_tried_at_once_again(
    plpy: Settings, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    plpy.values["pg_tensile.python"] = str(python)
    controller = ForkServer(Server(plpy))
    controller.ensure()
    process_of(controller).wait(60)
    for _ in range(2):
        controller.ensure()
    assert controller._process is None
    assert plpy.lines == [f"pg_tensile: the fork server of {python} exited with status 7"]
    plpy.values["pg_tensile.python"] = str(tmp_path / "missing")
    controller._start_after = time.monotonic()
    controller.ensure()
    assert controller._process is None and not plpy.lines[1:]


@pytest.mark.parametrize("update", ["replaced", "removed"])
def test_during_and_after_an_update_of_the_files_no_more_children_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """Modules of two versions would meet in one process."""
    file, new = tmp_path / "child.py", tmp_path / "new.py"
    file.write_text("old")
    new.write_text("new")
    monkeypatch.setattr(served.child, "__file__", str(file))
    ends = [socket.socketpair() for _ in range(2)]
    server = served.ForkServer(sys.executable, ends[0][0], ends[1][0])
    assert server._is_current()
    new.replace(file) if update == "replaced" else file.unlink()
    assert not server._is_current()
    server.run()  # ends, because it has no children and takes no more requests
    for pair in ends:
        for end in pair:
            end.close()


IMPORTS = """
import torch
def asked(*arguments, **options):
    raise AssertionError("a device was asked for something, which a fork does not survive")
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, asked)
for name in ("is_available", "device_count"):
    setattr(torch.accelerator, name, asked)
torch.accelerator.current_accelerator = lambda: torch.device("cuda")  # for which PyTorch was built; asks no device
from pyworker import fork_server
fork_server.preload()
"""


def test_imports_ask_no_device_for_anything() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=environment)
