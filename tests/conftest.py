"""Fixtures: a private cluster per xdist worker, fresh ones on demand, and connections to them.

`cluster` is shared by all tests of a worker; `db` removes the jobs, models, roles and schemas that a test leaves in it,
`alter` changes settings for a test. A test that stops, kills or damages the server takes its own from `fresh_cluster`.
When a cluster ends, no process and no file of the extension may remain, and its log may contain no unexpected crash.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # the tests share their cores; before anything imports torch

import contextlib
import functools
import gc
import itertools
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from scripts.cluster import MARKER, Cluster
from tests.examples import register_profiles

register_profiles()

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

CRASH = re.compile(r"PANIC:|TRAP:|was terminated by signal|was terminated by exception|stack smashing|double free")
# The tests share their cores with each other: each child gets one thread.
SETTINGS: dict[str, object] = {
    "pg_tensile.threads": 1,
    "pg_tensile.device": "cpu",
    "log_min_messages": "info",
    "max_connections": 60,
}

USERS = "tensile_user"  # the role whose members may use the extension

# Seconds of each test file that took long in the last run that was measured, by kind of test; scripts/test_seconds.py
SECONDS: dict[str, dict[str, float]] = json.loads((Path(__file__).parent / "seconds.json").read_text())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave garbage alone meanwhile: what imports and assertions make by the million stays, or goes by itself.

    Looking through it again and again takes half the time of collecting the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor do later collections look through it, until the end
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain about objects that outlive the interpreter


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the files that take longest start first, so that no worker of xdist is left with one of them at the end.

    Before them come those of the emulated accelerator: they count on an allocator and a device that are as new.
    """
    kinds = {"long": ["long"], "not long": ["short"]}.get(config.getoption("markexpr"), [*SECONDS])
    root = Path(__file__).parent.parent

    @functools.cache
    def seconds(path: Path) -> float:
        file = path.relative_to(root).as_posix()
        if file.startswith(("tests/accelerator/", "tests/emulated/")):
            return math.inf
        return sum(SECONDS[kind].get(file, 0) for kind in kinds)

    items.sort(key=lambda item: seconds(item.path), reverse=True)


class TestCluster(Cluster):
    """A cluster that checks for leftovers when it ends."""

    __test__ = False
    live: ClassVar[list[TestCluster]] = []

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._expected: list[re.Pattern[str]] = []

    def expect(self, pattern: str) -> None:
        """Do not count log lines that match `pattern` as crashes."""
        self._expected.append(re.compile(pattern))

    def superuser(self) -> Connection:
        return self.connect()

    def alter(self, settings: Mapping[str, object]) -> None:
        """Change settings that a reload changes, and wait until the server has loaded them.

        None: back to what the cluster was created with."""
        with self.connect() as conn:
            for name, value in settings.items():
                command = "ALTER SYSTEM RESET {}" if value is None else "ALTER SYSTEM SET {} = {}"
                conn.execute(sql.SQL(command).format(sql.Identifier(*name.split(".")), sql.Literal(str(value))))
            loaded = "SELECT pg_conf_load_time()"
            before = conn.execute(loaded).fetchone()
            conn.execute("SELECT pg_reload_conf()")
            wait_for(lambda: conn.execute(loaded).fetchone() != before, what="the server loads its settings")

    def check_log(self) -> None:
        lines = [line for line in self.log().splitlines() if CRASH.search(line)]
        crashes = [line for line in lines if not any(pattern.search(line) for pattern in self._expected)]
        assert not crashes, "unexpected in the server's log:\n" + "\n".join(crashes)

    def close_log(self) -> None:
        """Check the log so far and empty it: what was expected in it need not be expected in what follows."""
        self.check_log()
        os.truncate(self.log_file, 0)
        self._expected.clear()

    def leftovers(self, sockets: bool = True) -> list[str]:
        """List files of the extension that a stopped server has left: spooled data and sockets.

        A server that runs may have sockets.
        """
        paths = {*self.folder.rglob("*pg_tensile*"), *self.data.glob("base/pgsql_tmp/*")}
        if not sockets:
            paths = {path for path in paths if not path.is_socket()}
        return sorted(str(path.relative_to(self.folder)) for path in paths if path.name != MARKER)

    def end(self) -> None:
        """Stop the cluster, check that nothing remains, and delete it."""
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
    """Add the end of each server's log to the report of a failure."""
    report = yield
    if report.failed:
        for cluster in TestCluster.live:
            report.sections.append((f"log of {cluster.folder}", "\n".join(cluster.log().splitlines()[-40:])))
    return report


def wait_for(predicate: Callable[[], T], timeout: float = 60, what: str | Callable[[], str] = "condition") -> T:
    """Call `predicate` every 20 ms until its value is true, and return that value; fail after `timeout` seconds."""
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
    """`wait_until(predicate, timeout=60, what="…")`: poll a predicate and return its first true value."""

    def wait(predicate: Callable[[], T], timeout: float = 60, what: str | Callable[[], str] = "condition") -> T:
        return wait_for(predicate, timeout, what)

    return wait


def job_row(conn: Connection, job: int) -> dict[str, Any]:
    """Return a job's row of `tensile.jobs` as a dictionary."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM tensile.jobs WHERE job = %s", (job,)).fetchone()
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
    for cluster in TestCluster.live:  # its fixture failed before a test could end it
        cluster.remove()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template(clusters_folder: Path) -> Path:
    """A data directory fresh from initdb; copying it is ten times as fast as another initdb."""
    cluster = Cluster(clusters_folder / "template")
    cluster.create(SETTINGS, durable=False)
    return cluster.data


@pytest.fixture(scope="session")
def extended_template(clusters_folder: Path, template: Path) -> Path:
    """A data directory with the extension in database `postgres`."""
    cluster = Cluster(clusters_folder / "extended")
    cluster.create(SETTINGS, template=template, durable=False)
    cluster.start()
    with cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    cluster.stop()
    return cluster.data


@pytest.fixture(scope="session")
def new_cluster(clusters_folder: Path, template: Path, extended_template: Path) -> Callable[..., TestCluster]:
    """Create a cluster, with the extension or without, and start it; the caller ends it."""
    numbers = itertools.count(1)

    def make(
        settings: Mapping[str, object] | None = None, *, extension: bool = True, start: bool = True
    ) -> TestCluster:
        cluster = TestCluster(clusters_folder / str(next(numbers)))
        data = extended_template if extension else template
        cluster.create({**SETTINGS, **(settings or {})}, template=data, durable=False)
        TestCluster.live.append(cluster)
        if start:
            cluster.start()
        return cluster

    return make


@pytest.fixture
def fresh_cluster(new_cluster: Callable[..., TestCluster]) -> Iterator[Callable[..., TestCluster]]:
    """`fresh_cluster(settings={}, extension=True, start=True)`: a cluster for this test only, checked when it ends."""
    with contextlib.ExitStack() as ends:

        def make(settings: Mapping[str, object] | None = None, **options: bool) -> TestCluster:
            cluster = new_cluster(settings, **options)
            ends.callback(cluster.end)
            return cluster

        yield make


@pytest.fixture(scope="session")
def cluster(new_cluster: Callable[..., TestCluster]) -> Iterator[TestCluster]:
    """The shared cluster of this xdist worker, with the extension in database `postgres`."""
    shared = new_cluster()
    yield shared
    shared.end()


@pytest.fixture
def db(cluster: TestCluster) -> Iterator[Connection]:
    """A superuser's autocommit connection with a new schema first in search_path; jobs and models are removed after."""
    with cluster.connect() as conn:
        schema = f"t{time.monotonic_ns()}"
        conn.execute(f"CREATE SCHEMA {schema}")
        conn.execute(f"GRANT ALL ON SCHEMA {schema} TO PUBLIC")
        conn.execute(f"SET search_path = {schema}, public")
        yield conn
    with cluster.connect() as conn:
        sweep(conn)
        conn.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def alter(cluster: TestCluster, db: Connection) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """`alter({name: value, …})`: change settings of the shared cluster that a reload changes, for this test.

    They are set back when what the test has left is gone."""
    altered: set[str] = set()

    def change(settings: Mapping[str, object]) -> None:
        altered.update(settings)
        cluster.alter(settings)

    yield change
    if altered:
        try:
            with cluster.connect() as conn:
                sweep(conn)
        finally:
            cluster.alter(dict.fromkeys(altered))


def sweep(conn: Connection) -> None:
    """Cancel the tunings and jobs that are left, wait until their workers are gone and delete models and jobs."""
    active = "ended_at IS NULL"
    conn.execute(f"SELECT cancel_tuning(id) FROM tensile_internal.tunings WHERE {active}")
    tunings = f"SELECT count(*) FROM tensile_internal.tunings WHERE {active}"
    wait_for(lambda: conn.execute(tunings).fetchone() == (0,), what="the tunings that a test left end")
    for (job,) in conn.execute(f"SELECT job FROM tensile.jobs WHERE {active}").fetchall():
        conn.execute("SELECT cancel_job(%s)", (job,))

    def idle() -> bool:
        jobs = conn.execute(f"SELECT count(*) FROM tensile.jobs WHERE {active}").fetchone()
        workers = conn.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker'"
        ).fetchone()
        return jobs == (0,) and workers == (0,)

    wait_for(idle, what="the jobs that a test left end after cancel_job")
    conn.execute("DELETE FROM tensile_internal.jobs")
    conn.execute("DELETE FROM tensile_internal.tunings")
    conn.execute("DELETE FROM tensile_internal.models")


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
    """`roles("alice", "LOGIN", member_of=(…))` create a role, a member of tensile_user unless
    `member_of` says otherwise, and return its name; it is dropped after the test."""
    names: list[str] = []

    def make(name: str, attributes: str = "LOGIN", member_of: tuple[str, ...] = (USERS,)) -> str:
        role = f"{name}_{time.monotonic_ns()}"
        db.execute(f"CREATE ROLE {role} {attributes}")
        for group in member_of:
            db.execute(f"GRANT {group} TO {role}")
        names.append(role)
        return role

    yield make
    if names:
        sweep(db)
    existing = [
        row[0] for row in db.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", (names,)).fetchall()
    ]
    for role in existing:
        db.execute(f"DROP OWNED BY {role} CASCADE")
        db.execute(f"DROP ROLE {role}")
