"""Functions of a model in snapshots from before the model, and from before its deployed version."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.server.shared import SharedServer
from tests.server.support import Connection, submit, value

MLP = {"type": "mlp", "hidden": [4]}
FUNCTIONS = """
    SELECT p.oid::regprocedure::text, p.proname, p.proargnames, string_to_array(p.proargtypes::text, ' ')::regtype[],
           p.pronargs - p.pronargdefaults
    FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
    WHERE p.proargnames[1] = 'model' AND p.proname !~ '^_' AND p.prokind = 'f' ORDER BY 1
"""
ARGUMENTS = {  # by name; features by their type
    "query": "'SELECT x, y FROM numbers'",
    "target": "'y'",
    "features record": "f",
    "features jsonb": "jsonb_build_object('x', f.x)",
    "features json": "json_build_object('x', f.x)",
    "features text": "json_build_object('x', f.x)::text",
    "features double precision[]": "ARRAY[f.x]",
    "document": "'text'",
    "version": "1",
    "grantee": "'public'",
    "role": "current_user::text",
    "every": "'1 day'",
    "into_table": "'kept'",
    "memory_budget": "'1GB'",
    "keep_versions": "9",
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    with shared_server.connect() as conn:
        conn.execute("CREATE TABLE numbers AS SELECT i::float8 AS x, 2.0 * i AS y FROM generate_series(1, 100) i")
        job = submit(conn, "trained", MLP, query="SELECT * FROM numbers", target="y", epochs=1)
        assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture
def old(server: SharedServer) -> Iterator[Connection]:
    """A session whose snapshot is that of the beginning of the test."""
    with server.connect(autocommit=False) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT 1 FROM numbers")
        yield conn
        conn.rollback()


def add_version(conn: Connection, model: str) -> None:
    version = value(conn, "SELECT import_model(export_model('trained'), %s)", model)
    conn.execute("SELECT deploy_model(%s, %s)", (model, version))


def calls(conn: Connection, model: str) -> list[str]:
    """Return a statement for each public function of a model, with its required arguments."""
    statements = []
    for _, name, names, types, required in conn.execute(FUNCTIONS).fetchall():
        values = [
            ARGUMENTS.get(argument) or ARGUMENTS[f"{argument} {kind}"]
            for argument, kind in [*zip(names, types, strict=False)][1 : max(required, 1)]
        ]
        statements.append(f"SELECT {name}({', '.join([repr(model), *values])}) FROM (TABLE numbers LIMIT 1) f")
    return statements


@pytest.mark.parametrize("exists", [False, True], ids=["before the model", "before its version"])
def test_functions_answer_or_say_that_the_snapshot_is_too_old(
    server: SharedServer, old: Connection, exists: bool
) -> None:
    with server.connect() as conn:
        if exists:
            add_version(conn, "younger")
            old.rollback()
            old.execute("SELECT 1 FROM numbers")
        add_version(conn, "younger")
        conn.execute("DROP TABLE IF EXISTS kept")
        failures = {}
        for statement in calls(conn, "younger"):
            try:
                with old.transaction(force_rollback=True):
                    old.execute(statement)
            except psycopg.Error as error:
                failures[statement] = error.sqlstate or ""
    internal = {statement: state for statement, state in failures.items() if state[:2] in ("", "XX", "23")}
    assert not internal
    refused = failures["SELECT predict_table('younger') FROM (TABLE numbers LIMIT 1) f"]
    assert refused == ("55000" if exists else "42704")  # an imported version has no query
    assert value(old, "SELECT 1") == 1
