"""pg_dump and restore into another cluster, where roles have other OIDs and one of them is missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.cast import visible
from tests.server.support import Connection, value

TRAIN = (
    "SELECT train_model('wave', 'SELECT x, sin(x) AS y FROM generate_series(0, 6, 0.01) x', 'y', epochs => 2,"
    " policy => 'none')"
)
PREDICTIONS = "SELECT x, predict('wave', ARRAY[x::float8]) FROM generate_series(-1, 7) x ORDER BY x"


def train(conn: Connection) -> None:
    assert value(conn, f"SELECT wait_for_job({value(conn, TRAIN)}, '90 s')") == "finished"


def tool(
    cluster: Any, name: str, *arguments: str, user: str = "postgres", database: str = "postgres", stdin: str = ""
) -> str:
    """Run pg_dump or psql of the cluster's installation against it and return the output."""
    done = subprocess.run(
        [str(cluster.bin / name), "-d", cluster.dsn(database, user=user), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def source(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """alice has a trained model that bob and PUBLIC may use, an unfinished version, and a job that waits."""
    cluster = new_cluster()
    with cluster.connect() as conn:
        conn.execute("CREATE ROLE bob LOGIN IN ROLE tensile_user; CREATE ROLE alice LOGIN IN ROLE tensile_user")
        conn.execute(
            "CREATE ROLE dumper LOGIN BYPASSRLS IN ROLE pg_read_all_data; GRANT CREATE ON SCHEMA public TO alice"
        )
    with cluster.connect(user="alice") as conn:
        conn.execute("SELECT register_model('wave', %s, 'a sine')", (Jsonb({"type": "mlp", "hidden": [4]}),))
        train(conn)
        conn.execute("SELECT grant_model('wave', 'bob', 'train'), grant_model('wave', 'public')")
        conn.execute(f"CREATE MATERIALIZED VIEW waves AS {PREDICTIONS}")
        conn.execute(TRAIN.replace("train_model(", "schedule_training(").removesuffix(")") + ", every => '1 year')")
    with cluster.connect() as conn:
        conn.execute(
            "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture)"
            " SELECT id, 2, 'regression', '{}', '{}' FROM tensile_internal.models"
        )
        conn.execute(
            "INSERT INTO tensile_internal.jobs SELECT (jsonb_populate_record(j, %s)).* FROM tensile_internal.jobs j",
            (Jsonb({"id": 1000, "state": "interrupted", "ended_at": None, "not_before": "2999-01-01"}),),
        )
        conn.execute(
            "INSERT INTO tensile_internal.tunings (model_id, model, owner, architecture, arguments, settings, space,"
            " trials, parallel, state, ended_at)"
            " SELECT id, name, owner, architecture, '{}', '{}', '{}', 1, 1, 'finished', now()"
            " FROM tensile_internal.models"
        )
        conn.execute(
            "INSERT INTO tensile_internal.trials (tuning, number, params, state) VALUES (1, 0, '{}', 'finished')"
        )
        conn.execute("INSERT INTO tensile_internal.epochs (job, epoch, split) VALUES (1000, 1, 'training')")
        conn.execute("INSERT INTO tensile_internal.checkpoints (job, generation, meta) VALUES (1000, 1, '{}')")
    yield cluster
    cluster.end()


def catalogue(cluster: Any) -> list[list[Any]]:
    """Return the rows of everything that is finished, by table."""
    with cluster.connect() as conn:
        return [
            conn.execute(query).fetchall()
            for query in (
                "SELECT model_id, model, owner, architecture, description, deployed_version FROM tensile.models",
                "SELECT * FROM tensile.model_versions WHERE weight_bytes IS NOT NULL",
                "SELECT version, seq, md5(data) FROM tensile_internal.model_weights ORDER BY 1, 2",
                "SELECT grantee, privilege FROM tensile.model_grants ORDER BY 1",
                "SELECT * FROM tensile.deployments",
                "SELECT to_jsonb(s) - 'owner_id' FROM tensile_internal.schedules s",
                "SELECT to_jsonb(t) - 'owner_id' FROM tensile_internal.tunings t",
                "SELECT * FROM tensile.trials",
                "SELECT job, query, state, settings, rows, fingerprint FROM tensile.jobs WHERE ended_at IS NOT NULL",
                "SELECT * FROM tensile_internal.epochs WHERE job <> 1000 ORDER BY epoch, split",
                "SELECT * FROM tensile.metrics WHERE job <> 1000 ORDER BY epoch, split, metric",
            )
        ]


class Restored(NamedTuple):
    """A cluster into which the source was restored, and its rows and predictions before any test."""

    cluster: Any
    rows: list[list[Any]]
    predictions: list[Any]


@pytest.fixture(scope="module")
def restored(source: Any, new_cluster: Callable[..., Any]) -> Iterator[Restored]:
    """A second cluster with role alice, under another OID, and without bob."""
    cluster = new_cluster(extension=False)
    with cluster.connect() as conn:
        conn.execute("CREATE ROLE first; CREATE ROLE second")
        conn.execute("CREATE ROLE tensile_user; CREATE ROLE alice LOGIN IN ROLE tensile_user")
    script = tool(source, "pg_dump", "--no-owner")
    tool(cluster, "psql", "-qX", "-v", "ON_ERROR_STOP=1", stdin=script)
    rows = catalogue(cluster)
    with cluster.connect(user="alice") as conn:
        yield Restored(cluster, rows, conn.execute(PREDICTIONS).fetchall())
    cluster.end()


def test_everything_that_is_finished_comes_back(source: Any, restored: Restored) -> None:
    assert catalogue(source) == restored.rows
    assert [len(rows) for rows in restored.rows] == [1, 1, 1, 2, 1, 1, 1, 1, 1, 4, 16]


def test_a_restored_model_predicts_the_same_numbers(source: Any, restored: Restored) -> None:
    with source.connect() as conn:
        assert conn.execute(PREDICTIONS).fetchall() == restored.predictions


def test_a_restored_materialized_view_has_its_predictions(restored: Restored) -> None:
    """Its refresh is the last step, when the models are there."""
    with restored.cluster.connect() as conn:
        assert conn.execute("TABLE waves").fetchall() == restored.predictions


def test_restoring_starts_no_job(restored: Restored) -> None:
    with restored.cluster.connect() as conn:
        assert value(conn, "SELECT count(*) FROM tensile.jobs WHERE ended_at IS NULL") == 0
        assert value(conn, "SELECT count(*) FROM tensile_internal.checkpoints") == 0
        assert value(conn, "SELECT count(*) FROM tensile_internal.epochs WHERE job = 1000") == 0


def test_owners_are_found_by_name(source: Any, restored: Restored) -> None:
    oid = "SELECT owner_id::bigint FROM tensile.models"
    with source.connect() as old, restored.cluster.connect() as new:
        assert value(old, oid) != value(new, oid) == value(new, "SELECT 'alice'::regrole::oid::bigint")
        assert value(new, "SELECT DISTINCT owner_id::regrole::text FROM tensile.jobs") == "alice"
        assert visible(new, "alice", "model_weights") >= 1
    with restored.cluster.connect(user="alice") as conn, conn.transaction(force_rollback=True):
        conn.execute("SELECT revoke_model('wave', 'public')")


def test_a_missing_role_loses_no_rows_and_grants_no_rights(restored: Restored) -> None:
    """In a transaction that leaves neither role nor job."""
    with restored.cluster.connect() as conn, conn.transaction(force_rollback=True):
        bobs = "SELECT grantee, privilege FROM tensile_internal.model_grants WHERE grantee_name = 'bob'"
        assert conn.execute(bobs).fetchall() == [(None, "train")]
        assert value(conn, "SELECT privilege FROM tensile.model_grants WHERE grantee = 'bob'") == "train"
        conn.execute("CREATE ROLE bob LOGIN IN ROLE tensile_user; SET LOCAL ROLE bob")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            conn.execute(TRAIN)
        conn.execute("SET LOCAL ROLE alice; SELECT grant_model('wave', 'bob', 'train')")
        conn.execute("SET LOCAL ROLE bob")
        conn.execute(TRAIN)


def test_a_restored_database_continues_training(restored: Restored) -> None:
    with restored.cluster.connect(user="alice") as conn:
        last = value(conn, "SELECT max(job) FROM tensile.jobs")
        train(conn)
        assert value(conn, "SELECT max(job) FROM tensile.jobs") > last
        versions = conn.execute("SELECT version FROM tensile.model_versions ORDER BY version_id").fetchall()
        assert versions == [(1,), (2,)]
        assert value(conn, "SELECT deployed_version FROM tensile.models WHERE model = 'wave'") == 2
        assert value(conn, "SELECT register_model('next', '{\"type\": \"mlp\"}')") > value(
            conn, "SELECT model_id FROM tensile.models WHERE model = 'wave'"
        )


def test_a_dump_needs_to_see_every_row(source: Any) -> None:
    """Otherwise the dump would silently lack models of other roles."""
    assert "COPY tensile_internal.model_weights" in tool(source, "pg_dump", user="dumper")
    with source.connect() as conn:
        conn.execute("ALTER ROLE dumper NOBYPASSRLS")
    with pytest.raises(RuntimeError, match="row-level security"):
        tool(source, "pg_dump", user="dumper")


def test_the_owner_of_a_database_dumps_all_but_the_models(source: Any) -> None:
    """With the command in docs/operations.md; both a superuser and the owner can restore it."""
    with source.connect() as conn:
        conn.execute("CREATE ROLE keeper LOGIN IN ROLE tensile_user")
        for name in ("shop", "by_superuser", "by_keeper"):
            conn.execute(f"CREATE DATABASE {name} OWNER keeper")
    with source.connect("shop") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute("SELECT register_model('private')")
    with source.connect("shop", user="keeper") as conn:
        conn.execute("CREATE TABLE orders AS SELECT 1 AS amount")
        conn.execute("CREATE VIEW forecasts AS SELECT predict('private', o) FROM orders o")
    with pytest.raises(RuntimeError, match="permission denied for schema tensile_internal"):
        tool(source, "pg_dump", user="keeper", database="shop")
    dump = tool(source, "pg_dump", "--exclude-table-data=tensile_internal.*", user="keeper", database="shop")
    with source.connect("by_keeper") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    tool(source, "psql", "-qX", "-v", "ON_ERROR_STOP=1", database="by_superuser", stdin=dump)
    owned = "ERROR:  must be owner of extension"
    keepers = [str(source.bin / "psql"), "-qX", source.dsn("by_keeper", user="keeper")]
    done = subprocess.run(keepers, input=dump, capture_output=True, text=True, check=True)
    assert {line.removeprefix(owned) for line in done.stderr.splitlines()} == {" plpython3u", " pg_tensile"}
    for name in ("by_superuser", "by_keeper"):
        with source.connect(name) as conn:
            assert value(conn, "SELECT amount FROM orders") == 1
            assert value(conn, "SELECT count(*) FROM tensile.models") == 0
            with pytest.raises(psycopg.errors.UndefinedObject, match='model "private" does not exist'):
                conn.execute("TABLE forecasts")


def test_a_dump_and_a_restore_by_several_processes(
    source: Any, new_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "dump")
    tool(source, "pg_dump", "--no-owner", "--format=directory", "--jobs=4", f"--file={folder}")
    cluster = new_cluster(extension=False)
    try:
        with cluster.connect() as conn:
            conn.execute("CREATE ROLE tensile_user; CREATE ROLE alice LOGIN IN ROLE tensile_user; CREATE ROLE bob")
        tool(cluster, "pg_restore", "--jobs=4", "--exit-on-error", folder)
        assert catalogue(cluster) == catalogue(source)
        with source.connect() as old, cluster.connect() as new:
            assert old.execute("TABLE waves").fetchall() == new.execute("TABLE waves").fetchall() != []
    finally:
        cluster.end()
