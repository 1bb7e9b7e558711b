"""Models without an architecture, and names that are not registered: a training chooses by columns and their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.server.explaining import explained
from tests.server.refusals import refused
from tests.server.support import ROWS, Connection, Row, Wait, finish, submit, value
from tests.server.tuning import finished, trials, tune

TABLE = "ensemble"  # type for queries without an array
MODEL = "SELECT architecture->>'type', architecture_reason, owner FROM tensile.models WHERE model = %s"
COLUMNS = "SELECT 1.5::float8 AS a, 'x' AS c, 2.0::float8 AS y"


@pytest.fixture
def notices(db: Connection) -> Iterator[list[str]]:
    """Messages of the session about models."""
    messages: list[str] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        if (diagnostic.message_primary or "").startswith("model "):
            messages.append(f"{diagnostic.severity}: {diagnostic.message_primary}")

    db.add_notice_handler(keep)
    yield messages
    db.remove_notice_handler(keep)


ARRAYS = """
    SELECT ARRAY(SELECT sin(i * k) FROM generate_series(1, {length}) k)::float4[] AS v, sin(i) > 0 AS y
    FROM generate_series(1, 100) i
"""
IMAGES = """
    SELECT ARRAY(SELECT CASE WHEN (k % 8 < 4) = (i % 2 = 0) THEN 200 ELSE 20 END + (i * k) % 50 -- dark left or right
                 FROM generate_series(0, 63) k) AS v, i % 2 = 0 AS y
    FROM generate_series(1, 100) i
"""
SERIES = """
    SELECT ARRAY(SELECT CASE WHEN (i + k) % 50 > 0 THEN 1 + sin((i + k) / 3.82) END
                 FROM generate_series(1, 168) k)::float4[] AS v, sin((i + 169) / 3.82) AS y
    FROM generate_series(1, 100) i
"""
TOKENS = """
    SELECT ARRAY(SELECT (i * k) % 7 FROM generate_series(0, i % 5) k) AS v, i % 2 = 0 AS y
    FROM generate_series(1, 100) i
"""
JOB = "SELECT state, architecture->>'type', architecture_reason FROM tensile.jobs WHERE job = %s"


@pytest.mark.parametrize("name", ["registered", "unregistered"])
def test_a_table_gets_its_architecture_at_once(db: Connection, notices: list[str], name: str) -> None:
    reason = "no column is an array"
    with db.transaction(force_rollback=True):
        if name == "registered":
            db.execute("SELECT register_model(%s)", (name,))
            assert db.execute(MODEL, (name,)).fetchone() == (None, None, "postgres")
        submit(db, name, query="SELECT 1 AS n, 2.0::float8 AS y")
        assert db.execute(MODEL, (name,)).fetchone() == (TABLE, reason, "postgres")
        assert notices == [f'NOTICE: model "{name}" is registered with the architecture {TABLE}: {reason}']


@pytest.mark.parametrize("array", ["'\\x00'::bytea", "ARRAY[1.5]::numeric[]", "ARRAY[1]::int2[]", "ARRAY[1]::int8[]"])
def test_arrays_leave_it_open_until_their_values_are_known(db: Connection, notices: list[str], array: str) -> None:
    with db.transaction(force_rollback=True):
        submit(db, "open", query=f"SELECT 1 AS n, {array} AS v, ARRAY[1] AS w, 2.0::float8 AS y")
        assert db.execute(MODEL, ("open",)).fetchone() == (None, None, "postgres")
    message = 'model "open" is registered; its training chooses the architecture by the values of "v", "w"'
    assert notices == [f"NOTICE: {message}"]


@pytest.mark.parametrize(
    ("name", "query", "type", "reason"),
    [
        (
            "vectors",
            ARRAYS.format(length=12),
            TABLE,
            '"v" is the only array, and is taken as numbers: an image would not have 12',
        ),
        (
            "series",
            SERIES,
            TABLE,
            '"v" is the only array, and is taken as numbers: an image would not have 168',
        ),
        ("images", IMAGES, "cnn", '"v" is the only array, and can be an image of 8×8 pixels'),
        ("tokens", TOKENS, "transformer", '"v" has integers in arrays of 1 to 5 elements, which are taken as tokens'),
    ],
)
def test_the_job_chooses_by_the_values(
    db: Connection, notices: list[str], name: str, query: str, type: str, reason: str
) -> None:
    shown = "linear, boosted, tabular" if type == TABLE else type  # the members
    assert explained(db, name, query=query, epochs=1)["architecture"] == shown
    job = submit(db, name, query=query, epochs=1)
    finish(db, job)
    model = db.execute(MODEL, (name,)).fetchone()
    assert model is not None and model[0] == type and model[1].startswith(reason)
    assert db.execute(JOB, (job,)).fetchone() == ("finished", *model[:2])
    assert f'NOTICE: model "{name}" has the architecture {type}: {model[1]}' in notices
    notices.clear()
    later = submit(db, name, query=query, epochs=1)
    finish(db, later)
    assert db.execute(JOB, (later,)).fetchone() == ("finished", None, None)
    assert not any("architecture" in notice for notice in notices)


@pytest.mark.usefixtures("db")
def test_a_role_trains_arrays_and_is_told_how_to_go_on(
    roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    hints: list[str | None] = []
    with connect(roles("analyst")) as conn:
        conn.add_notice_handler(lambda diagnostic: hints.append(diagnostic.message_hint))
        finish(conn, submit(conn, "its own", query=ARRAYS.format(length=3), epochs=1))
        assert hints[-1] is not None and "predict_class('its own', t) FROM my_table t" in hints[-1]
        row = conn.execute(f"SELECT predict_class('its own', t) FROM ({ARRAYS.format(length=3)}) t LIMIT 1").fetchone()
        assert row is not None and row[0] in ("true", "false")
        finish(conn, submit(conn, "its own", query=ARRAYS.format(length=3), epochs=1, options={"deploy": "never"}))
        assert hints[-1] == "It is not deployed: SELECT deploy_model('its own', 2) makes predictions use it."


@pytest.mark.long
def test_a_tuning_begins_with_the_job_that_chooses(db: Connection, notices: list[str]) -> None:
    """Three trials are trained."""
    arguments = {"query": IMAGES, "epochs": 2, "trials": 3, "options": {"keep": "last"}}
    tuning = tune(db, "tuned", space=None, **arguments)
    assert value(db, "SELECT space FROM tensile_internal.tunings WHERE id = %s", tuning) is None
    finished(db, tuning)
    type, space = db.execute(  # type: ignore[misc]
        "SELECT architecture->>'type', array(SELECT jsonb_object_keys(space)) FROM tensile_internal.tunings"
        " WHERE id = %s",
        (tuning,),
    ).fetchone()
    assert (type, {*space}) == ("cnn", {"channels", "dropout", "kernel", "learning_rate", "weight_decay"})
    first, *others = trials(db, tuning, "params, state")
    assert first == ({}, "finished")
    assert all(params.keys() == {*space} for params, _ in others)
    assert value(db, "SELECT architecture->>'type' FROM tensile.models WHERE model = 'tuned'") == "cnn"


@pytest.mark.long
def test_a_given_space_keeps_the_keys_of_the_chosen_architecture(db: Connection) -> None:
    """Tunings are trained, and one fails."""
    arguments = {"query": ARRAYS.format(length=5), "epochs": 1, "trials": 2, "options": {"keep": "last"}}
    tuning = tune(db, "some keys", space={"kernel": [3, 5], "layers": [1, 2]}, **arguments)
    finished(db, tuning)
    assert value(db, "SELECT space FROM tensile_internal.tunings WHERE id = %s", tuning) == {"layers": [1, 2]}
    nothing = tune(db, "no key", space={"kernel": [3, 5]}, **arguments)
    refused("22023", 'no key of the architecture "tabular"', "leave the space out", lambda: finished(db, nothing))
    types = tune(db, "types", space={"architecture": ["mlp"]}, **arguments)
    finished(db, types)
    assert [params for (params,) in trials(db, types, "params")] == [{"architecture": "mlp"}] * 2


def test_a_tuning_whose_first_trial_cannot_choose_fails(db: Connection) -> None:
    tuning = tune(db, "never", query="SELECT ARRAY[1] AS v, NULL::float8 AS y", trials=3, space=None)
    refused("22000", "is null in all 1 rows", "first trial", lambda: finished(db, tuning))
    assert value(db, "SELECT count(*) FROM tensile.models WHERE model = 'never'") == 0


@pytest.mark.long
def test_an_unregistered_model_is_trained_and_keeps_its_architecture(
    db: Connection, notices: list[str], job_row: Row
) -> None:
    first = submit(db, "late")
    finish(db, first)
    finish(db, submit(db, "late", query=f"SELECT *, ARRAY[1, 2] AS tokens FROM ({ROWS}) r"))
    assert sum("is registered" in notice for notice in notices) == 1
    assert value(db, "SELECT architecture->>'type' FROM tensile.models WHERE model = 'late'") == TABLE
    assert job_row(db, first)["version"] == 1
    with db.transaction(force_rollback=True):  # chosen again
        db.execute("SELECT register_model('late', NULL, replace => true)")
        submit(db, "late", query=f"SELECT *, ARRAY[1, 2] AS tokens FROM ({ROWS}) r")
        assert db.execute(MODEL, ("late",)).fetchone()[0] is None  # type: ignore[index]


def test_it_can_be_submitted_by_a_function(db: Connection) -> None:
    db.execute(
        "CREATE FUNCTION pg_temp.submitted() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN"
        f" RETURN train_model('by a function', $q${COLUMNS}$q$, 'y'); END $$"
    )
    with db.transaction(force_rollback=True):
        assert value(db, "SELECT pg_temp.submitted()") > 0


def test_a_refused_submission_registers_nothing(db: Connection) -> None:
    refused("22023", "epochs is out of range", "", lambda: submit(db, "refused", epochs=0))
    assert value(db, "SELECT count(*) FROM tensile.models WHERE model = 'refused'") == 0


def test_explaining_chooses_and_registers_nothing(db: Connection, notices: list[str]) -> None:
    explanation = explained(db, "explained")
    assert explanation["architecture"] == "linear, boosted, tabular" and explanation["start"]
    assert notices == [] and value(db, "SELECT count(*) FROM tensile.models WHERE model = 'explained'") == 0


def test_a_model_of_another_role_is_not_taken_over(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    db.execute("SELECT register_model('theirs')")
    other = roles("other")
    with connect(other) as conn:
        refused("42501", 'permission denied for model "theirs"', "grant_model", lambda: submit(conn, "theirs"))
        with conn.transaction(force_rollback=True):
            submit(conn, "mine", query=COLUMNS)
            assert conn.execute(MODEL, ("mine",)).fetchone() == (TABLE, "no column is an array", other)
    db.execute("SELECT grant_model('theirs', %s, 'train')", (other,))
    with connect(other) as conn, conn.transaction(force_rollback=True):
        submit(conn, "theirs", query=COLUMNS)
        assert conn.execute(MODEL, ("theirs",)).fetchone() == (TABLE, "no column is an array", "postgres")


def test_a_role_that_may_not_register_models_cannot_do_so_by_training(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    trainer = roles("trainer")
    with connect(trainer) as conn, db.transaction(force_rollback=True):
        db.execute("REVOKE EXECUTE ON FUNCTION register_model FROM tensile_user")
        with db.transaction(force_rollback=True):
            db.execute(f"SET LOCAL ROLE {trainer}")
            message = 'permission denied to register model "new"'
            refused("42501", message, "register_model", lambda: submit(db, "new", query=COLUMNS))
        with conn.transaction(force_rollback=True):
            submit(conn, "new", query=COLUMNS)  # the revocation is not committed


@pytest.mark.usefixtures("db")
def test_two_sessions_that_register_the_same_name(connect: Callable[..., Connection], wait_until: Wait) -> None:
    """The second one waits for the first and is told, instead of training the other's model."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with connect("postgres") as first, connect("postgres") as second, ThreadPoolExecutor(1) as thread:
        with first.transaction():
            first.execute("SELECT register_model('twice')")
            submitted = thread.submit(submit, second, "twice", query=COLUMNS)
            wait_until(lambda: value(first, waits, second.info.backend_pid) == 1, what="the second session waits")
        refused("55006", 'model "twice" has just been registered', "again", submitted.result)
        with second.transaction(force_rollback=True):
            submit(second, "twice", query=COLUMNS)
