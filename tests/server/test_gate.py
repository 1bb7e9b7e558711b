"""Jobs that deploy their version only if it is better than the deployed one (options deploy and gate).

The model learns a line; the slope of a job's rows decides how well its version fits the rows of the gate, whose slope
is 1. `GATED` waits in the gate query while a test holds a lock.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest

from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import (
    Connection,
    Wait,
    after_restart,
    children,
    finish,
    phase,
    register,
    settle,
    state,
    submit,
    value,
    worker_pid,
)

LINE = "SELECT x, {slope} * x AS y FROM (SELECT i / 50.0 - 1 AS x FROM generate_series(0, 99) i) p"
GATE = LINE.format(slope=1)
GATED = f"SELECT g.* FROM ({GATE}) g, pg_advisory_xact_lock_shared(7)"
ROUNDS = int(os.environ.get("PG_TENSILE_GATE_ROUNDS", "6"))


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    return shared_server


@pytest.fixture
def conn(server: SharedServer) -> Iterator[Connection]:
    with server.connect() as connection:
        register(connection, "line", {"type": "mlp", "hidden": [4]})
        yield connection
    with server.connect() as connection:
        connection.execute("SELECT drop_model(model) FROM tensile.models")


@pytest.fixture(scope="module")
def steep(server: SharedServer) -> bytes:
    """The file of a version that has learned a line of slope 3."""
    with server.connect() as conn:
        register(conn, "steep", {"type": "mlp", "hidden": [4]})
        finish(conn, train(conn, 3, model="steep"))
        contents = bytes(value(conn, "SELECT export_model('steep')"))
        conn.execute("SELECT drop_model('steep')")
    return contents


@pytest.fixture
def beaten(conn: Connection, steep: bytes) -> Connection:
    """The connection, with a deployed version that others can easily beat."""
    conn.execute("SELECT import_model(%b, 'line')", (steep,))
    return conn


def train(
    conn: Connection, slope: float, gate: dict[str, Any] | None = None, model: str = "line", **arguments: Any
) -> int:
    """Submit a job on a line of that slope, whose version has to pass the gate; return the job."""
    options = {"deploy": "if_better", "gate": {"query": GATE} | (gate or {})}
    small: dict[str, Any] = {
        "query": LINE.format(slope=slope),
        "target": "y",
        "epochs": 20,
        "batch_size": 10,
        "learning_rate": 0.05,
    }
    return submit(conn, model, **small | {"options": options} | arguments)


class Decision(NamedTuple):
    version: int
    decision: str
    in_force: bool
    previous: int | None


def decisions(conn: Connection) -> list[Decision]:
    rows = conn.execute(
        "SELECT version, decision, ended_at IS NULL, previous_version FROM tensile.deployments ORDER BY id"
    ).fetchall()
    return [Decision(*row) for row in rows]


def deployed(conn: Connection) -> int | None:
    number: int | None = value(conn, "SELECT deployed_version FROM tensile.models WHERE model = 'line'")
    return number


def warning(conn: Connection, job: int) -> str | None:
    text: str | None = value(conn, "SELECT warnings[1] FROM tensile.jobs WHERE job = %s", job)
    return text


# -- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slope", "better"), [(1.5, True), (-3, False)])
def test_a_better_version_is_deployed_and_a_worse_one_is_not(beaten: Connection, slope: float, better: bool) -> None:
    conn = beaten
    job = train(conn, slope)
    finish(conn, job)
    assert decisions(conn) == [
        Decision(1, "deployed", not better, None),
        Decision(2, "deployed" if better else "kept", better, 1),
    ]
    assert deployed(conn) == (2 if better else 1)
    columns = "metric, value, previous_value, reason, decided_by, job"
    row = conn.execute(f"SELECT {columns} FROM tensile.deployments ORDER BY id DESC LIMIT 1").fetchone()
    assert row is not None
    metric, found, before, reason, *by = row
    assert metric == "rmse" and (found < before) == better and by == ["postgres", job]
    assert reason == value(conn, "SELECT format('rmse is %%s, of version 1 it is %%s', %s, %s)", found, before)
    squares = "avg((prediction - (row_number - 1) / 50.0 + 1) ^ 2)"  # of the errors: the rows are a line of slope 1
    evaluated = f"SELECT sqrt({squares}) FROM predict_rows('line', %s)"
    assert value(conn, evaluated, f"{GATE} ORDER BY x") == pytest.approx(found if better else before)
    warned = warning(conn, job) or ""
    assert warned.startswith("" if better else "version 2 was not deployed: rmse is") and bool(warned) != better


@pytest.mark.long
def test_only_more_than_the_margin_is_better(beaten: Connection) -> None:
    """Long: it trains and compares three times; test_tuning.py has a margin that a version does not reach."""
    conn = beaten
    finish(conn, train(conn, 3))  # the same weights: a tie
    finish(conn, train(conn, 1, {"margin": 10}))
    finish(conn, train(conn, 1, {"margin": 0.1, "metric": "r2"}))
    assert [decision.decision for decision in decisions(conn)] == ["deployed", "kept", "kept", "deployed"]
    rows = "SELECT value - previous_value, reason, metric FROM tensile.deployments WHERE job IS NOT NULL ORDER BY id"
    tie, wide, other = conn.execute(rows).fetchall()
    assert tie[0] == 0
    assert wide[0] < 0 and wide[1].endswith("; the margin is 10")
    assert other[0] > 0.1 and other[2] == "r2"


def test_what_cannot_be_compared_is_not_deployed(beaten: Connection) -> None:
    """A metric that the rows do not define; one of another task is refused."""
    conn = beaten
    gates = [
        ({"query": f"{GATE} LIMIT 1", "metric": "r2"}, "r2 is not defined"),
        ({"query": f"{GATE}", "metric": "accuracy"}, None),
    ]
    for gate, message in gates:
        if message is None:
            refused("22023", 'no metric "accuracy"', "rmse", lambda: train(conn, 1, gate))  # noqa: B023
            continue
        job = train(conn, 1, gate)
        finish(conn, job)
        assert message in (warning(conn, job) or ""), warning(conn, job)
    assert {decision.decision for decision in decisions(conn)[1:]} == {"kept"} and deployed(conn) == 1


def test_a_version_of_another_task_is_not_compared(beaten: Connection) -> None:
    conn = beaten
    labels = "SELECT x, CASE WHEN y > 0 THEN 'up' ELSE 'down' END AS y FROM ({}) r"
    job = train(conn, 1, {"query": labels.format(GATE)}, query=labels.format(LINE.format(slope=1)))
    finish(conn, job)
    assert "the comparison with version 1 failed with SQLSTATE" in (warning(conn, job) or "")
    assert deployed(conn) == 1


def test_labels_are_compared_on_the_validation_query(conn: Connection) -> None:
    labels = "SELECT x, CASE WHEN {} * x > 0 THEN 'up' ELSE 'down' END AS y FROM ({}) r"
    good, bad = (labels.format(sign, GATE) for sign in (1, -1))
    for query in (bad, good):
        job = train(conn, 1, query=query, validation_query=good, options={"deploy": "if_better"})
        finish(conn, job)
    assert deployed(conn) == 2
    rows = conn.execute("SELECT metric, reason LIKE 'log_loss is %' FROM tensile.deployments ORDER BY id").fetchall()
    assert rows == [(None, False), ("log_loss", True)]
    assert value(conn, "SELECT reason FROM tensile.deployments WHERE version = 1") == "no version was deployed"


@pytest.mark.parametrize(
    ("options", "sqlstate", "message", "hint"),
    [
        ({"deploy": "if_better"}, "22023", "there are no rows on which", "validation_query"),
        ({"gate": {"query": GATE}}, "22023", 'option "gate" requires the option "deploy"', "if_better"),
        ({"deploy": "never", "gate": {}}, "22023", 'option "gate" requires', "if_better"),
        ({"deploy": "maybe"}, "22023", 'invalid value for key "deploy"', "true or false"),
        ({"deploy": "if_better", "gate": {"query": GATE, "margin": -1}}, "22023", '"gate.margin"', "at least 0"),
        ({"deploy": "if_better", "gate": {"query": GATE, "metric": "roc"}}, "22023", '"gate.metric"', "roc_auc"),
        ({"deploy": "if_better", "gate": {"query": ""}}, "42601", "the gate query is empty", "SELECT"),
        ({"deploy": "if_better", "gate": {"query": 1}}, "22023", '"gate.query"', "a text"),
        ({"deploy": "if_better", "gate": []}, "22023", 'key "gate"', "an object"),
        ({"deploy": "if_better", "gate": {"query": "SELECT 1 AS x"}}, "42703", 'column "y" is missing', "target"),
        ({"deploy": "if_better", "gate": {"query": "SELECT 1; SELECT 2"}}, "42601", "more than one statement", "one"),
        ({"deploy": "if_better", "gate": {"query": "DELETE FROM p"}}, "42601", "gate query is not a SELECT", "SELECT"),
    ],
)
def test_wrong_options(conn: Connection, options: dict[str, Any], sqlstate: str, message: str, hint: str) -> None:
    refused(sqlstate, message, hint, lambda: train(conn, 1, options=options))
    assert value(conn, "SELECT count(*) FROM tensile.jobs WHERE ended_at IS NULL") == 0


def test_true_and_false_are_always_and_never(conn: Connection) -> None:
    finish(conn, train(conn, 1, options={"deploy": True}))
    finish(conn, train(conn, 1, options={"deploy": False}))
    assert decisions(conn) == [Decision(1, "deployed", True, None)]


def test_the_gate_query_runs_as_the_role_that_trains(server: SharedServer, beaten: Connection) -> None:
    """It needs the privileges of that role at both times, and no privilege to predict."""
    conn = beaten
    conn.execute(f"CREATE ROLE trainer LOGIN IN ROLE tensile_user; CREATE TABLE secret AS {GATE}")
    conn.execute("SELECT grant_model('line', 'trainer', 'train')")
    with server.connect(user="trainer") as trainer:
        secret = {"query": "SELECT * FROM secret WHERE current_user = 'trainer'"}
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="table secret"):
            train(trainer, 1, secret)
        conn.execute("GRANT SELECT ON secret TO trainer")
        waits = {"query": f"SELECT s.* FROM ({secret['query']}) s, pg_advisory_xact_lock_shared(7)"}
        conn.execute("SELECT pg_advisory_lock(7)")
        job = train(trainer, 2, waits)
        conn.execute("REVOKE SELECT ON secret FROM trainer; SELECT pg_advisory_unlock(7)")
        finish(conn, job)
        assert "42501: permission denied for table secret" in (warning(conn, job) or "")
        assert value(conn, "SELECT decided_by FROM tensile.deployments WHERE version = 2") == "trainer"
        assert value(trainer, "SELECT count(*) FROM tensile.deployments") == 2
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="must be owner"):
            trainer.execute("SELECT rollback_model('line')")
        conn.execute("SELECT revoke_model('line', 'trainer', 'train')")
        assert value(trainer, "SELECT count(*) FROM tensile.deployments") == 0
    conn.execute("DROP TABLE secret; DROP ROLE trainer")


# -- interruptions ----------------------------------------------------------------------------------------------------


def compare(conn: Connection, wait_until: Wait, slope: float) -> int:
    """Train a job until it waits in the gate query for the lock that this session holds."""
    conn.execute("SELECT pg_advisory_lock(7)")
    job = train(conn, slope, {"query": GATED})
    waiting = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    wait_until(lambda: value(conn, waiting), what=lambda: f"job {job} is {state(conn, job)} in {phase(conn, job)}")
    assert phase(conn, job) == "comparing"
    return job


def test_the_version_that_is_deployed_meanwhile_is_the_one_to_beat(beaten: Connection, wait_until: Wait) -> None:
    conn = beaten
    finish(conn, train(conn, 1, options={"deploy": "never"}))
    job = compare(conn, wait_until, 2)  # better than version 1, worse than version 2
    conn.execute("SELECT deploy_model('line', 2, 'it is needed now'), pg_advisory_unlock(7)")
    finish(conn, job)
    assert decisions(conn)[1:] == [Decision(2, "deployed", True, 1), Decision(3, "kept", False, 2)]


def test_a_job_that_is_cancelled_while_it_compares_deploys_nothing(beaten: Connection, wait_until: Wait) -> None:
    conn = beaten
    job = compare(conn, wait_until, 1)
    conn.execute("SELECT cancel_job(%s)", (job,))
    settle(conn, wait_until, job)
    conn.execute("SELECT pg_advisory_unlock(7)")
    assert state(conn, job) == "cancelled"
    assert len(decisions(conn)) == 1
    assert value(conn, "SELECT count(*) FROM tensile.model_versions") == 1


def test_a_trainer_that_dies_is_replaced(beaten: Connection, wait_until: Wait) -> None:
    conn = beaten
    job = compare(conn, wait_until, 1)
    worker = worker_pid(conn, job)
    assert worker is not None
    victims = children(worker)
    assert len(victims) == 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    conn.execute("SELECT pg_advisory_unlock(7)")
    finish(conn, job)
    assert deployed(conn) == 2 and value(conn, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 1


@pytest.mark.long
def test_no_worse_version_is_deployed_in_any_round(server: SharedServer, conn: Connection, wait_until: Wait) -> None:
    """Data get better and worse; in every third round the worker is killed while it compares, and the server restarts.

    PG_TENSILE_GATE_ROUNDS sets the number of rounds."""
    server.expect("was terminated by signal 9")
    best: float | None = None
    connection = conn
    for number in range(ROUNDS):
        slope = 1 + (2, -3.1, 1.2, 1.7, 0.5, -2.2)[number % 6] / (1 + number // 6)
        if number % 3 == 2:
            job = compare(connection, wait_until, slope)
            pid = worker_pid(connection, job)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            connection = after_restart(server, connection, wait_until)
        else:
            job = train(connection, slope)
        wait_until(lambda: state(connection, job) == "finished", what=lambda: state(connection, job))  # noqa: B023
        before, now = best, rmse(connection)
        best = now
        assert before is None or now <= before
        decided = decisions(connection)[-1]
        assert decided.version == number + 1
        assert (decided.decision == "deployed") == (before is None or now < before)
        assert decided.in_force == (decided.decision == "deployed")
    assert len(decisions(connection)) == ROUNDS
    connection.close()


def rmse(conn: Connection) -> float:
    """Return the error of the deployed version on the rows of the gate."""
    return float(value(conn, "SELECT value FROM evaluate_model('line', %s) WHERE metric = 'rmse'", GATE))
