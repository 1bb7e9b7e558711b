"""Sources of versions, and predict_rows without a query: views, joins, renamed and dropped tables, roles.

Each model is trained once for the file, for an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import Connection, submit, value

TABLES = """
    CREATE SCHEMA air;
    CREATE TABLE air.flights (id int PRIMARY KEY, carrier text, distance float8, note text, departed timestamptz,
                              delay float8);
    INSERT INTO air.flights
        SELECT i, (ARRAY['UA', 'AA', 'DL'])[i % 3 + 1], i % 50, 'note', '2024-01-01'::timestamptz + i * interval '1 h',
               CASE WHEN i % 10 > 0 THEN i % 7 END
        FROM generate_series(1, 200) i;
    CREATE TABLE air.arrivals (flight int PRIMARY KEY, minutes float8);
    INSERT INTO air.arrivals SELECT id, delay FROM air.flights WHERE delay IS NOT NULL;
    CREATE TABLE air.checks (flight int, minutes float8);
    INSERT INTO air.checks SELECT id, delay FROM air.flights WHERE delay IS NOT NULL;
    CREATE VIEW air.short AS SELECT carrier, distance, delay FROM air.flights WHERE distance < 40;
    CREATE MATERIALIZED VIEW air.kept AS SELECT carrier, distance, delay FROM air.flights;
    CREATE TABLE air.days (day int, x float8, y float8) PARTITION BY RANGE (day);
    CREATE TABLE air.first PARTITION OF air.days FOR VALUES FROM (0) TO (100);
    INSERT INTO air.days SELECT i % 100, i, i FROM generate_series(1, 100) i;
    CREATE TABLE air.doomed AS SELECT x, y FROM air.days;
    GRANT USAGE ON SCHEMA air TO PUBLIC;
    GRANT SELECT ON ALL TABLES IN SCHEMA air TO PUBLIC
"""
TRAINED = {  # query, target
    "plain": ("SELECT carrier, distance, delay FROM flights WHERE delay IS NOT NULL AND distance < 45", "delay"),
    "star": ("SELECT * FROM flights WHERE delay IS NOT NULL", "delay"),
    "view": ("SELECT carrier, distance, delay FROM air.short WHERE delay IS NOT NULL", "delay"),
    "kept": ("SELECT carrier, distance, delay FROM air.kept WHERE delay IS NOT NULL", "delay"),
    "joined": (
        "SELECT f.carrier, f.distance, a.minutes > 3 AS late FROM flights f JOIN arrivals a ON a.flight = f.id"
        " WHERE a.minutes IS NOT NULL",
        "late",
    ),
    "checked": (
        "SELECT f.carrier, f.distance, c.minutes > 3 AS late FROM flights f JOIN checks c ON c.flight = f.id",
        "late",
    ),
    "parted": ("SELECT x, y FROM days WHERE y IS NOT NULL", "y"),
    "doomed": ("SELECT x, y FROM doomed", "y"),
    "hour": ("SELECT extract(hour FROM departed)::int AS hour, delay FROM flights WHERE delay IS NOT NULL", "delay"),
    "limited": ("SELECT carrier, distance, delay FROM flights WHERE delay IS NOT NULL LIMIT 100", "delay"),
    "calling": ("SELECT carrier, air.far(distance) AS far, delay FROM flights WHERE delay IS NOT NULL", "delay"),
}


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with models of role alice."""
    with shared_server.connect() as conn:
        conn.execute(TABLES)
        for role in ("alice", "mallory"):
            conn.execute(f"CREATE ROLE {role} LOGIN IN ROLE tensile_user")
        conn.execute("GRANT CREATE ON SCHEMA air TO alice")
    with shared_server.connect(user="alice", options="-c search_path=air,public -c TimeZone=Asia/Tokyo") as alice:
        alice.execute("CREATE FUNCTION air.far(float8) RETURNS float8 IMMUTABLE RETURN $1 * 2")
        jobs = [
            submit(alice, name, {"type": "mlp", "hidden": [4]}, query=query, target=target, epochs=1, seed=1)
            for name, (query, target) in TRAINED.items()
        ]
        for job in jobs:
            assert value(alice, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


@pytest.fixture
def alice(server: Any) -> Iterator[Connection]:
    with server.connect(user="alice") as connection:
        yield connection


def sources(conn: Connection, model: str) -> list[tuple[Any, ...]]:
    return conn.execute(
        "SELECT purpose, schema_name || '.' || relation_name, kind, columns::text[] FROM tensile.model_sources"
        " WHERE model = %s ORDER BY 1, 2",
        (model,),
    ).fetchall()


def dependents(conn: Connection, table: str) -> dict[str, list[str]]:
    rows = conn.execute("SELECT model, columns::text[] FROM models_of_table(%s::regclass)", (table,)).fetchall()
    return dict(rows)


def derived(conn: Connection, model: str) -> dict[str, Any]:
    """Return the query for predictions of the model's version, with its reason."""
    return dict(value(conn, "SELECT prediction_query FROM tensile.model_versions WHERE model = %s", model))


def predicted(conn: Connection, *arguments: Any) -> list[tuple[Any, ...]]:
    places = ", ".join(["%s", "%s::regclass"][: len(arguments)])
    return conn.execute(f"SELECT * FROM predict_table({places})", arguments).fetchall()


# -- lineage ----------------------------------------------------------------------------------------------------------


def test_a_version_knows_its_tables_and_columns(conn: Connection) -> None:
    assert sources(conn, "plain") == [("training", "air.flights", "table", ["carrier", "distance", "delay"])]
    columns = ["id", "carrier", "distance", "note", "departed", "delay"]
    assert sources(conn, "star") == [("training", "air.flights", "table", columns)]
    assert sources(conn, "joined") == [
        ("training", "air.arrivals", "table", ["flight", "minutes"]),
        ("training", "air.flights", "table", ["id", "carrier", "distance"]),
    ]
    assert sources(conn, "parted") == [("training", "air.days", "partitioned table", ["x", "y"])]


def test_views_are_listed_with_what_they_read(conn: Connection) -> None:
    assert sources(conn, "view") == [
        ("training", "air.flights", "table", ["carrier", "distance", "delay"]),
        ("training", "air.short", "view", ["carrier", "distance", "delay"]),
    ]
    assert sources(conn, "kept") == [
        ("training", "air.kept", "materialized view", ["carrier", "distance", "delay"])
    ]  # fmt: skip


def test_the_models_of_a_table(conn: Connection) -> None:
    of_flights = {"plain", "star", "view", "kept", "joined", "checked", "hour", "limited", "calling"}
    assert dependents(conn, "air.flights").keys() == of_flights
    assert dependents(conn, "air.arrivals") == {"joined": ["flight", "minutes"]}
    assert dependents(conn, "air.short") == {"view": ["carrier", "delay", "distance"]}
    assert dependents(conn, "air.first") == {"parted": ["x", "y"]}  # by way of its partitioned table
    assert dependents(conn, "tensile.models") == {}
    row = conn.execute(
        "SELECT version, deployed, scheduled, trained_on::text FROM models_of_table('air.days')"
    ).fetchone()
    assert row == (1, True, False, "air.days")
    assert conn.execute("SELECT * FROM models_of_table(NULL)").fetchall() == []


def test_schedules_count_as_dependents(conn: Connection) -> None:
    conn.execute("CREATE TABLE air.stream (x float8, y float8); INSERT INTO air.stream VALUES (1, 1)")
    conn.execute("""SELECT register_model('planned', '{"type": "mlp"}')""")
    conn.execute(
        "SELECT schedule_training('planned', 'SELECT x, y FROM air.days', 'y', rows => 1000000, source => 'air.stream')"
    )
    rows = conn.execute("SELECT model, version, scheduled FROM models_of_table('air.stream')").fetchall()
    assert rows == [("planned", None, True)]
    conn.execute("SELECT drop_model('planned'); DROP TABLE air.stream")


def test_a_renamed_table_is_found_and_a_dropped_one_remembered(conn: Connection) -> None:
    conn.execute("ALTER TABLE air.doomed RENAME TO renamed")
    assert dependents(conn, "air.renamed").keys() == {"doomed"}
    assert sources(conn, "doomed")[0][1] == "air.renamed"
    conn.execute("DROP TABLE air.renamed")
    assert sources(conn, "doomed") == [("training", "air.doomed", "table", ["x", "y"])]
    relation = "SELECT relation::text FROM tensile.model_sources WHERE model = 'doomed'"
    assert value(conn, relation) is None
    conn.execute("CREATE TABLE air.doomed (x float8)")
    assert value(conn, relation) == "air.doomed"
    assert dependents(conn, "air.doomed").keys() == {"doomed"}


def test_a_restored_row_finds_its_table_by_name(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE TEMPORARY TABLE saved AS SELECT * FROM tensile_internal.version_sources")
        conn.execute("UPDATE saved SET relation = 1; DELETE FROM tensile_internal.version_sources")
        conn.execute("INSERT INTO tensile_internal.version_sources SELECT * FROM saved")
        assert dependents(conn, "air.arrivals").keys() == {"joined"}


def test_other_roles_see_nothing(server: Any, conn: Connection) -> None:
    with server.connect(user="mallory") as mallory:
        assert value(mallory, "SELECT count(*) FROM tensile.model_sources") == 0
        assert dependents(mallory, "air.flights") == {}
        conn.execute("SELECT grant_model('joined', 'mallory')")
        assert dependents(mallory, "air.flights").keys() == {"joined"}
        conn.execute("SELECT revoke_model('joined', 'mallory')")
    with server.connect(user="alice") as alice:
        assert "joined" in dependents(alice, "air.flights")


def test_a_dropped_version_leaves_nothing(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT drop_model('joined')")
        assert dependents(conn, "air.arrivals") == {}


# -- predictions without a query --------------------------------------------------------------------------------------


def test_rows_without_a_target_are_predicted_too(alice: Connection) -> None:
    rows = predicted(alice, "plain")
    given = "SELECT carrier, distance FROM air.flights WHERE distance < 45"
    assert len(rows) == value(alice, f"SELECT count(*) FROM ({given}) q") > 0
    expected = alice.execute("SELECT * FROM predict_rows('plain', %s)", (given,)).fetchall()
    assert rows == expected
    assert len(predicted(alice, "star")) == 200


def test_a_join_for_the_target_is_dropped_if_it_has_a_unique_key(alice: Connection) -> None:
    assert "arrivals" not in derived(alice, "joined")["query"]
    assert len(predicted(alice, "joined")) == 200
    assert "checks" in derived(alice, "checked")["query"]  # flight is not unique there
    assert len(predicted(alice, "checked")) == 180


def test_another_table_takes_the_place_of_the_first(conn: Connection) -> None:
    conn.execute("CREATE TABLE air.today AS SELECT carrier, distance, id, departed FROM air.flights WHERE id <= 20")
    assert len(predicted(conn, "plain", "air.today")) == 20
    assert len(predicted(conn, "joined", "air.today")) == 20
    sql = "SELECT * FROM predict_table('plain', source => 'air.today', memory_budget => '1GB')"
    assert len(conn.execute(sql).fetchall()) == 20
    with pytest.raises(psycopg.errors.UndefinedColumn, match="distance"):
        predicted(conn, "plain", "air.checks")
    conn.execute("DROP TABLE air.today")


def test_the_settings_are_those_of_the_training(conn: Connection) -> None:
    given = "SELECT extract(hour FROM departed AT TIME ZONE 'Asia/Tokyo')::int AS hour FROM air.flights"
    conn.execute("SET TimeZone = 'UTC'; SET search_path = public")
    assert predicted(conn, "hour") == conn.execute("SELECT * FROM predict_rows('hour', %s)", (given,)).fetchall()
    assert value(conn, "SHOW TimeZone") == "UTC"


def test_why_there_is_no_query(conn: Connection) -> None:
    message = 'no query for predictions is derived from the training query of model "limited"'
    error = refused("55000", message, "predict_rows('limited', 'SELECT ...')", lambda: predicted(conn, "limited"))
    assert error.diag.message_detail == "the training query has LIMIT or FETCH"
    assert derived(conn, "limited")["query"] is None


def test_null_and_unknown_names(conn: Connection) -> None:
    assert conn.execute("SELECT * FROM predict_table(NULL)").fetchall() == []
    assert conn.execute("SELECT * FROM predict_rows('plain', NULL)").fetchall() == []  # no query
    refused("42704", 'model "plane" does not exist', 'Did you mean "plain"?', lambda: predicted(conn, "plane"))


def test_the_query_runs_with_the_rights_of_its_caller(server: Any, conn: Connection) -> None:
    conn.execute("SELECT grant_model('plain', 'mallory'), grant_model('calling', 'mallory')")
    with server.connect(user="mallory") as mallory:
        assert len(predicted(mallory, "plain")) > 0
        message = 'the query for predictions of model "calling" may run code of another role'
        refused("42501", message, "tensile.model_versions", lambda: predicted(mallory, "calling"))
        conn.execute("REVOKE SELECT ON air.flights FROM PUBLIC")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="flights"):
            predicted(mallory, "plain")
    with (
        server.connect(user="alice") as alice,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="flights"),
    ):
        predicted(alice, "calling")
    conn.execute("GRANT SELECT ON air.flights TO PUBLIC")


TRAPS = """
    CREATE FUNCTION air.trap(x float8) RETURNS float8 IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
        IF current_user <> 'alice' THEN RAISE EXCEPTION 'it ran as %', current_user; END IF;
        RETURN x;
    END $$;
    CREATE FUNCTION air.inlined(x float8) RETURNS float8 IMMUTABLE RETURN x + 1;
    CREATE DOMAIN air.trapped AS float8 CHECK (air.trap(VALUE) = VALUE);
    CREATE DOMAIN air.harmless AS float8;
    CREATE TYPE air.pair AS (x air.trapped, y int);
    CREATE TYPE air.span AS RANGE (subtype = float8);
    CREATE OPERATOR air.@@@ (FUNCTION = air.trap, RIGHTARG = float8);
    CREATE AGGREGATE air.total (float8) (SFUNC = float8pl, STYPE = float8, FINALFUNC = air.trap);
    CREATE VIEW air.trapping AS SELECT 'UA'::text AS carrier, air.trap(1) AS x;
    CREATE TABLE air.indexed (carrier text, x float8);
    CREATE INDEX ON air.indexed (carrier) WHERE air.trap(1) = 1;
    CREATE TABLE air.limited (carrier text, x float8 CHECK (x > 0 OR air.trap(1) = 1));
    CREATE TABLE air.counted (carrier text, x float8);
    CREATE STATISTICS air.counts ON (air.trap(1)), carrier FROM air.counted;
    CREATE TABLE air.parts (carrier text, x float8) PARTITION BY RANGE ((x + air.trap(1)));
    CREATE TABLE air.guarded (carrier text, x float8);
    CREATE POLICY p ON air.guarded USING (air.trap(1) = 1);
    ALTER TABLE air.guarded ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
    GRANT SELECT ON air.trapping, air.indexed, air.limited, air.counted, air.parts, air.guarded
        TO PUBLIC;
"""
OF_OTHERS = [  # expressions of a column, or what follows FROM
    *("air.trap(1)", "air.inlined(1)", "OPERATOR(air.@@@) 1.0::float8", "(SELECT air.total(1))"),
    *("1::air.trapped", "1::air.harmless", "('(1,2)'::air.pair).x", "(ARRAY[1]::air.trapped[])[1]"),
    *("(json_populate_record(NULL::air.pair, '{\"x\": 1}')).x", "upper('[1,2]'::air.span)"),
    "(SELECT x FROM json_to_recordset('[{\"x\": 1}]') AS r (x air.trapped))",
    "(SELECT x FROM xmltable('/a' PASSING ('<a><x>1</x></a>'::xml) COLUMNS x air.trapped))",
    "length(query_to_xml('SELECT air.trap(1)', true, false, '')::text)",
    "length(table_to_xml('air.trapping', true, false, '')::text)",
    *(
        "length(pg_read_file('PG_VERSION'))",
        "length(set_config('work_mem', '1MB', false))",
        "pg_sleep(0)::text::float8",
    ),
    *(
        "FROM air.trapping",
        "FROM air.indexed",
        "FROM air.limited",
        "FROM air.counted",
        "FROM air.parts",
        "FROM air.guarded",
    ),
]


@pytest.fixture(scope="module")
def trapped(server: SharedServer) -> Iterator[SharedServer]:
    """Code of role alice that says whom it runs as, unless that is alice."""
    with server.connect(user="alice") as alice:
        alice.execute(TRAPS)
    with server.connect() as conn:
        conn.execute("SELECT grant_model('plain', 'mallory'); GRANT alice TO mallory")  # a member is another role, too
        kept = derived(conn, "plain")
        yield server
        set_derived(conn, "plain", kept["query"])
        conn.execute("REVOKE alice FROM mallory")


def set_derived(conn: Connection, model: str, query: str) -> None:
    conn.execute(
        "UPDATE tensile_internal.model_versions v SET prediction_query = jsonb_set(prediction_query, '{query}',"
        " to_jsonb(%s::text)) FROM tensile_internal.models m WHERE m.id = v.model_id AND m.name = %s",
        (query, model),
    )


@pytest.mark.parametrize("form", OF_OTHERS)
def test_code_of_others_does_not_run_with_the_rights_of_the_caller(trapped: Any, conn: Connection, form: str) -> None:
    """Not even with those of a superuser, or of a member of their role."""
    query = (
        f"SELECT carrier, x AS distance {form}"
        if form.startswith("FROM")
        else f"SELECT carrier, {form} AS distance FROM flights"
    )
    set_derived(conn, "plain", query)
    callers = ["mallory"] if "guarded" in form else ["mallory", "postgres"]  # row security is not for superusers
    for user in callers:
        with trapped.connect(user=user) as caller:
            message = 'the query for predictions of model "plain" may run code of another role'
            refused("42501", message, "tensile.model_versions", lambda: predicted(caller, "plain"))


@pytest.mark.parametrize(
    "form",
    [
        *("distance", "random() * 2", "extract(epoch FROM now())", "distance + length(carrier)", "NULL::float8"),
        *("(SELECT max(distance) FROM air.flights)", "row_number() OVER (ORDER BY id)", "'1'::float8"),
        *("FROM air.short_of_superuser", "mallorys(1)"),
    ],
)
def test_other_code_runs(trapped: Any, conn: Connection, form: str) -> None:
    conn.execute(
        "CREATE OR REPLACE VIEW air.short_of_superuser AS SELECT carrier, distance AS x FROM air.flights;"
        "GRANT SELECT ON air.short_of_superuser TO PUBLIC"
    )
    with trapped.connect(user="mallory") as mallory:
        mallory.execute("CREATE OR REPLACE FUNCTION mallorys(int) RETURNS float8 RETURN $1")
        rows = form.startswith("FROM")
        query = f"SELECT carrier, x AS distance {form}" if rows else f"SELECT carrier, {form} AS distance FROM flights"
        set_derived(conn, "plain", query.replace("mallorys", f"{trapped.schema}.mallorys"))
        assert len(predicted(mallory, "plain")) == 200


def test_row_security_is_that_of_the_caller(server: Any, conn: Connection) -> None:
    conn.execute("ALTER TABLE air.flights ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON air.flights USING (id <= 5)")
    with server.connect(user="alice") as alice:
        assert len(predicted(alice, "star")) == 5
    conn.execute("ALTER TABLE air.flights DISABLE ROW LEVEL SECURITY; DROP POLICY p ON air.flights")


def test_a_changed_table_is_told(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("ALTER TABLE air.flights RENAME carrier TO airline")
        with pytest.raises(psycopg.errors.UndefinedColumn, match="carrier"):
            predicted(conn, "plain")
