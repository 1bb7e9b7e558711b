"""Fixtures: one private cluster per xdist worker, fresh ones on demand, and what every test needs to talk to them.

`cluster` is shared by all tests of a worker; whatever a test leaves in it (jobs, models, roles, schemas) is swept up by
`db`. A test that stops, kills or reconfigures the server takes one of its own from `fresh_cluster`. When a cluster
ends, nothing of it may remain: no process, no file of ours, no unexpected crash in its log.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the tests share their cores; before anything imports torch

import contextlib
import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psycopg
import pytest
from psycopg.rows import dict_row

from scripts.cluster import MARKER, Cluster

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

CRASH = re.compile(r"PANIC:|TRAP:|was terminated by signal|was terminated by exception|stack smashing|double free")
# The tests share their cores with each other: each child gets one thread, and every race one chance more to show.
SETTINGS: dict[str, object] = {
    "pg_tensile.threads": 1,
    "pg_tensile.device": "cpu",
    "log_min_messages": "info",
    "max_connections": 60,
}

USERS = "tensile_user"  # the role whose members may use the extension

# a minute and more each: whatever starts last ends last
LONGEST = ("test_client.py", "test_demo.py", "test_explain.py", "test_memory.py", "test_notebook.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


class TestCluster(Cluster):
    """A cluster that is checked when it ends."""

    __test__ = False
    live: ClassVar[list[TestCluster]] = []

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._expected: list[re.Pattern[str]] = []

    def expect(self, pattern: str) -> None:
        """Log lines that match are what the test is about: not counted as a crash."""
        self._expected.append(re.compile(pattern))

    def superuser(self) -> Connection:
        return self.connect()

    def check_log(self) -> None:
        lines = [line for line in self.log().splitlines() if CRASH.search(line)]
        crashes = [line for line in lines if not any(pattern.search(line) for pattern in self._expected)]
        assert not crashes, "unexpected in the server's log:\n" + "\n".join(crashes)

    def leftovers(self) -> list[str]:
        """Files of ours that a stopped server has left (sockets, spooled data)."""
        found = [*self.folder.rglob("*pg_tensile*"), *self.data.glob("base/pgsql_tmp/*")]
        return sorted(str(path.relative_to(self.folder)) for path in found if path.name != MARKER)

    def end(self) -> None:
        """Stop, check that nothing remains, delete."""
        try:
            if self.running():
                self.stop("fast")
            wait_for(lambda: not self.processes(), what=lambda: f"processes outlived the server: {self.processes()}")
            assert not self.leftovers(), f"files outlived the server: {self.leftovers()}"
            self.check_log()
        finally:
            self.live.remove(self)
            self.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure shows what the servers said during the test."""
    report = yield
    if report.failed:
        for cluster in TestCluster.live:
            report.sections.append((f"log of {cluster.folder}", "\n".join(cluster.log().splitlines()[-40:])))
    return report


def wait_for(predicate: Callable[[], T], timeout: float = 60, what: str | Callable[[], str] = "condition") -> T:
    """Ask `predicate` every 20 ms until it is true and return its value; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {what() if callable(what) else what}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., Any]:
    """`wait_until(predicate, timeout=60, what="…")`: polls a predicate, returns its first true value."""

    def wait(predicate: Callable[[], T], timeout: float = 60, what: str | Callable[[], str] = "condition") -> T:
        return wait_for(predicate, timeout, what)

    return wait


def job_row(conn: Connection, job: int) -> dict[str, Any]:
    """The row of `tensile.jobs` as a dictionary."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM tensile.jobs WHERE id = %s", (job,)).fetchone()
    assert row is not None, f"job {job} is not in tensile.jobs (or hidden from {conn.info.user})"
    return row


@pytest.fixture(scope="session", name="job_row")
def job_row_fixture() -> Callable[[Connection, int], dict[str, Any]]:
    return job_row


@pytest.fixture(scope="session")
def clusters_folder() -> Iterator[Path]:
    """A short path (Unix sockets allow 107 bytes) that the server's user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    for cluster in TestCluster.live:  # it did not get as far as a test
        cluster.remove()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(clusters_folder: Path) -> Path:
    """A data directory fresh from initdb; copying it is ten times as fast as another initdb."""
    cluster = Cluster(clusters_folder / "template")
    cluster.create(SETTINGS, durable=False)
    return cluster.data


@pytest.fixture(scope="session")
def new_cluster(clusters_folder: Path, template: Path) -> Callable[..., TestCluster]:
    """Makes and starts a cluster; the caller ends it."""
    numbers = itertools.count(1)

    def make(
        settings: Mapping[str, object] | None = None, *, extension: bool = True, start: bool = True
    ) -> TestCluster:
        cluster = TestCluster(clusters_folder / str(next(numbers)))
        cluster.create({**SETTINGS, **(settings or {})}, template=template, durable=False)
        TestCluster.live.append(cluster)
        if start or extension:
            cluster.start()
        if extension:
            with cluster.connect() as conn:
                conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        return cluster

    return make


@pytest.fixture
def fresh_cluster(new_cluster: Callable[..., TestCluster]) -> Iterator[Callable[..., TestCluster]]:
    """`fresh_cluster(settings={}, extension=True, start=True)`: a cluster of the test's own, checked when it ends."""
    with contextlib.ExitStack() as ends:

        def make(settings: Mapping[str, object] | None = None, **options: bool) -> TestCluster:
            made = new_cluster(settings, **options)
            ends.callback(made.end)
            return made

        yield make


@pytest.fixture(scope="session")
def cluster(new_cluster: Callable[..., TestCluster]) -> Iterator[TestCluster]:
    """The worker's shared cluster, with the extension in database `postgres`."""
    shared = new_cluster()
    yield shared
    shared.end()


@pytest.fixture
def db(cluster: TestCluster) -> Iterator[Connection]:
    """A superuser's autocommit connection whose search_path starts with a new schema; swept after."""
    with cluster.connect() as conn:
        schema = f"t{time.monotonic_ns()}"
        conn.execute(f"CREATE SCHEMA {schema}")
        conn.execute(f"GRANT ALL ON SCHEMA {schema} TO PUBLIC")
        conn.execute(f"SET search_path = {schema}, public")
        yield conn
    with cluster.connect() as conn:
        sweep(conn)
        conn.execute(f"DROP SCHEMA {schema} CASCADE")


def sweep(conn: Connection) -> None:
    """Cancel the jobs that are left, wait until their workers are gone and delete models and jobs."""
    active = "ended_at IS NULL"
    for (job,) in conn.execute(f"SELECT id FROM tensile.jobs WHERE {active}").fetchall():
        conn.execute("SELECT cancel_job(%s)", (job,))

    def idle() -> bool:
        jobs = conn.execute(f"SELECT count(*) FROM tensile.jobs WHERE {active}").fetchone()
        workers = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
        ).fetchone()
        return jobs == (0,) and workers == (0,)

    wait_for(idle, what="the jobs that a test left end after cancel_job")
    conn.execute("DELETE FROM tensile.jobs")
    conn.execute("DELETE FROM tensile.models")


@pytest.fixture
def connect(cluster: TestCluster) -> Iterator[Callable[..., Connection]]:
    """`connect(user="postgres", **options)`: further connections to the shared cluster, closed after the test."""
    opened: list[Connection] = []

    def make(user: str = "postgres", **options: Any) -> Connection:
        opened.append(cluster.connect(user=user, **options))
        return opened[-1]

    yield make
    for conn in opened:
        conn.close()


@pytest.fixture
def roles(db: Connection) -> Iterator[Callable[..., str]]:
    """`roles("alice", "LOGIN", member_of=(…))` makes a role of the test's own, which may use the extension unless
    `member_of` says otherwise, and returns its name; dropped after."""
    made: list[str] = []

    def make(name: str, attributes: str = "LOGIN", member_of: tuple[str, ...] = (USERS,)) -> str:
        role = f"{name}_{time.monotonic_ns()}"
        db.execute(f"CREATE ROLE {role} {attributes}")
        for group in member_of:
            db.execute(f"GRANT {group} TO {role}")
        made.append(role)
        return role

    yield make
    if made:
        sweep(db)
    existing = [
        row[0] for row in db.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", (made,)).fetchall()
    ]
    for role in existing:
        db.execute(f"DROP OWNED BY {role} CASCADE")
        db.execute(f"DROP ROLE {role}")
