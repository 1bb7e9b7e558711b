"""ALTER EXTENSION pg_tensile UPDATE with the present library: the catalogue becomes that of a new installation, and
rows stay, also those that a dump of the older version has brought.

test_upgrade.py updates an installation of 0.1.0 that has trained.
"""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
import pytest

from tests.server.catalogue import describe
from tests.server.support import Connection, value

RELEASE = "VERSION '0.1.0'"
FILL = """
    CREATE ROLE alice LOGIN;
    INSERT INTO tensile.models (name, owner_name, architecture, description)
        VALUES ('first', 'alice', '{"type": "mlp", "hidden": [4]}', 'a model');
    INSERT INTO tensile.model_grants (model, grantee_name, privilege, grantor_name)
        VALUES (1, 'public', 'predict', 'alice');
    INSERT INTO tensile.model_versions (model, version, job, task, preprocessing, architecture, weight_bytes)
        SELECT id, 1, 1, 'regression', '{}', architecture, 3 FROM tensile.models;
    INSERT INTO tensile.model_weights VALUES (1, 0, 'abc');
    UPDATE tensile.models SET deployed_version = 1;
    INSERT INTO tensile.jobs (model, model_name, owner_name, query, target, epochs, batch_size, optimizer,
                              learning_rate, validation, seed, priority, options, settings, state, ended_at)
        SELECT id, name, owner_name, 'SELECT 1', 'y', 1, 8, 'sgd', 0.5, 0.2, 0, 0, '{}', '{}', 'finished', now()
        FROM tensile.models;
    INSERT INTO tensile.metrics (job, epoch, split, samples, loss, rmse, seconds)
        VALUES (1, 1, 'training', 8, 0.5, 2, 1)
"""
# Rows of the updated database, by the views that users read
ROWS = {
    "SELECT model_id, model, owner, architecture->>'type', description, deployed_version, keep_versions"
    " FROM tensile.models": ((1, "first", "alice", "mlp", "a model", 1, 0),),
    "SELECT model, version, job, task, weight_bytes FROM tensile.model_versions": (("first", 1, 1, "regression", 3),),
    "SELECT version, seq, data FROM tensile_internal.model_weights": ((1, 0, b"abc"),),
    "SELECT model, grantee, privilege, grantor FROM tensile.model_grants": (("first", "public", "predict", "alice"),),
    "SELECT job, model, model_id, owner, owner_id::regrole::text, state, learning_rate FROM tensile.jobs": (
        (1, "first", 1, "alice", "alice", "finished", 0.5),
    ),
    "SELECT job, epoch, split, samples, loss, rmse, r2 FROM tensile.epoch_metrics": (
        (1, 1, "training", 8, 0.5, 2, None),
    ),
    "SELECT model, version, decision, decided_by FROM tensile.deployments": (("first", 1, "deployed", "alice"),),
}


class Updated(NamedTuple):
    """A cluster with the updated database "old", the new one "fresh", and "restored" with a dump of "old" before."""

    cluster: Any
    routines: set[str]  # names of the public functions of the release
    warnings: list[str]


def extension(conn: Connection, version: str = "") -> None:
    conn.execute(f"CREATE EXTENSION pg_tensile {version} CASCADE")


@pytest.fixture(scope="module")
def updated(new_cluster: Callable[..., Any]) -> Iterator[Updated]:
    cluster = new_cluster(extension=False)
    with cluster.connect() as conn:
        for name in ("old", "fresh", "restored"):
            conn.execute(f"CREATE DATABASE {name}")
    with cluster.connect("fresh") as conn:
        extension(conn)
    with cluster.connect("old") as conn:
        extension(conn, RELEASE)
        conn.execute(FILL)
        dump = subprocess.run([cluster.bin / "pg_dump", cluster.dsn("old")], check=True, capture_output=True).stdout
        routines = value(
            conn,
            "SELECT array_agg(DISTINCT p.proname::text) FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid"
            " AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e' WHERE p.pronamespace = 'public'::regnamespace"
            " AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_tensile')",
        )
        warnings: list[str] = []
        conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
        conn.execute("ALTER EXTENSION pg_tensile UPDATE")
    with cluster.connect("restored") as conn:
        extension(conn, RELEASE)  # docs/operations.md says so
        psql = [cluster.bin / "psql", "-qX", "-v", "ON_ERROR_STOP=1", cluster.dsn("restored")]
        subprocess.run(psql, input=dump, check=True, capture_output=True)
        conn.execute("ALTER EXTENSION pg_tensile UPDATE")
    yield Updated(cluster, set(routines), warnings)
    cluster.end()


def test_the_catalogue_is_that_of_a_fresh_installation(updated: Updated) -> None:
    """Privileges that PUBLIC had, and keeps, are excepted."""
    with updated.cluster.connect("fresh") as conn:
        fresh = describe(conn)
    with updated.cluster.connect("old") as conn:
        described = describe(conn)
    kept = {f"schema {name} | rights: PUBLIC: USAGE" for name in ("tensile", "tensile_worker")}
    right = re.compile(r"function (\w+)\(.*\) \| rights: PUBLIC: EXECUTE")
    kept |= {line for line in described if (match := right.fullmatch(line)) and match[1] in updated.routines}
    assert len(kept) > len(updated.routines) and not kept & {*fresh}
    present = [line for line in described if line not in kept]
    difference = "\n".join(difflib.unified_diff(fresh, present, "fresh", "updated", n=1, lineterm=""))
    assert not difference, f"after ALTER EXTENSION UPDATE the catalogue differs:\n{difference}"


@pytest.mark.parametrize("database", ["old", "restored"])
def test_rows_stay(updated: Updated, database: str) -> None:
    with updated.cluster.connect(database) as conn:
        for query, rows in ROWS.items():
            assert conn.execute(query).fetchall() == [*rows], query


def test_the_update_tells_that_it_revokes_nothing(updated: Updated) -> None:
    assert updated.warnings == ["PUBLIC may use pg_tensile as before"]


def test_released_names_work(updated: Updated) -> None:
    """The messages are those of the functions that they stand for."""
    with updated.cluster.connect("old") as conn:
        for call, sqlstate in (("CALL wait_for_job_procedure(-1)", "42704"), ("SELECT tensile.calibrate(0)", "55000")):
            with pytest.raises(psycopg.Error) as caught:
                conn.execute(call)
            assert caught.value.sqlstate == sqlstate
        assert conn.execute("CALL wait_for_job_procedure(1)").fetchone() == ("finished",)


def test_functions_of_the_release_say_what_to_do(updated: Updated) -> None:
    with updated.cluster.connect() as conn:
        conn.execute("CREATE DATABASE kept")
    with updated.cluster.connect("kept") as conn:
        extension(conn, RELEASE)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=r"has version 0\.1\.0") as caught:
            conn.execute("SELECT tensile._check_options('{}')")
        assert "ALTER EXTENSION pg_tensile UPDATE" in (caught.value.diag.message_hint or "")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            conn.execute("SELECT drop_model('m')")
        assert "ALTER EXTENSION pg_tensile UPDATE" in (caught.value.diag.message_hint or "")
