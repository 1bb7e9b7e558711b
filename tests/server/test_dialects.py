"""Queries of other dialects in the client, and `pg-tensile sql` with BigQuery ML, on a server.

Models are trained once for the file, for a few epochs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pg_tensile.client import ArgumentError, Client, ServerError, connect
from pg_tensile.queries.dialects import DialectError
from pg_tensile.tools.cli.main import main
from tests.server.shared import SharedServer
from tests.server.support import Connection, value

# The target is twice the distance, which the jobs warn of, and they train for too few epochs to be of use.
pytestmark = pytest.mark.filterwarnings("ignore::pg_tensile.client.JobWarning")

TABLES = """
    CREATE SCHEMA ds;
    CREATE TABLE ds.flights AS
        SELECT i AS id, (ARRAY['UA', 'AA', 'DL'])[i % 3 + 1] AS carrier, (i % 50)::float8 AS distance,
               CASE WHEN i % 50 > 25 THEN 'late' ELSE 'on time' END AS verdict, i % 50 * 2.0 AS delay
        FROM generate_series(1, 300) i
"""
CREATE = """
    CREATE MODEL `ds.verdict` OPTIONS(model_type = 'DNN_CLASSIFIER', input_label_cols = ['verdict'], hidden_units = [8],
                                      max_iterations = 3, batch_size = 32)
        AS SELECT carrier, IF(distance > 40, 40, distance) AS distance, verdict FROM `my-project.ds.flights`;
    CREATE MODEL ds.delay OPTIONS(model_type = 'LINEAR_REG', input_label_cols = ['delay'], max_iterations = 3)
        AS SELECT carrier, distance, delay FROM ds.flights
"""


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    with shared_server.connect() as conn:
        conn.execute(TABLES)
    assert main(["sql", "-d", shared_server.dsn(), CREATE]) == 0
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with connect(server.dsn()) as client:
        yield client


@pytest.fixture
def run(server: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command; return its status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["sql", "-d", server.dsn(), *arguments])
        return status, *capsys.readouterr()

    return run


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# -- pg-tensile sql ---------------------------------------------------------------------------------------------------


def test_create_model_trains_with_the_options(conn: Connection) -> None:
    job = conn.execute(
        "SELECT epochs, batch_size, target, options, query FROM tensile.jobs WHERE model = 'ds.verdict'"
    ).fetchone()
    assert job is not None
    assert job[:4] == (3, 32, "verdict", {"task": "classification"})
    assert "CASE WHEN distance > 40 THEN 40 ELSE distance END" in job[4]
    hidden = "SELECT architecture->'hidden' FROM tensile.models WHERE model = %s"
    assert (value(conn, hidden, "ds.verdict"), value(conn, hidden, "ds.delay")) == ([8], [])


def test_predictions_have_bigquerys_columns(run: Callable[..., Any], conn: Connection) -> None:
    status, out, _ = run(
        "SELECT id, predicted_verdict, predicted_verdict_probs FROM ML.PREDICT(MODEL ds.verdict,"
        " (SELECT * FROM ds.flights WHERE id <= 5)) ORDER BY id"
    )
    assert status == 0
    found = rows(out)
    assert [row["id"] for row in found] == ["1", "2", "3", "4", "5"]
    query = "SELECT * FROM ds.flights WHERE id <= 5 ORDER BY id"
    expected = conn.execute("SELECT label, probability FROM predict_rows('ds.verdict', %s)", (query,)).fetchall()
    for row, (label, probability) in zip(found, expected, strict=True):
        assert row["predicted_verdict"] == label
        probabilities = {item["label"]: item["prob"] for item in json.loads(row["predicted_verdict_probs"])}
        assert probabilities.keys() == {"late", "on time"}
        assert probabilities[label] == pytest.approx(probability)


def test_a_table_can_be_predicted_and_joined(run: Callable[..., Any]) -> None:
    status, out, _ = run(
        "SELECT COUNT(*) AS n, COUNTIF(p.predicted_delay IS NOT NULL) AS m"
        " FROM ML.PREDICT(MODEL ds.delay, TABLE ds.flights) AS p JOIN ds.flights AS f USING (id)"
    )
    assert (status, rows(out)) == (0, [{"n": "300", "m": "300"}])


def test_evaluations(run: Callable[..., Any], conn: Connection) -> None:
    status, out, _ = run(
        "SELECT * FROM ML.EVALUATE(MODEL ds.delay, TABLE ds.flights); SELECT r2_score FROM ML.EVALUATE(MODEL ds.delay)"
    )
    assert status == 0
    given, of_training = (rows(part)[0] for part in out.split("\n\n"))
    scores: dict[str, float] = dict(
        conn.execute(
            "SELECT metric, value FROM evaluate_model('ds.delay', 'TABLE ds.flights') WHERE quantile IS NULL"
        ).fetchall()
    )
    assert float(given["r2_score"]) == pytest.approx(scores["r2"])
    assert float(given["mean_squared_error"]) == pytest.approx(scores["rmse"] ** 2)
    assert float(of_training["r2_score"]) == pytest.approx(
        value(
            conn,
            "SELECT metrics->'validation'->'r2' FROM tensile.model_versions v"
            " JOIN tensile.models m ON m.model_id = v.model_id"
            " WHERE m.model = 'ds.delay'",
        )
    )
    status, out, _ = run("SELECT accuracy, f1_score FROM ML.EVALUATE(MODEL ds.verdict)")
    assert status == 0 and 0 <= float(rows(out)[0]["accuracy"]) <= 1


def test_the_course_of_a_training(run: Callable[..., Any]) -> None:
    status, out, _ = run("SELECT * FROM ML.TRAINING_INFO(MODEL ds.delay)")
    assert status == 0
    assert [row["iteration"] for row in rows(out)] == ["1", "2", "3"]
    assert all(float(row["loss"]) > 0 and float(row["eval_loss"]) > 0 for row in rows(out))


def test_models_are_replaced_skipped_and_dropped(run: Callable[..., Any], conn: Connection) -> None:
    create = "MODEL ds.twice OPTIONS(model_type='LINEAR_REG', input_label_cols=['delay'], max_iterations=1) AS SELECT"
    create += " distance, delay FROM ds.flights"
    assert run(f"CREATE {create}")[0] == 0
    status, _, err = run(f"CREATE {create}")
    assert status == 1 and 'model "ds.twice" already exists' in err and "CREATE OR REPLACE MODEL" in err
    assert "exists already" in run(f"CREATE {create.replace('MODEL', 'MODEL IF NOT EXISTS', 1)}")[2]
    assert run(f"CREATE OR REPLACE {create}")[0] == 0
    versions = "SELECT max(version) FROM tensile.jobs WHERE model = 'ds.twice'"
    assert value(conn, versions) == 2
    assert run("DROP MODEL ds.twice; DROP MODEL IF EXISTS ds.twice")[0] == 0
    status, _, err = run("DROP MODEL ds.twice")
    assert status == 1 and "does not exist" in err


def test_a_wrong_query_registers_nothing(run: Callable[..., Any], conn: Connection) -> None:
    query = "SELECT nothing AS label, 1 AS a FROM ds.flights"
    status, _, err = run(f"CREATE MODEL ds.bad OPTIONS(model_type='LINEAR_REG') AS {query}")
    assert status == 1 and 'column "nothing" does not exist' in err
    assert value(conn, "SELECT count(*) FROM tensile.models WHERE model = 'ds.bad'") == 0


def test_scripts_and_other_statements(run: Callable[..., Any], tmp_path: Path, conn: Connection) -> None:
    script, output = tmp_path / "script.sql", tmp_path / "rows.csv"
    script.write_text(
        "CREATE TABLE ds.made (a INT64, b STRING); INSERT INTO ds.made VALUES (1, 'x'); SELECT * FROM ds.made"
    )
    status, out, err = run("-f", str(script), "-o", str(output))
    assert (status, out) == (0, "") and "INSERT 0 1" in err
    assert output.read_text() == "a,b\n1,x\n"
    conn.execute("DROP TABLE ds.made")
    assert run("--read", "snowflake", "SELECT IFF(1 > 0, 'a', 'b') AS x")[1] == "x\na\n"


@pytest.mark.parametrize(
    ("statement", "status", "message"),
    [
        ("SELECT * FROM ML.PREDICT(MODEL ds.nothing, TABLE ds.flights)", 1, 'model "ds.nothing" does not exist'),
        ("SELECT * FROM ML.PREDICT(MODEL ds.delay, (SELECT carrier FROM ds.flights))", 1, "distance"),
        ("SELECT FROM WHERE", 1, "line 1, column"),
        ("", 2, "there are no statements"),
        ("CREATE MODEL m OPTIONS(model_type='KMEANS') AS SELECT 1 AS a", 1, "model_type 'KMEANS' is not supported"),
    ],
)
def test_refusals(run: Callable[..., Any], statement: str, status: int, message: str) -> None:
    found, out, err = run(statement)
    assert found == status and len(out.splitlines()) <= 1  # at most the header
    assert message in err and "hint: " in err


def test_nothing_runs_if_a_later_statement_cannot_be_read(run: Callable[..., Any], conn: Connection) -> None:
    assert run("CREATE TABLE ds.early (a INT64); SELECT FROM WHERE")[0] == 1
    assert value(conn, "SELECT to_regclass('ds.early')") is None


# -- the client -------------------------------------------------------------------------------------------------------


def test_queries_are_read_in_their_dialect(client: Client) -> None:
    query = "SELECT carrier, IFF(distance > 40, 40, distance) AS distance, verdict FROM ds.flights"
    scores = client.evaluate("ds.verdict", query, read="snowflake")
    assert 0 <= scores.loc["accuracy", "value"] <= 1
    assert len(client.predict("ds.verdict", query, read="snowflake")) == 300
    assert client.explain("ds.verdict", query, "verdict", read="snowflake", epochs=1)
    job = client.train("ds.other", query, "verdict", epochs=1, read="snowflake", validation_query=query)
    assert job.wait(progress=False) == "finished"


def test_predictions_without_a_query(client: Client) -> None:
    assert len(client.predict("ds.delay")) == 300
    client.connection.execute("CREATE TABLE ds.today AS SELECT carrier, distance FROM ds.flights WHERE id <= 7")
    assert len(client.predict("ds.delay", source="ds.today")) == 7
    with pytest.raises(ArgumentError, match="a query or a source, not both"):
        client.predict("ds.delay", "TABLE ds.today", source="ds.today")
    with pytest.raises(ServerError, match="does not exist"):
        client.predict("ds.delay", source="ds.tomorrow")


@pytest.mark.parametrize(
    ("query", "read", "message"),
    [
        ("SELECT 1", "klingon", 'unknown dialect "klingon"'),
        ("SELECT 1; SELECT 2", "duckdb", "the query has 2 statements"),
        ("DELETE FROM t", "mysql", "the query is not a SELECT"),
        ("SELECT a b c FROM t", "spark", "line 1, column 12"),
    ],
)
def test_queries_that_cannot_be_read(client: Client, query: str, read: str, message: str) -> None:
    with pytest.raises(DialectError, match=message) as caught:
        client.predict("ds.delay", query, read=read)
    assert isinstance(caught.value, ValueError) and caught.value.hint
