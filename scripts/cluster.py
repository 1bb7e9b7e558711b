"""A private PostgreSQL cluster with pg_tensile, for the tests, the demo and the benchmarks.

PostgreSQL refuses to run as root, so all processes of the server run as `os_user`: the invoking user, or `postgres` if
that is root. The folder (0700, owned by that user) holds the data directory, the log and the Unix socket; local
connections are trusted because no other user can enter it. Connections over TCP need a password, and no role has one
until it is set.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psycopg

REPOSITORY = Path(__file__).resolve().parent.parent
MARKER = ".pg_tensile-cluster"
SOCKET_PATH_LIMIT = 107 - len("/.s.PGSQL.65535.lock")


class ClusterError(RuntimeError):
    """The server did not start or stop; the message ends with the last lines of its log."""


def child_python() -> str:
    """Return the venv's interpreter by a path that the server's user can follow.

    `.venv` may be a link out of a private folder.
    """
    venv = (REPOSITORY / ".venv").resolve()
    return str(venv / "bin" / "python")


def server_bin() -> Path:
    """Return the folder of initdb, postgres and pg_ctl that the extension was installed for."""
    pg_config = os.environ.get("PG_CONFIG", "pg_config")
    return Path(subprocess.run([pg_config, "--bindir"], check=True, capture_output=True, text=True).stdout.strip())


def server_user() -> str:
    """Return the operating-system user of the servers: the invoking one, or `postgres` (PG_TENSILE_USER) for root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    return os.environ.get("PG_TENSILE_USER", "postgres")


def free_port() -> int:
    """Return a TCP port that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """One private cluster in `folder`; nothing is touched until `create` or `start`.

    `tcp`: listen on localhost too. `bin`: the folder of the server's programs, if not that of pg_config. `launcher`:
    words before the commands for the server, such as those that run them in another network. Methods raise ClusterError
    if a command for the server fails.
    """

    launcher: Sequence[str] = ()

    def __init__(self, folder: Path, *, tcp: bool = False, port: int | None = None, bin: Path | None = None) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log_file = folder / "server.log"
        self.os_user = server_user()
        self.tcp = tcp
        self.port = port or (free_port() if tcp else 5432)
        self.bin = bin or server_bin()
        if len(str(folder)) > SOCKET_PATH_LIMIT:
            raise ClusterError(f"the path of {folder} is too long for a Unix socket (limit {SOCKET_PATH_LIMIT} bytes)")

    # -- making and removing ------------------------------------------------------------------------------------------

    def create(
        self, settings: Mapping[str, object] | None = None, *, template: Path | None = None, durable: bool = True
    ) -> None:
        """Create the data directory, by initdb or as a copy of the data directory `template`, and its configuration.

        Without `durable`, commits survive a crash of the server, but not of the machine."""
        self._make_folder()
        if template is not None:
            self._run("cp", "-a", "--reflink=auto", str(template), str(self.data))
        else:
            self._run(
                *(str(self.bin / "initdb"), "-D", str(self.data), "-U", "postgres", "-E", "UTF8", "--locale=C.UTF-8"),
                *("--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync", "--no-instructions"),
            )
        self.configure(
            {
                "shared_preload_libraries": "pg_tensile",
                "pg_tensile.python": child_python(),
                "pg_tensile.auto_calibrate": "off",  # it would disturb tests and benchmarks
                "unix_socket_directories": str(self.folder),
                "listen_addresses": "localhost" if self.tcp else "",
                "port": self.port,
                "max_worker_processes": 40,
                "log_line_prefix": "%m [%p] %q%u@%d ",
                "timezone": "UTC",
                "log_timezone": "UTC",
                **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
                **(settings or {}),
            }
        )

    def configure(self, settings: Mapping[str, object]) -> None:
        """Append settings to postgresql.conf, where the last one wins; they take effect at `reload` or `restart`."""
        lines = "".join(f"{name} = '{str(value).replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items())
        self._run("tee", "-a", str(self.data / "postgresql.conf"), stdin=lines)

    def exists(self) -> bool:
        return (self.folder / MARKER).is_file() and not self.folder.is_symlink()

    def remove(self) -> None:
        """Stop the server if it runs and delete the folder; a folder that `create` did not make is refused."""
        if not self.exists():
            raise ClusterError(f"{self.folder} is not a cluster of ours; nothing was removed")
        if self.running():
            self.stop("immediate")
        shutil.rmtree(self.folder)

    # -- running ------------------------------------------------------------------------------------------------------

    def start(self, timeout: int = 60) -> None:
        self._pg_ctl("start", "-l", str(self.log_file), "-t", str(timeout))

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast", timeout: int = 60) -> None:
        self._pg_ctl("stop", "-m", mode, "-t", str(timeout))

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    def reload(self) -> None:
        self._pg_ctl("reload")

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as the OOM killer would, and wait for the end of all processes of the
        cluster."""
        postmaster = self.postmaster_pid()
        os.kill(postmaster, signal.SIGKILL)
        deadline = time.monotonic() + 30
        # An unreaped postmaster still looks alive to the next one, which would refuse the lock file.
        while self.processes() or Path(f"/proc/{postmaster}").exists():
            if time.monotonic() > deadline:
                raise ClusterError(f"processes outlived their postmaster: {self.processes()}")
            time.sleep(0.02)

    def running(self) -> bool:
        return self.data.exists() and self._pg_ctl("status", check=False) == 0

    def version(self) -> str:
        """Return the server's version line, whether it runs or not."""
        return subprocess.run([self.bin / "postgres", "--version"], check=True, capture_output=True, text=True).stdout

    def postmaster_pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def processes(self) -> dict[int, str]:
        """Return the command lines of the cluster's live processes by process id.

        Children are included: all work in the data directory.
        """
        commands = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if Path(os.readlink(entry / "cwd")).is_relative_to(self.data):
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                        commands[int(entry.name)] = command
        return commands

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    # -- connecting ---------------------------------------------------------------------------------------------------

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"host={self.folder} port={self.port} dbname={database} user={user}"

    def connect(
        self, database: str = "postgres", user: str = "postgres", *, autocommit: bool = True, **options: Any
    ) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.dsn(database, user), autocommit=autocommit, **options)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        """Make the folder, which must not exist: a folder or link made by another user is not taken over."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            raise ClusterError(
                f"{self.folder} exists already and is not a cluster of ours; choose another folder"
            ) from None
        (self.folder / MARKER).touch()
        if os.geteuid() == 0:
            shutil.chown(self.folder, self.os_user)

    def _as_server_user(self, command: tuple[str, ...]) -> tuple[str, ...]:
        if os.geteuid() == 0:
            return (*self.launcher, "runuser", "-u", self.os_user, "--", *command)
        return (*self.launcher, *command)

    def _run(self, *command: str, stdin: str = "") -> None:
        done = subprocess.run(
            self._as_server_user(command), cwd="/", input=stdin, capture_output=True, text=True, env=self._environment()
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")

    def _pg_ctl(self, action: str, *arguments: str, check: bool = True) -> int:
        """Run pg_ctl, with -w to start or stop.

        Its output is discarded, because the server would inherit a pipe and keep it open.
        """
        command = (str(self.bin / "pg_ctl"), action, "-D", str(self.data), "-s")
        waits = ("-w",) if action in ("start", "stop") else ()
        done = subprocess.run(
            self._as_server_user((*command, *waits, *arguments)),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
        )
        if check and done.returncode != 0:
            tail = "\n".join(self.log().splitlines()[-25:])
            raise ClusterError(f"pg_ctl {action} failed for {self.data}; its log ends with:\n{tail}")
        return done.returncode

    def _environment(self) -> dict[str, str]:
        """Return the caller's environment without variables that would redirect libpq, PostgreSQL or the children."""
        return {
            k: v for k, v in os.environ.items() if not k.startswith(("PG", "PYTHON", "VIRTUAL_ENV")) and k != "HOME"
        }


@contextlib.contextmanager
def temporary_cluster(
    folder: Path, settings: Mapping[str, object] | None = None, bin: Path | None = None, launcher: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Yield a started cluster without durability, which is removed at the end; for the benchmarks."""
    cluster = Cluster(folder, bin=bin)
    cluster.launcher = launcher
    cluster.create(settings, durable=False)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


if __name__ == "__main__":
    sys.exit("cluster.py is a module of the tests, the demo and the benchmarks")
