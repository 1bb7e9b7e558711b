"""Containers of the image under test, and psql from outside. scripts/test_docker.sh says which engine and image."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from scripts.cluster import free_port, server_bin

T = TypeVar("T")

if "PG_TENSILE_ENGINE" not in os.environ:
    pytest.exit("make test-docker finds the engine and builds the image that these tests use", returncode=2)
ENGINE = os.environ["PG_TENSILE_ENGINE"]  # docker or podman
IMAGE = os.environ["PG_TENSILE_IMAGE"]
HOST_NETWORK = bool(os.environ["PG_TENSILE_HOST_NETWORK"])  # containers listen on the host's own ports


def call(*arguments: str, timeout: float = 60) -> str:
    """Return the output of the engine; the test fails if the engine does."""
    done = subprocess.run([ENGINE, *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{ENGINE} {' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout


def run_once(*options: str, command: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A container that ends by itself and leaves nothing."""
    line = [ENGINE, "run", "--rm", "--pull=never", *options, IMAGE, *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def wait_for(predicate: Callable[[], T], seconds: float, what: Callable[[], str]) -> T:
    """The predicate's first true value; a test fails with `what()` when there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s:\n{what()}")
        time.sleep(0.2)
    return value


class Server:
    """A server in a container: `start` makes a new container each time, the volume with the database stays."""

    def __init__(self, name: str, *, user: str = "postgres", database: str = "postgres") -> None:
        self.name = f"pgt-{os.getpid()}-{name}"
        self.volume = f"--volume={self.name}:/var/lib/postgresql"
        self.port = free_port()
        self.user = user
        self.database = database
        self.password = "it's a secret"

    # -- the container ------------------------------------------------------------------------------------------------

    def launch(self, *options: str, command: Sequence[str] = (), password: bool = True) -> None:
        """A new container instead of the old one; returns before the server is ready."""
        self.remove()
        given = [self.volume, "--shm-size=256m", f"--env=PGPORT={self.port}"]
        if password:
            given.append(f"--env=POSTGRES_PASSWORD={self.password}")
        if not HOST_NETWORK:
            given.append(f"--publish=127.0.0.1:{self.port}:{self.port}")
        if ENGINE == "docker":
            given.append("--health-interval=1s")
        call("run", "--detach", "--pull=never", f"--name={self.name}", *given, *options, IMAGE, *command)

    def start(self, *options: str, command: Sequence[str] = (), password: bool = True) -> None:
        """A new container instead of the old one, and waits until it is healthy."""
        self.launch(*options, command=command, password=password)
        wait_for(self._has_started, 90, self.log)

    def _has_started(self) -> bool:
        if self.inspect("State.Running") != "true":
            pytest.fail(f"the container has ended:\n{self.log()}")
        return self.healthy()

    def healthy(self) -> bool:
        """Return the result of the image's health check, which Docker runs each second and Podman on request."""
        if ENGINE == "docker":
            return self.inspect("State.Health.Status") == "healthy"
        return subprocess.run([ENGINE, "healthcheck", "run", self.name], capture_output=True).returncode == 0

    def inspect(self, field: str) -> str:
        return call("container", "inspect", "--format", f"{{{{.{field}}}}}", self.name).strip()

    def log(self) -> str:
        command = [ENGINE, "logs", self.name]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout

    def execute(self, *command: str) -> str:
        """Runs a command in the container, as the server's user."""
        return call("exec", f"--user={self.owner()}", self.name, *command)

    def owner(self) -> str:
        """The number of the user that process 1 has."""
        return call("exec", self.name, "stat", "--format=%u", "/proc/1").strip()

    def kill(self) -> None:
        """SIGKILL to all processes, as by a power failure."""
        call("kill", "--signal=KILL", self.name)
        wait_for(lambda: self.inspect("State.Running") == "false", 10, self.log)

    def remove(self) -> None:
        subprocess.run([ENGINE, "rm", "--force", "--volumes", self.name], capture_output=True)

    # -- the database -------------------------------------------------------------------------------------------------

    def psql(self, *commands: str, stdin: str = "") -> str:
        """The commands, each in a transaction of its own, or else the script `stdin`; from outside, over TCP."""
        psql = str(server_bin() / "psql")
        line = [psql, "-XAtq", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", str(self.port), "-U", self.user]
        line += ["-d", self.database, *(part for command in commands for part in ("-c", command))]
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, env=self.environment(), timeout=90)
        assert done.returncode == 0, f"{done.stderr}\n{self.log()[-4000:]}"
        return done.stdout.strip()

    def environment(self) -> dict[str, str]:
        """For psql: nothing of the caller's that would lead it elsewhere."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return inherited | {"PGPASSWORD": self.password}


@contextlib.contextmanager
def temporary(server: Server) -> Iterator[Server]:
    """The container and its volume are removed at the end."""
    try:
        yield server
    finally:
        server.remove()
        subprocess.run([ENGINE, "volume", "rm", "--force", server.name], capture_output=True)
