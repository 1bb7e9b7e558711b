"""What train_model and register_model find out at once: every mistake has its SQLSTATE, a sentence and a hint.

Nothing here is trained. What only shows when the query runs or PyTorch builds the model is in the tests of the jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refused

Connection = psycopg.Connection[tuple[Any, ...]]

MLP = Jsonb({"type": "mlp", "hidden": [4]})


@pytest.fixture
def flights(db: Connection) -> Connection:
    """A table, a model and nothing else."""
    db.execute(
        "CREATE TABLE flights (distance float8, carrier text, legs int[], at timestamptz, notes jsonb, late bool)"
    )
    db.execute("SELECT register_model('late', %s)", (MLP,))
    return db


def train(conn: Connection, **arguments: object) -> int:
    """train_model with good arguments, except those given."""
    arguments = {"model": "late", "query": "SELECT distance, carrier, late FROM flights", "target": "late"} | arguments
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    row = conn.execute(f"SELECT train_model({named})", arguments).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture(autouse=True)
def nothing_left(db: Connection) -> Iterator[None]:
    """No refused submission leaves a job behind; the tests that do submit delete theirs."""
    yield
    assert db.execute("SELECT count(*) FROM tensile.jobs").fetchone() == (0,)


# -- the query --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "sqlstate", "message", "hint"),
    [
        ("", "42601", "empty", "SELECT"),
        ("-- nothing", "42601", "empty", "SELECT"),
        ("SELECT distance, late FROM flights; SELECT 1", "42601", "more than one statement", "SELECT"),
        ("DELETE FROM flights RETURNING distance, late", "42601", "not a SELECT", "SELECT"),
        ("INSERT INTO flights (distance) VALUES (1) RETURNING distance, late", "42601", "not a SELECT", "SELECT"),
        ("CREATE TABLE x AS SELECT distance, late FROM flights", "42601", "not a SELECT", "SELECT"),
        ("EXPLAIN SELECT distance, late FROM flights", "42601", "not a SELECT", "SELECT"),
        ("COPY flights TO STDOUT", "42601", "not a SELECT", "SELECT"),
        ("SELECT distance, late INTO x FROM flights", "25006", "SELECT INTO", "plain SELECT"),
        (
            "WITH gone AS (DELETE FROM flights RETURNING *) SELECT distance, late FROM gone",
            "25006",
            "WITH",
            "plain SELECT",
        ),
        ("SELECT distance, late FROM flights FOR UPDATE", "25006", "FOR UPDATE", "plain SELECT"),
        ("SELECT * FROM (SELECT distance, late FROM flights FOR SHARE) f", "25006", "FOR SHARE", "plain SELECT"),
        ("SELECT distance, late, distance FROM flights", "42701", '"distance"', "AS"),
        ("SELECT distance FROM flights", "42703", 'target "late"', ""),
        ("SELECT distance, late AS lat FROM flights", "42703", 'target "late"', '"lat"'),
        ("SELECT late FROM flights", "22023", "no column besides the target", "feature"),
        ("SELECT notes, late FROM flights", "0A000", 'column "notes" has type jsonb', "cast"),
        ("SELECT distance, legs AS late FROM flights", "0A000", 'target "late" has type integer[]', "number"),
        ("SELECT distance, at AS late FROM flights", "0A000", 'target "late" has type timestamp', "epoch"),
        ("SELECT distance, late FROM scratch", "0A000", 'temporary table "scratch"', "another session"),
    ],
)
def test_query_that_is_not_one_select_to_train_on(
    flights: Connection, query: str, sqlstate: str, message: str, hint: str
) -> None:
    flights.execute("CREATE TEMP TABLE scratch (distance float8, late bool)")
    refused(sqlstate, message, hint, lambda: train(flights, query=query))


@pytest.mark.parametrize(
    ("query", "sqlstate", "word"),
    [
        ("SELECT distance, late FRM flights WHERE", "42601", "flights"),
        ("SELECT distance,\n late FROM flights WHERE dist > 3", "42703", "dist > 3"),
        ("SELECT distance, late FROM flihgts", "42P01", "flihgts"),
        ("SELECT sine(distance), late FROM flights", "42883", "sine"),
        ("SELECT distance, late FROM flights WHERE distance = $1", "42P02", "$1"),
    ],
)
def test_errors_in_the_query_show_their_position_in_it(
    flights: Connection, query: str, sqlstate: str, word: str
) -> None:
    with pytest.raises(psycopg.Error) as caught:
        train(flights, query=query)
    diag = caught.value.diag
    assert diag.sqlstate == sqlstate
    assert diag.internal_query == query
    assert diag.internal_position is not None
    assert query[int(diag.internal_position) - 1 :].startswith(word)
    assert diag.statement_position is None
    assert "training query" in (diag.context or "")


def test_constant_errors_are_found_without_a_row(flights: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as caught:
        train(flights, query="SELECT 1 / 0 AS x, late FROM flights")
    assert "training query" in (caught.value.diag.context or "")


@pytest.mark.parametrize(
    "query",
    [
        "VALUES (1.0, true), (2.0, false)",
        "WITH f AS (SELECT * FROM flights) SELECT distance AS column1, late AS column2 FROM f",
        "SELECT f.distance AS column1, g.late AS column2 FROM flights f JOIN flights g USING (carrier);",
        "(SELECT 1 AS column1, true AS column2) UNION ALL (SELECT 2, false) ORDER BY 1 LIMIT 5",
        "SELECT legs AS column1, carrier AS column2, at, late::int, '\\x00'::bytea AS b FROM flights",
    ],
)
def test_every_kind_of_select_is_accepted(flights: Connection, query: str) -> None:
    with flights.transaction(force_rollback=True):
        job = train(flights, query=query, target="column2")
        assert flights.execute("SELECT query FROM tensile.jobs WHERE id = %s", (job,)).fetchone() == (query,)


def test_a_volatile_function_is_not_called_by_submitting(flights: Connection) -> None:
    flights.execute("CREATE SEQUENCE counter")
    with flights.transaction(force_rollback=True):
        train(flights, query="SELECT nextval('counter') AS n, late FROM flights")
    assert flights.execute("SELECT is_called FROM counter").fetchone() == (False,)


# -- the other arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ({"model": "lat"}, "42704", 'model "lat" does not exist', "register_model"),
        ({"model": None}, "22004", '"model"', ""),
        ({"query": None}, "22004", '"query"', ""),
        ({"target": None}, "22004", '"target"', ""),
        ({"epochs": None}, "22004", '"epochs"', "default"),
        ({"options": None}, "22004", '"options"', "default"),
        ({"target": "lates"}, "42703", 'target "lates"', '"late"'),
        ({"epochs": 0}, "22023", "epochs is out of range: 0", "1000000"),
        ({"epochs": 1000001}, "22023", "epochs", "1000000"),
        ({"batch_size": -1}, "22023", "batch_size is out of range: -1", "or 0 to have it chosen"),
        ({"batch_size": 10000001}, "22023", "batch_size is out of range: 10000001", "10000000"),
        ({"batch_size": 0, "policy": "none"}, "22023", 'with policy "none"', "policy => 'joint'"),
        (
            {"options": Jsonb({"batch_size_range": [1, 2]})},
            "22023",
            'option "batch_size_range" requires an automatically chosen batch size, but batch_size is 64',
            "batch_size => 0",
        ),
        (
            {"options": Jsonb({"learning_rate_scaling": "none"})},
            "22023",
            'option "learning_rate_scaling" requires an automatically chosen batch size',
            "leave the option out",
        ),
        (
            {"batch_size": 0, "options": Jsonb({"learning_rate_scaling": "square"})},
            "22023",
            'key "learning_rate_scaling" in the options: "square"',
            '"accudnn", "linear", "none"',
        ),
        (
            {"batch_size": 0, "options": Jsonb({"batch_size_range": [8]})},
            "22023",
            '"batch_size_range"',
            "an array of 2 values, each an integer from 1 to 10000000",
        ),
        ({"batch_size": 0, "options": Jsonb({"batch_size_range": [0, 8]})}, "22023", '"batch_size_range[0]"', "from 1"),
        ({"batch_size": 0, "options": Jsonb({"batch_size_range": [9, 8]})}, "22023", "empty: from 9 to 8", "[8, 9]"),
        ({"optimizer": "adm"}, "22023", 'unknown optimizer "adm"', "adamw"),
        ({"learning_rate": 0.0}, "22023", "learning_rate is out of range: 0", "0.001"),
        ({"learning_rate": float("nan")}, "22023", "learning_rate is out of range: NaN", "finite"),
        ({"learning_rate": float("inf")}, "22023", "learning_rate is out of range: Infinity", "finite"),
        ({"validation": 1.0}, "22023", "validation is out of range: 1", "less than 1"),
        ({"validation": -0.1}, "22023", "validation is out of range: -0.1", "less than 1"),
        ({"validation": float("nan")}, "22023", "validation is out of range: NaN", "less than 1"),
        ({"policy": "tensil"}, "22023", 'unknown policy "tensil"', "one of 'none', 'tensile', 'joint', 'swapadvisor'"),
        ({"priority": 1001}, "22023", "priority is out of range: 1001", "1000"),
        ({"memory_budget": "8 gigs"}, "22023", 'invalid memory_budget "8 gigs"', "8GB"),
        ({"memory_budget": ""}, "22023", 'invalid memory_budget ""', "8GB"),
        ({"memory_budget": "-1GB"}, "22023", 'invalid memory_budget "-1GB"', "8GB"),
        ({"memory_budget": "0"}, "22023", 'invalid memory_budget "0"', "8GB"),
        ({"memory_budget": "60%"}, "22023", 'invalid memory_budget "60%"', "8GB"),
        ({"memory_budget": "99999999999TB"}, "22023", "invalid memory_budget", "8GB"),
        ({"options": Jsonb([])}, "22023", "options must be a JSON object", "patience"),
        ({"options": Jsonb({"tsk": "regression"})}, "22023", 'unknown key "tsk" in the options', '"task"'),
        ({"options": Jsonb({"zzzzzzzzz": 1})}, "22023", 'unknown key "zzzzzzzzz" in the options', '"weight_decay"'),
        ({"options": Jsonb({"task": "clustering"})}, "22023", 'key "task"', '"classification"'),
        ({"options": Jsonb({"early_stopping": 3})}, "22023", 'key "early_stopping"', "object"),
        ({"options": Jsonb({"early_stopping": {"patience": 0}})}, "22023", 'key "early_stopping.patience"', "from 1"),
        ({"options": Jsonb({"early_stopping": {"patient": 1}})}, "22023", '"early_stopping.patient"', '"patience"'),
        ({"options": Jsonb({"momentum": 1})}, "22023", 'key "momentum"', "less than 1"),
        ({"options": Jsonb({"clip": 0})}, "22023", 'key "clip"', "greater than 0"),
        ({"options": Jsonb({"threads": 1.5})}, "22023", 'key "threads"', "integer"),
        (
            {"options": Jsonb({"compression": "zip"})},
            "22023",
            'key "compression" in the options: "zip"',
            '"auto", "zvc"',
        ),
        ({"policy": "none", "options": Jsonb({"compression": "auto"})}, "22023", 'compression "auto"', "'joint'"),
        ({"options": Jsonb({"deploy": "yes"})}, "22023", 'key "deploy" in the options: "yes"', "true or false"),
    ],
)
def test_arguments_out_of_range(
    flights: Connection, arguments: dict[str, object], sqlstate: str, message: str, hint: str
) -> None:
    refused(sqlstate, message, hint, lambda: train(flights, **arguments))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 << 30),
        ("512 MB", 512 << 20),
        ("1.5kb", 1536),
        ("100", 100),
        (" 2 TB ", 2 << 40),
        ("7 bytes", 7),
        (None, None),
    ],
)
def test_budgets_are_stored_in_bytes(flights: Connection, text: str | None, size: int | None) -> None:
    with flights.transaction(force_rollback=True):
        job = train(flights, memory_budget=text)
        assert flights.execute("SELECT memory_budget FROM tensile.jobs WHERE id = %s", (job,)).fetchone() == (size,)


def test_what_a_job_remembers(flights: Connection) -> None:
    flights.execute("SET TimeZone = 'Europe/Paris'; SET DateStyle = 'German'; SET IntervalStyle = 'iso_8601'")
    with flights.transaction(force_rollback=True):
        job = train(flights, epochs=3, priority=-7, options=Jsonb({"clip": 1}))
        row = flights.execute(
            "SELECT state, model_name, owner_name, owner = 'postgres'::regrole, epochs, batch_size, optimizer,"
            " learning_rate, validation, seed, policy, priority, options, attempts, settings"
            " FROM tensile.jobs WHERE id = %s",
            (job,),
        ).fetchone()
        path = flights.execute("SHOW search_path").fetchone()
    assert row is not None and path is not None
    assert row[:-1] == ("queued", "late", "postgres", True, 3, 64, "adamw", 1e-3, 0.2, 0, "joint", -7, {"clip": 1}, 0)
    assert row[-1] == {
        "search_path": path[0],
        "TimeZone": "Europe/Paris",
        "DateStyle": "German, DMY",
        "IntervalStyle": "iso_8601",
    }


@pytest.mark.parametrize("policy", ["none", "tensile", "joint"])
def test_the_policy_is_the_jobs_or_that_of_the_session(flights: Connection, policy: str) -> None:
    stored = "SELECT policy FROM tensile.jobs WHERE id = %s"
    with flights.transaction(force_rollback=True):
        assert flights.execute(stored, (train(flights, policy=policy),)).fetchone() == (policy,)
    with flights.transaction(force_rollback=True):
        flights.execute(f"SET LOCAL pg_tensile.policy = '{policy}'")
        assert flights.execute(stored, (train(flights),)).fetchone() == (policy,)


def test_two_jobs_for_one_model_at_once(flights: Connection) -> None:
    with flights.transaction(force_rollback=True):
        job = train(flights)
        with flights.transaction(force_rollback=True):
            refused(
                "55006", f'model "late" is being trained by job {job}', f"cancel_job({job})", lambda: train(flights)
            )
        flights.execute("SELECT register_model('other', %s)", (MLP,))
        train(flights, model="other")


def test_the_second_of_two_concurrent_submissions_waits_and_is_refused(
    flights: Connection, connect: Callable[..., Connection]
) -> None:
    schema = flights.execute("SELECT current_schema").fetchone()
    assert schema is not None
    other = connect(options=f"-c search_path={schema[0]},public -c lock_timeout=300ms")
    with flights.transaction(force_rollback=True):
        train(flights)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            train(other)


def test_nologin_role(flights: Connection, roles: Callable[..., str]) -> None:
    service = roles("service", "NOLOGIN")
    flights.execute(f"GRANT ALL ON flights TO {service}")
    flights.execute("SELECT grant_model('late', %s, 'train')", (service,))
    flights.execute(f"SET ROLE {service}")
    refused("42501", f'role "{service}" is not permitted to log in', "LOGIN", lambda: train(flights))
    flights.execute("RESET ROLE")


def test_role_without_connect(flights: Connection, roles: Callable[..., str]) -> None:
    guest = roles("guest")
    flights.execute(f"GRANT ALL ON flights TO {guest}")
    flights.execute("SELECT grant_model('late', %s, 'train')", (guest,))
    with flights.transaction(force_rollback=True):
        flights.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
        flights.execute(f"SET LOCAL ROLE {guest}")
        refused("42501", "CONNECT", "CONNECT", lambda: train(flights))


def test_another_database(cluster: Any, db: Connection) -> None:
    db.execute("DROP DATABASE IF EXISTS elsewhere")
    db.execute("CREATE DATABASE elsewhere")
    try:
        with cluster.connect("elsewhere") as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            conn.execute("SELECT register_model('late', %s)", (MLP,))
            error = refused(
                *("55000", "elsewhere", "pg_tensile.database"),
                lambda: train(conn, query="VALUES (1, 2)", target="column2"),
            )
            assert '"postgres"' in (error.diag.message_hint or "")
    finally:
        db.execute("DROP DATABASE elsewhere WITH (FORCE)")


def test_without_preloading(fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        conn.execute("SELECT register_model('late', %s)", (MLP,))
    cluster.configure({"shared_preload_libraries": ""})
    cluster.restart()
    wants = ("55000", "shared_preload_libraries", "shared_preload_libraries")
    with cluster.connect() as conn:
        refused(*wants, lambda: train(conn, query="VALUES (1, 2)", target="column2"))
        conn.execute("DROP EXTENSION pg_tensile")
        refused(*wants, lambda: conn.execute("CREATE EXTENSION pg_tensile"))


# -- register_model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "message", "hint"),
    [
        ([], "architecture must be a JSON object", "mlp"),
        ({}, 'key "type" is missing', '"transformer"'),
        ({"type": 3}, 'key "type"', '"mlp"'),
        ({"type": "mpl"}, 'unknown architecture type "mpl"', 'Did you mean "mlp"?'),
        ({"type": "recurrent"}, 'unknown architecture type "recurrent"', '"transformer"'),
        ({"type": "mlp", "hiden": [3]}, 'unknown key "hiden" in the architecture "mlp"', 'Did you mean "hidden"?'),
        ({"type": "mlp", "quux": 1}, 'unknown key "quux"', '"dropout"'),
        ({"type": "mlp", "hidden": 3}, 'key "hidden" in the architecture "mlp": 3', "array"),
        ({"type": "mlp", "hidden": [3, 0]}, 'key "hidden[1]" in the architecture "mlp": 0', "from 1 to 65536"),
        ({"type": "mlp", "hidden": [3, "4"]}, 'key "hidden[1]"', "integer"),
        ({"type": "mlp", "hidden": [1] * 65}, 'key "hidden"', "64"),
        ({"type": "mlp", "dropout": 1}, 'key "dropout" in the architecture "mlp": 1', "less than 1"),
        ({"type": "mlp", "dropout": True}, 'key "dropout"', "number"),
        ({"type": "mlp", "activation": "ReLU"}, 'key "activation"', '"relu"'),
        ({"type": "mlp", "embedding": None}, 'key "embedding"', "integer"),
        ({"type": "mlp", "embedding": 10**400}, 'key "embedding"', "1024"),
        ({"type": "cnn", "channels": []}, 'key "channels"', "1 to 16"),
        ({"type": "cnn", "kernel": 4}, 'key "kernel"', "odd"),
        ({"type": "cnn", "shape": [8]}, 'key "shape"', "2 to 3"),
        ({"type": "transformer", "dim": 30, "heads": 4}, '"dim"', "28"),
        ({"type": "transformer", "heads": 3}, '"dim"', "63"),
        ({"type": "import"}, 'key "callable" is missing', "package.module:function"),
        ({"type": "import", "callable": "os.system"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a.b:c:d"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a..b:c"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a.b:c", "kwargs": [1]}, 'key "kwargs"', "object"),
        ({"type": "python"}, 'key "source" is missing', "text"),
        ({"type": "python", "source": ""}, 'key "source"', "not empty"),
    ],
)
def test_bad_architecture(db: Connection, architecture: object, message: str, hint: str) -> None:
    refused("22023", message, hint, lambda: db.execute("SELECT register_model('m', %s)", (Jsonb(architecture),)))
    assert db.execute("SELECT count(*) FROM tensile.models").fetchone() == (0,)


@pytest.mark.parametrize(
    "architecture",
    [
        {"type": "mlp"},
        {"type": "mlp", "hidden": [], "dropout": 0.5, "activation": "gelu", "norm": "layer", "embedding": 8},
        {"type": "cnn", "channels": [8, 16], "kernel": 5, "shape": [1, 8, 8], "hidden": [32]},
        {
            "type": "transformer",
            "dim": 32,
            "heads": 8,
            "layers": 1,
            "length": 128,
            "vocabulary": 1000,
            "feedforward": 64,
        },
        {"type": "import", "callable": "my_models.tabular:build", "kwargs": {"depth": {"anything": [1]}}},
        {"type": "python", "source": "def build(n_inputs, n_outputs): ..."},
    ],
)
def test_good_architecture(db: Connection, architecture: object) -> None:
    row = db.execute("SELECT register_model('m', %s, 'about it')", (Jsonb(architecture),)).fetchone()
    assert row is not None
    assert db.execute("SELECT id, architecture, description FROM tensile.models").fetchone() == (
        *row,
        architecture,
        "about it",
    )


def test_names_of_models(db: Connection) -> None:
    for name in ("", "x" * 201, "two\nlines"):
        refused("22023", "invalid model name", "200", partial(db.execute, "SELECT register_model(%s, %s)", (name, MLP)))
    refused("22004", '"name"', "", lambda: db.execute("SELECT register_model(NULL, %s)", (MLP,)))
    refused("22004", '"architecture"', "", lambda: db.execute("SELECT register_model('m', NULL)"))
    db.execute("SELECT register_model('späte Flüge \"2\"', %s)", (MLP,))


def test_registering_again(flights: Connection) -> None:
    refused(
        *("42710", 'model "late" already exists', "replace => true"),
        lambda: flights.execute("SELECT register_model('late', %s)", (MLP,)),
    )
    first = flights.execute("SELECT id FROM tensile.models").fetchone()
    wide = {"type": "mlp", "hidden": [64]}
    again = flights.execute("SELECT register_model('late', %s, replace => true)", (Jsonb(wide),)).fetchone()
    assert again == first
    assert flights.execute("SELECT architecture FROM tensile.models").fetchall() == [(wide,)]
    with flights.transaction(force_rollback=True):
        train(flights)
        with flights.transaction(force_rollback=True):
            refused(
                *("55006", "is being trained", "cancel_job"),
                lambda: flights.execute("SELECT register_model('late', %s, replace => true)", (MLP,)),
            )


def test_dropping(flights: Connection) -> None:
    refused(
        "42704", 'model "lat" does not exist', "tensile.models", lambda: flights.execute("SELECT drop_model('lat')")
    )
    with flights.transaction(force_rollback=True):
        job = train(flights)
        flights.execute("SELECT drop_model('late')")
        row = flights.execute(
            "SELECT state, model, model_name, sqlstate, error, hint IS NULL FROM tensile.jobs WHERE id = %s", (job,)
        )
        assert row.fetchone() == ("failed", None, "late", "42704", 'model "late" was dropped', False)
    flights.execute("SELECT drop_model('late')")
    assert flights.execute("SELECT count(*) FROM tensile.models").fetchone() == (0,)


def test_deploying_a_version_that_is_not_there(flights: Connection) -> None:
    refused(
        *("42704", 'model "late" has no version 1', "train_model"),
        lambda: flights.execute("SELECT deploy_model('late', 1)"),
    )
    flights.execute(
        "INSERT INTO tensile.model_versions (model, version, task, preprocessing, architecture, weight_bytes)"
        " SELECT id, v, 'regression', '{}', architecture, nullif(v, 3) FROM tensile.models, generate_series(1, 3) v"
    )
    refused(
        *("42704", 'model "late" has no version 3', "It has: 1, 2."),
        lambda: flights.execute("SELECT deploy_model('late', 3)"),
    )
    flights.execute("SELECT deploy_model('late', 2)")
    assert flights.execute("SELECT deployed_version FROM tensile.models").fetchone() == (2,)


def test_dropping_a_version(flights: Connection) -> None:
    """Number 3 is unfinished, 2 deployed."""
    flights.execute(
        "INSERT INTO tensile.model_versions (model, version, task, preprocessing, architecture, weight_bytes)"
        " SELECT id, v, 'regression', '{}', architecture, nullif(v, 3) FROM tensile.models, generate_series(1, 3) v"
    )
    flights.execute("INSERT INTO tensile.model_weights SELECT id, 0, '' FROM tensile.model_versions")
    flights.execute("SELECT deploy_model('late', 2)")
    for version, named in ((3, "3"), (0, "0"), (None, "null")):
        refused(
            *("42704", f'model "late" has no version {named}', "It has: 1, 2."),
            lambda: flights.execute("SELECT drop_version('late', %s)", (version,)),  # noqa: B023
        )
    refused(
        *("55006", 'cannot drop version 2 of model "late" because it is deployed', "deploy_model"),
        lambda: flights.execute("SELECT drop_version('late', 2)"),
    )
    flights.execute("SELECT drop_version('late', 1)")
    assert flights.execute("SELECT array_agg(version) FROM tensile.model_versions").fetchone() == ([2, 3],)
    assert flights.execute("SELECT count(*) FROM tensile.model_weights").fetchone() == (2,)


def test_retention_of_a_model(flights: Connection) -> None:
    keep = "SELECT keep_versions FROM tensile.models"
    assert flights.execute(keep).fetchone() == (None,)
    for versions in (5, 1, None):
        flights.execute("SELECT set_model_retention('late', %s)", (versions,))
        assert flights.execute(keep).fetchone() == (versions,)
    for versions in (0, -1):
        refused(
            *("22023", f"keep_versions is out of range: {versions}", "null"),
            lambda: flights.execute("SELECT set_model_retention('late', %s)", (versions,)),  # noqa: B023
        )


# -- waiting and cancelling -------------------------------------------------------------------------------------------


def test_waiting_in_the_transaction_that_submitted(flights: Connection) -> None:
    with flights.transaction(force_rollback=True):
        job = train(flights)
        with flights.transaction(force_rollback=True):
            refused("55000", f"job {job}", "Commit first", lambda: flights.execute("SELECT wait_for_job(%s)", (job,)))


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_waiting_with_a_fixed_snapshot(db: Connection, level: str) -> None:
    with db.transaction(force_rollback=True):
        db.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        refused("55000", level.lower(), "wait_for_job_procedure", lambda: db.execute("SELECT wait_for_job(1)"))


def test_unknown_jobs(db: Connection) -> None:
    for call in (
        "SELECT wait_for_job(987654321)",
        "CALL wait_for_job_procedure(987654321)",
        "SELECT cancel_job(987654321)",
    ):
        refused("42704", "job 987654321 does not exist", "tensile.jobs", partial(db.execute, call))
    for call in ("SELECT wait_for_job(NULL)", "SELECT cancel_job(NULL)"):
        refused("42704", "job null does not exist", "tensile.jobs", partial(db.execute, call))


@pytest.fixture
def job_in_state(flights: Connection) -> Iterator[Callable[..., int]]:
    """`job_in_state("failed", ended=True, sqlstate=…)`: a row of tensile.jobs that no controller will touch."""

    def insert(state: str, *, ended: bool, **columns: object) -> int:
        columns |= {"state": state, "model_name": "late", "owner_name": "postgres", "query": "", "target": "late"}
        columns |= {"epochs": 1, "batch_size": 1, "optimizer": "sgd", "learning_rate": 1, "validation": 0, "seed": 0}
        columns |= {"priority": 0, "options": "{}", "settings": "{}"}
        columns |= {"ended_at": "now"} if ended else {"not_before": "2999-01-01"}
        names, marks = ", ".join(columns), ", ".join(f"%({name})s" for name in columns)
        row = flights.execute(f"INSERT INTO tensile.jobs ({names}) VALUES ({marks}) RETURNING id", columns).fetchone()
        assert row is not None
        return int(row[0])

    yield insert
    flights.execute("DELETE FROM tensile.jobs")


def test_wait_raises_the_jobs_own_error(flights: Connection, job_in_state: Callable[..., int]) -> None:
    job = job_in_state(
        "failed", ended=True, sqlstate="22012", error="division by zero", hint="look at row 7", detail="row 7"
    )
    for call in (f"SELECT wait_for_job({job})", f"CALL wait_for_job_procedure({job})"):
        error = refused("22012", "division by zero", "look at row 7", partial(flights.execute, call))
        assert error.diag.message_detail == "row 7"
    bare = job_in_state("failed", ended=True, error="that was it")
    with pytest.raises(psycopg.errors.InternalError_, match="that was it") as caught:
        flights.execute("SELECT wait_for_job(%s)", (bare,))
    assert (caught.value.diag.message_hint, caught.value.diag.message_detail) == (None, None)


@pytest.mark.parametrize("state", ["finished", "cancelled"])
def test_wait_returns_the_final_state(flights: Connection, job_in_state: Callable[..., int], state: str) -> None:
    job = job_in_state(state, ended=True)
    assert flights.execute("SELECT wait_for_job(%s)", (job,)).fetchone() == (state,)
    assert flights.execute(f"CALL wait_for_job_procedure({job})").fetchone() == (state,)
    assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (False,)


def test_wait_times_out(flights: Connection, job_in_state: Callable[..., int]) -> None:
    job = job_in_state("interrupted", ended=False, reason="waits for its turn")
    for call in (f"SELECT wait_for_job({job}, '50 ms')", f"CALL wait_for_job_procedure({job}, '50 ms')"):
        error = refused(
            "57014",
            f"job {job} has not ended in time: it is interrupted",
            "cancel_job",
            partial(flights.execute, call),
        )
        assert error.diag.message_detail == "waits for its turn"


@pytest.mark.parametrize(("deadline", "least"), [("NULL", 0.9), ("now() + '50 ms'", 0.02), ("now()", 0)])
def test_who_waits_sleeps(db: Connection, deadline: str, least: float) -> None:
    """Nothing changes: a second without a deadline, or until the deadline."""
    db.execute("SELECT tensile._wait_round(now())")  # the first one in a session returns at once
    start = time.perf_counter()
    db.execute(f"SELECT tensile._wait_round({deadline})")
    assert time.perf_counter() - start >= least


def test_cancel_wakes_the_one_who_waits(
    flights: Connection,
    connect: Callable[..., Connection],
    job_in_state: Callable[..., int],
    wait_until: Callable[..., Any],
) -> None:
    job = job_in_state("interrupted", ended=False)
    waiting = connect()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: waiting.execute("SELECT wait_for_job(%s, '20 s')", (job,)).fetchone())
        wait_until(lambda: activity(flights, waiting) is not None)
        assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (True,)
        assert answer.result(timeout=5) == ("cancelled",)
    assert flights.execute("SELECT cancel_job(%s)", (job,)).fetchone() == (False,)


def activity(conn: Connection, other: Connection) -> tuple[Any, ...] | None:
    """Start of the transaction of a session that waits in one of our functions."""
    return conn.execute(
        "SELECT xact_start FROM pg_stat_activity"
        " WHERE pid = %s AND state = 'active' AND wait_event_type IN ('Extension', 'IPC')",
        (other.info.backend_pid,),
    ).fetchone()


def test_the_procedure_holds_no_snapshot(
    flights: Connection,
    connect: Callable[..., Connection],
    job_in_state: Callable[..., int],
    wait_until: Callable[..., Any],
) -> None:
    job = job_in_state("interrupted", ended=False)
    waiting = connect()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: waiting.execute(f"CALL wait_for_job_procedure({job})").fetchone())
        first = wait_until(lambda: activity(flights, waiting))
        wait_until(
            lambda: activity(flights, waiting) not in (None, first), what="the waiting session commits now and then"
        )
        flights.execute("SELECT cancel_job(%s)", (job,))
        assert answer.result(timeout=5) == ("cancelled",)
