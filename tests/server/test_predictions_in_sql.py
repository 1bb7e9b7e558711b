"""Where predictions can stand in SQL, and whose rights they have there (docs/predictions.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import Connection, finish, submit, value

POINTS = """
    CREATE TABLE points AS
    SELECT i AS id, cos(i) AS a, sin(i * 0.7) AS b, 3 * cos(i) + sin(i * 0.7) AS height, NULL::float8 AS expected
    FROM generate_series(1, 100) i;
    ALTER TABLE points ADD PRIMARY KEY (id);
    GRANT SELECT ON points TO PUBLIC
"""
EXPECTED = "SELECT id, predict('height', p) FROM points p ORDER BY id"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with two versions of a model; the role agent may predict with it, the role clerk may not."""
    with shared_server.connect() as conn:
        conn.execute(POINTS)
        query = "SELECT a, b, height FROM points"
        finish(conn, submit(conn, "height", {"type": "mlp", "hidden": [8]}, query=query, target="height", seed=1))
        finish(conn, submit(conn, "height", query=query, target="height", seed=2))
        conn.execute("CREATE ROLE agent LOGIN IN ROLE tensile_user; CREATE ROLE clerk LOGIN IN ROLE tensile_user")
        conn.execute("CREATE ROLE stranger LOGIN; SELECT grant_model('height', 'agent')")
        conn.execute(EXPECTED)  # starts the predictor
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    """A session of a superuser, whose changes are undone."""
    with server.connect(autocommit=False) as made:
        yield made
        made.rollback()


@pytest.fixture
def expected(conn: Connection) -> list[tuple[Any, ...]]:
    rows = conn.execute(EXPECTED).fetchall()
    assert len({prediction for _, prediction in rows}) > 50
    return rows


def rows(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    return conn.execute(query.encode()).fetchall()


def refused_in_block(conn: Connection, statement: str) -> tuple[Any, ...]:
    """Return SQLSTATE, message and hint of a statement that fails, without the end of the transaction."""
    conn.execute("SAVEPOINT before")
    found = refusal(conn, statement)
    conn.execute("ROLLBACK TO before")
    return found


# ---- what stores queries, and what stores their rows ----


def test_views_predict_when_they_are_read(conn: Connection, expected: Any) -> None:
    conn.execute("CREATE VIEW heights AS SELECT id, predict('height', p) AS height FROM points p")
    assert rows(conn, "SELECT * FROM heights ORDER BY id") == expected
    assert rows(conn, "SELECT height FROM heights WHERE id = 7") == [(expected[6][1],)]
    conn.execute("SELECT deploy_model('height', 1)")
    assert rows(conn, "SELECT * FROM heights ORDER BY id") != expected


def test_materialized_views_predict_when_they_are_refreshed(conn: Connection, expected: Any) -> None:
    conn.execute("CREATE MATERIALIZED VIEW heights AS SELECT id, predict('height', p) AS height FROM points p")
    conn.execute("CREATE UNIQUE INDEX ON heights (id)")
    conn.execute("UPDATE points SET a = b; SELECT deploy_model('height', 1)")
    assert rows(conn, "SELECT * FROM heights ORDER BY id") == expected
    changed = rows(conn, EXPECTED)
    schema = value(conn, "SELECT current_schema()")
    conn.execute("SET LOCAL search_path = pg_catalog, pg_temp")  # that of a refresh from PostgreSQL 17 on
    conn.execute(f"REFRESH MATERIALIZED VIEW CONCURRENTLY {schema}.heights")
    assert rows(conn, f"SELECT * FROM {schema}.heights ORDER BY id") == changed != expected


def test_tables_and_files_take_predictions(conn: Connection, expected: Any) -> None:
    conn.execute(f"CREATE TABLE heights AS {EXPECTED}")
    assert rows(conn, "SELECT * FROM heights ORDER BY id") == expected
    conn.execute("TRUNCATE heights; INSERT INTO heights SELECT id, predict('height', p) FROM points p")
    assert rows(conn, "SELECT * FROM heights ORDER BY id") == expected
    conn.execute("UPDATE points p SET expected = predict('height', p)")
    assert rows(conn, "SELECT id, expected FROM points ORDER BY id") == expected
    returned = conn.execute("INSERT INTO points VALUES (101, 0.5, 0.5) RETURNING predict('height', points)").fetchall()
    assert returned == rows(conn, "SELECT predict('height', ARRAY[0.5, 0.5])")
    conn.execute("DELETE FROM points WHERE id = 101")
    with conn.cursor().copy(f"COPY ({EXPECTED}) TO STDOUT") as copy:
        assert [(int(row[0]), float(row[1])) for row in copy.rows()] == expected


def test_cursors_stop_between_predictions(conn: Connection, expected: Any) -> None:
    conn.execute(f"DECLARE heights SCROLL CURSOR FOR {EXPECTED}")
    assert rows(conn, "FETCH 3 FROM heights") == expected[:3]
    assert rows(conn, "FETCH LAST FROM heights") == expected[-1:]
    assert rows(conn, "FETCH FIRST FROM heights") == expected[:1]


# ---- prepared statements ----


def test_prepared_statements_use_the_version_that_is_deployed(conn: Connection, expected: Any) -> None:
    """The first five executions have plans of their own, the others a generic one."""
    ask = "SELECT predict(%s, p) FROM points p WHERE id = %s"
    for id, prediction in expected[:7]:
        assert conn.execute(ask, ("height", id), prepare=True).fetchall() == [(prediction,)]
    conn.execute("ALTER TABLE points ADD note text, ADD c float8; ALTER TABLE points DROP b, ADD b float8 DEFAULT 1")
    changed = value(conn, "SELECT predict('height', p) FROM points p WHERE id = 3")
    assert changed != expected[2][1]
    assert conn.execute(ask, ("height", 3), prepare=True).fetchall() == [(changed,)]
    conn.execute("SELECT deploy_model('height', 1)")
    assert conn.execute(ask, ("height", 3), prepare=True).fetchall() != [(changed,)]
    conn.execute("ALTER TABLE points DROP b")
    conn.execute("SAVEPOINT before")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        conn.execute(ask, ("height", 3), prepare=True)
    conn.execute("ROLLBACK TO before")
    assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() != (0,)


# ---- functions and triggers ----


def test_triggers_predict_for_the_new_row(conn: Connection, expected: Any) -> None:
    conn.execute("""
        CREATE FUNCTION expect() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN NEW.expected := predict('height', NEW); RETURN NEW; END $$;
        CREATE TRIGGER expect BEFORE INSERT OR UPDATE ON points FOR EACH ROW EXECUTE FUNCTION expect()
    """)
    conn.execute("INSERT INTO points SELECT id + 1000, a, b FROM points")
    assert rows(conn, "SELECT id - 1000, expected FROM points WHERE id > 1000 ORDER BY id") == expected
    conn.execute("UPDATE points SET id = id WHERE id <= 1000")
    assert rows(conn, "SELECT id, expected FROM points WHERE id <= 1000 ORDER BY id") == expected


def test_functions_predict_for_their_variables(conn: Connection, expected: Any) -> None:
    conn.execute("""
        CREATE FUNCTION heights() RETURNS SETOF float8 LANGUAGE plpgsql AS $$
        DECLARE p points; features jsonb;
        BEGIN
            FOR p IN SELECT * FROM points ORDER BY id LOOP
                features := jsonb_build_object('a', p.a, 'b', p.b);
                IF p.id % 2 = 0 THEN
                    RETURN NEXT predict('height', p);
                ELSE
                    RETURN NEXT predict('height', features);
                END IF;
            END LOOP;
        END $$;
        CREATE FUNCTION height(p points) RETURNS float8 STABLE LANGUAGE sql RETURN predict('height', p);
    """)
    assert [height for (height,) in rows(conn, "SELECT heights()")] == [height for _, height in expected]
    assert rows(conn, "SELECT id, height(p) FROM points p ORDER BY id") == expected


# ---- what wants an immutable function ----


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE points ADD later float8 GENERATED ALWAYS AS (predict('height', ARRAY[a, b])) STORED",
        "CREATE INDEX ON points (predict('height', ARRAY[a, b]))",
        "CREATE INDEX ON points (id) WHERE predict('height', ARRAY[a, b]) > 0",
        "CREATE TABLE parts (a float8, b float8) PARTITION BY RANGE (predict('height', ARRAY[a, b]))",
    ],
)
def test_what_has_to_stay_true_is_refused(conn: Connection, statement: str) -> None:
    assert refused_in_block(conn, statement)[0] == "42P17"


def test_a_check_may_predict(conn: Connection, expected: Any) -> None:
    least = min(height for _, height in expected)
    conn.execute(f"ALTER TABLE points ADD CHECK (predict('height', points) >= {least!r})".encode())
    conn.execute("ALTER TABLE points ADD CHECK (predict('height', points) > 1e6) NOT VALID")
    assert refused_in_block(conn, "UPDATE points SET a = 0 WHERE id = 1")[0] == "23514"


# ---- foreign tables ----


def test_foreign_tables_predict_there_or_here(server: Any) -> None:
    """A view that predicts is read through postgres_fdw, and predictions are made for rows that come through it."""
    with server.connect() as conn:
        here = value(conn, "SELECT current_schema()")
        socket, port = value(conn, "SHOW unix_socket_directories").split(",")[0], value(conn, "SHOW port")
        expected = rows(conn, EXPECTED)
        conn.execute(f"""
            CREATE EXTENSION postgres_fdw SCHEMA {here};
            CREATE SERVER loopback FOREIGN DATA WRAPPER postgres_fdw
                OPTIONS (host '{socket}', port '{port}', dbname 'postgres');
            CREATE USER MAPPING FOR CURRENT_USER SERVER loopback OPTIONS (user 'postgres');
            CREATE VIEW there AS SELECT id, predict('height', p) AS height FROM points p;
            CREATE FOREIGN TABLE heights (id int, height float8) SERVER loopback
                OPTIONS (schema_name '{here}', table_name 'there');
            CREATE FOREIGN TABLE far (id int, a float8, b float8) SERVER loopback
                OPTIONS (schema_name '{here}', table_name 'points')
        """)
        try:
            assert rows(conn, "SELECT * FROM heights ORDER BY id") == expected
            assert rows(conn, "SELECT height FROM heights WHERE id = 7") == [(expected[6][1],)]
            assert rows(conn, "SELECT id, predict('height', f) FROM far f ORDER BY id") == expected
            found = rows(conn, "SELECT id FROM far f WHERE predict('height', f) > 0 ORDER BY id")
            assert found == [(id,) for id, height in expected if height > 0]
            conn.execute("GRANT SELECT ON there TO clerk")
            conn.execute("ALTER USER MAPPING FOR CURRENT_USER SERVER loopback OPTIONS (SET user 'clerk')")
            assert refusal(conn, "SELECT height FROM heights")[0] == "42501"
        finally:
            conn.execute("DROP EXTENSION postgres_fdw CASCADE; DROP VIEW there")


# ---- rights ----


def test_views_predict_with_the_rights_of_the_role_that_reads_them(conn: Connection) -> None:
    conn.execute("CREATE VIEW heights AS SELECT id, predict('height', p) AS height FROM points p")
    conn.execute("GRANT SELECT ON heights TO PUBLIC; SET LOCAL ROLE agent")
    assert len(rows(conn, "SELECT height FROM heights")) == 100
    conn.execute("SET LOCAL ROLE clerk")
    assert rows(conn, "SELECT count(*) FROM heights") == [(100,)]  # which predicts nothing
    sqlstate, message, hint = refused_in_block(conn, "SELECT height FROM heights")
    assert sqlstate == "42501" and "permission denied to predict" in message and "grant_model" in hint
    conn.execute("SET LOCAL ROLE stranger")
    sqlstate, message, hint = refused_in_block(conn, "SELECT height FROM heights")
    assert sqlstate == "42501" and "permission denied for" in message and "tensile_user" in hint


def test_materialized_views_predict_with_the_rights_of_their_owner(conn: Connection) -> None:
    conn.execute(f"GRANT CREATE ON SCHEMA {value(conn, 'SELECT current_schema()')} TO agent, clerk")
    heights = "MATERIALIZED VIEW heights AS SELECT id, predict('height', p) AS height FROM points p"
    conn.execute(f"SET LOCAL ROLE agent; CREATE {heights}; GRANT SELECT ON heights TO PUBLIC")
    conn.execute("SET LOCAL ROLE stranger")
    assert len(rows(conn, "SELECT height FROM heights")) == 100
    conn.execute("RESET ROLE; REFRESH MATERIALIZED VIEW heights; SELECT revoke_model('height', 'agent')")
    assert refused_in_block(conn, "REFRESH MATERIALIZED VIEW heights")[0] == "42501"


def test_functions_predict_with_the_rights_of_their_caller_or_definer(conn: Connection) -> None:
    schema = value(conn, "SELECT current_schema()")
    conn.execute(f"GRANT CREATE ON SCHEMA {schema} TO clerk")
    create = f"""
        CREATE FUNCTION %s RETURNS float8 LANGUAGE plpgsql %s SET search_path = {schema}, public AS
        $$ BEGIN RETURN predict('height', '{{"a": 1, "b": 0}}'); END $$
    """
    conn.execute((create % ("of_caller()", "")).encode())
    conn.execute((create % ("of_definer()", "SECURITY DEFINER")).encode())
    conn.execute("SET LOCAL ROLE clerk")
    conn.execute((create % ("of_clerk()", "SECURITY DEFINER")).encode())
    assert value(conn, "SELECT of_definer()") is not None
    for function in ("of_caller()", "of_clerk()"):
        assert refused_in_block(conn, f"SELECT {function}")[0] == "42501"
    conn.execute("RESET ROLE")
    assert value(conn, "SELECT of_caller()") is not None
    assert refused_in_block(conn, "SELECT of_clerk()")[0] == "42501"
    alternating = "SELECT of_definer(), of_clerk() FROM generate_series(1, 3)"  # the right of each call is checked
    assert refused_in_block(conn, alternating)[0] == "42501"


def test_rows_that_a_policy_hides_are_not_predicted(conn: Connection, expected: Any) -> None:
    counted = "SELECT coalesce(sum(rows), 0)::int FROM tensile.predictions WHERE model = 'height'"
    conn.execute("ALTER TABLE points ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON points USING (id <= 10)")
    before = value(conn, counted)
    conn.execute("SET LOCAL ROLE agent")
    assert rows(conn, EXPECTED) == expected[:10]
    assert rows(conn, "SELECT id FROM points p WHERE predict('height', p) > -1e9 ORDER BY id") == [
        (id,) for id in range(1, 11)
    ]
    conn.execute("RESET ROLE")
    assert value(conn, counted) == before + 20


def test_a_policy_may_predict(conn: Connection, expected: Any) -> None:
    """With the rights of the role that reads the table."""
    conn.execute("ALTER TABLE points ENABLE ROW LEVEL SECURITY")
    conn.execute("CREATE POLICY high ON points USING (predict('height', points) > 0); SET LOCAL ROLE agent")
    assert rows(conn, "SELECT id FROM points ORDER BY id") == [(id,) for id, height in expected if height > 0]
    conn.execute("SET LOCAL ROLE clerk")
    assert refused_in_block(conn, "SELECT id FROM points")[0] == "42501"
