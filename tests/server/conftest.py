"""Fixtures of several files: a stage (stage.py), a lab (pressure.py), roles (cast.py) and special clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.cast import Cast, insert_job
from tests.server.pressure import Lab
from tests.server.recording import Recorder, install_recorder
from tests.server.shared import SharedServer, lent
from tests.server.stage import Stage, use_device
from tests.server.support import SMALL_MLP, Connection, Wait, no_workers, register, value


@pytest.fixture(scope="module")
def stage(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Stage]:
    stage = Stage(new_cluster({"pg_tensile.plan_events": 1024, "pg_tensile.device_memory": "1GB"}), wait_until)
    yield stage
    stage.close()


@pytest.fixture
def job(stage: Stage) -> Iterator[int]:
    job = stage.job()
    yield job
    if value(stage.conn, "SELECT ended_at IS NULL FROM tensile.jobs WHERE job = %s", job):
        stage.end(job)


@pytest.fixture(scope="module")
def module_cluster(request: pytest.FixtureRequest, new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Cluster of a test module, with the settings of its CLUSTER_SETTINGS, if it has any."""
    cluster = new_cluster(getattr(request.module, "CLUSTER_SETTINGS", None))
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def shared_server(request: pytest.FixtureRequest, cluster: Any, wait_until: Wait) -> Iterator[SharedServer]:
    """The worker's cluster, with a schema for the module and the settings of its CLUSTER_SETTINGS, if it has any."""
    settings = getattr(request.module, "CLUSTER_SETTINGS", {})
    with lent(cluster, f"m{time.monotonic_ns()}", settings, wait_until) as server:
        yield server


@pytest.fixture(scope="session")
def shared_lab(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Lab]:
    cluster = new_cluster(
        {"pg_tensile.memory_flow": "off"}
    )  # jobs have constant grants; test_memory_flow_jobs.py has others
    lab = Lab(cluster, wait_until)
    yield lab
    lab.conn.close()
    cluster.end()


@pytest.fixture(scope="module")
def lab(shared_lab: Lab) -> Lab:
    """The lab of this xdist worker, with its first settings and without jobs."""
    shared_lab.reset()
    return shared_lab


@pytest.fixture
def impatient_db(db: Connection, cluster: Any, alter: Callable[..., None]) -> Iterator[Connection]:
    """A connection to the shared cluster, which retries no job; the test must leave no worker, slot, trainer or
    file."""
    alter({"pg_tensile.max_retries": 0})
    before = set(cluster.processes())
    yield db
    assert value(db, "SELECT count(*) FROM tensile_worker._progress()") == 0
    assert no_workers(db)
    processes = {pid: command for pid, command in cluster.processes().items() if pid not in before}
    assert not any("pyworker trainer" in command for command in processes.values()), processes
    assert cluster.leftovers(sockets=False) == []


@pytest.fixture
def bystander(connect: Callable[..., Connection]) -> Connection:
    """Another session in the shared cluster."""
    return connect()


@pytest.fixture
def second(stage: Stage, job: int) -> Any:
    """A second job with a worker."""
    number = stage.job("n")
    yield number
    stage.cancel(number)


@pytest.fixture
def planned(stage: Stage, job: int) -> int:
    """A job whose worker has registered device "cpu"."""
    use_device(stage, job, "cpu")
    return job


@pytest.fixture
def flights(db: Connection) -> Connection:
    """A connection with table `flights` and model `late`."""
    db.execute(
        "CREATE TABLE flights (distance float8, carrier text, legs int[], at timestamptz, notes jsonb, late bool)"
    )
    db.execute("SELECT register_model('late', %s)", (SMALL_MLP,))
    return db


@pytest.fixture
def play(db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]) -> Iterator[Cast]:
    schema = value(db, "SELECT current_schema")
    alice, mallory = roles("alice"), roles("mallory")
    bob = roles("bob", member_of=("tensile_user", "pg_read_all_stats"))
    options = f"-c search_path={schema},public"
    conns = {name: connect(user=name, options=options) for name in (alice, bob, mallory)}

    db.execute(
        "CREATE TABLE secrets (x float8, y float8); INSERT INTO secrets SELECT i, i FROM generate_series(1, 50) i"
    )
    model = value(conns[alice], "SELECT register_model('late', %s, 'alice''s')", SMALL_MLP)
    job = insert_job(db, alice, model)
    version = value(
        db,
        "INSERT INTO tensile_internal.model_versions (model_id, version, job, task, preprocessing, architecture,"
        " weight_bytes) VALUES (%s, 1, %s, 'regression', '{}', '{}', 6) RETURNING id",
        *(model, job),
    )
    db.execute("INSERT INTO tensile_internal.model_weights VALUES (%s, 0, 'secret')", (version,))
    db.execute(
        "INSERT INTO tensile_internal.version_sources (version, purpose, schema_name, relation_name, kind, columns)"
        " VALUES (%s, 'training', 'public', 'secret', 'table', '{secret}')",
        (version,),
    )
    db.execute("INSERT INTO tensile_internal.epochs (job, epoch, split) VALUES (%s, 1, 'training')", (job,))
    db.execute("INSERT INTO tensile_internal.metrics VALUES (%s, 1, 'training', 'loss', 0.5)", (job,))
    db.execute("INSERT INTO tensile_internal.checkpoints (job, generation, meta) VALUES (%s, 1, '{}')", (job,))
    db.execute("INSERT INTO tensile_internal.checkpoint_chunks VALUES (%s, 1, 0, 'secret')", (job,))
    db.execute(
        "INSERT INTO tensile_internal.tunings (id, model_id, model, owner, architecture, arguments, settings,"
        " space, trials, parallel, state, ended_at)"
        " VALUES (-1, %s, 'late', %s, '{}', '{}', '{}', '{}', 1, 1, 'finished', now())",
        (model, alice),
    )
    for insert in (
        "trials (tuning, number, params, state, job) VALUES (-1, 0, '{}', 'finished', %s)",
        "traces (job, device, revision, policy, fingerprint, overhead_bytes, least_bytes, graphs, traces)"
        " VALUES (%s, 'cpu', 1, 'joint', 'graph', 0, 1, '[]', '{secret}')",
        "plan_searches (job, state, budget_bytes, seconds, cached) VALUES (%s, 'queued', 1, 1, false)",
        "search_results VALUES ('graph', 'cpu', 1, 1, 'secret', '', 1, 1, 1)",
        "operators (job, operator, target, source) VALUES (%s, 0, 'aten.relu.default', 'secret.py:1')",
        "tensors (job, tensor, name) VALUES (%s, 0, 'secret')",
        "operator_latencies (job, predicted, measured, average, samples, total_us)"
        " VALUES (%s, '{1}', '{2}', '{2}', 1, 2)",
        "plans (job, generation, events, operators, planned, vanilla) VALUES (%s, 1, 'secret', '{0}', '{1}', '{1}')",
        "sparsities (job, revision, tensors, zero_share, run_share, lz4_share, moved)"
        " VALUES (%s, 1, '{0}', '{0.5}', '{0.1}', '{1}', '{NULL}')",
        "rank_reports (job, ranks)"
        """ VALUES (%s, '[{"rank": 0, "node": "secret", "device": "cpu", "state": "training"}]')""",
        "codings (job, decisions) VALUES (%s, '[]')",
        "codec_times (device, times) VALUES ('of nobody', '{}')",
        "scheduler_log (job, event, reason) VALUES (%s, 'planned', 'secret')",
        "device_profiles (device, profile) VALUES ('of nobody', '{}')",
        "latency_models (device, models, kinds, samples) VALUES ('of nobody', '', 1, 1)",
    ):
        db.execute("INSERT INTO tensile_internal." + insert, (job,) if "%s" in insert else ())
    yield Cast(conns[alice], conns[bob], conns[mallory], job, version)
    for conn in conns.values():
        conn.close()
    db.execute("DELETE FROM tensile_internal.tunings")
    db.execute(
        "DELETE FROM tensile_internal.jobs; TRUNCATE tensile_internal.device_profiles, tensile_internal.latency_models"
    )
    db.execute("TRUNCATE tensile_internal.codec_times, tensile_internal.search_results, tensile_internal.scheduler_log")


@pytest.fixture
def nothing_left(db: Connection) -> Iterator[None]:
    """Check that the test leaves no job: refused submissions store none, and tests that submit delete theirs."""
    yield
    assert value(db, "SELECT count(*) FROM tensile.jobs") == 0


@pytest.fixture(scope="module")
def recorder(new_cluster: Callable[..., Any]) -> Iterator[Recorder]:
    """A cluster whose trainers are recorder.py."""
    cluster = new_cluster()
    folder = cluster.folder / "recorded"
    try:
        cluster.configure({"pg_tensile.python": install_recorder(cluster, folder)})
        cluster.reload()
        with cluster.connect() as conn:
            conn.execute("""SELECT register_model('recorder', '{"type": "mlp"}')""")
            yield Recorder(cluster, conn, folder)
    finally:
        cluster.end()


@pytest.fixture
def grantee(db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]) -> Connection:
    """A connection of an ordinary role with a grant on model m, in the test's schema."""
    register(db, "m")
    role = roles("user")
    db.execute("SELECT grant_model('m', %s, 'train')", (role,))
    conn = connect(role)
    conn.execute(f"SET search_path = {value(db, 'SELECT current_schema()')}, public")
    return conn
