"""tune_model: trials that share rows and device, pruning, the best version, and whatever may be killed meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    SLOW_ROWS,
    Connection,
    Wait,
    after_restart,
    children,
    finish,
    no_workers,
    python_model,
    register,
    submit,
    trainer_pid,
    value,
)
from tests.server.tuning import ENDED, SPACE, finished, trials, tune

CONTROLLER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_tensile controller'"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    return shared_server


@pytest.fixture
def conn(server: Any, wait_until: Wait) -> Iterator[Connection]:
    with server.connect() as connection:
        register(connection, "m", MLP)
        yield connection
    with server.connect() as connection:
        connection.execute("SELECT cancel_tuning(id) FROM tensile_internal.tunings WHERE ended_at IS NULL")
        wait_until(
            lambda: value(connection, "SELECT count(*) = 0 FROM tensile_internal.tunings WHERE ended_at IS NULL")
        )
        wait_until(lambda: no_workers(connection), what="the workers exit")
        connection.execute("SELECT drop_model(model) FROM tensile.models")
        connection.execute("DELETE FROM tensile_internal.tunings; DELETE FROM tensile_internal.jobs")


def rows_files(server: Any) -> list[str]:
    return [path.name for path in (server.data / "base" / "pgsql_tmp").glob("*tuning*")]


# -- from the call to the deployed version ----------------------------------------------------------------------------


def test_the_best_trial_is_deployed_and_the_rows_are_read_once(server: Any, conn: Connection, wait_until: Wait) -> None:
    conn.execute(f"CREATE TABLE scanned AS {ROWS}; ALTER TABLE scanned SET (autovacuum_enabled = off)")
    scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'scanned'"
    conn.execute("SELECT pg_stat_force_next_flush()")
    before = value(conn, scans)
    tuning = tune(conn, query="SELECT * FROM scanned", options={"keep": "last"}, trials=2, epochs=1)
    finished(conn, tuning)
    assert value(conn, "SELECT space = %s FROM tensile_internal.tunings WHERE id = %s", Jsonb(SPACE), tuning)
    rows = trials(conn, tuning, "number, state, value, job, version, epochs")
    assert [row[:2] for row in rows] == [(number, "finished") for number in range(2)]
    best = min(rows, key=lambda row: (row[2], row[0]))
    status = conn.execute(
        "SELECT state, trials, ended, metric, best_trial, best_value, best_version, decision, rows, error"
        " FROM tensile.tunings WHERE tuning = %s",
        (tuning,),
    ).fetchone()
    assert status == ("finished", 2, 2, "log_loss", best[0], best[2], best[4], "deployed", 400, None)
    assert conn.execute("SELECT version, job FROM tensile.model_versions").fetchall() == [(best[4], best[3])]
    reason, deployed, architecture = conn.execute(  # type: ignore[misc]
        "SELECT d.reason, m.deployed_version, m.architecture FROM tensile.deployments d"
        " JOIN tensile.models m ON m.model_id = d.model_id WHERE d.ended_at IS NULL"
    ).fetchone()
    assert reason == f"tuning {tuning}, trial {best[0]}: log_loss is {best[2]}"
    params = trials(conn, tuning, "params")[best[0]][0]
    assert (deployed, architecture) == (best[4], {"type": "mlp", "hidden": params["hidden"]})
    wait_until(lambda: no_workers(conn), what="the workers exit, and report their statistics")
    assert value(conn, scans) == before + 1
    assert value(conn, "SELECT count(DISTINCT fingerprint) FROM tensile.jobs") == 1
    wait_until(lambda: not rows_files(server), what="the rows are deleted")
    conn.execute("DROP TABLE scanned")


def test_as_many_jobs_as_asked_for_train_at_once(conn: Connection, wait_until: Wait) -> None:
    register(conn, "idle", python_model(on_forward="time.sleep(0.1)"))
    options, space = {"keep": "last"}, {"learning_rate": [1e-3]}
    tuning = tune(conn, "idle", trials=3, parallel=2, epochs=FOREVER, options=options, space=space)
    open_jobs = "SELECT count(*) FROM tensile.jobs WHERE tuning = %s AND state = 'running' AND rows IS NOT NULL"
    wait_until(lambda: value(conn, open_jobs, tuning) == 2)
    wait_until(lambda: [row[1] for row in trials(conn, tuning)] == ["running", "running", "waiting"])
    another = submit(conn, "idle", epochs=1, batch_size=319)  # a training of the model beside its trials
    finish(conn, another)
    assert value(conn, "SELECT cancel_tuning(%s)", tuning) is True
    assert value(conn, ENDED, tuning) == "cancelled"
    assert {row[1] for row in trials(conn, tuning)} == {"cancelled"}
    assert value(conn, "SELECT count(*) FROM tensile.jobs WHERE tuning = %s AND state <> 'cancelled'", tuning) == 0
    assert value(conn, "SELECT reason FROM tensile.jobs WHERE tuning = %s LIMIT 1", tuning) == (
        "cancelled by cancel_tuning"
    )
    assert value(conn, "SELECT cancel_tuning(%s)", tuning) is False
    assert value(conn, "SELECT array_agg(version) FROM tensile.model_versions") == [1]


def test_architectures_and_arguments_are_chosen(conn: Connection) -> None:
    """And the best version is not deployed where the options say so."""
    space = {
        "architecture": ["mlp", "tabular"],
        "hidden": [4, 8],
        "layers": {"low": 1, "high": 2},
        "batch_size": {"low": 32, "high": 96, "step": 32},
        "optimizer": ["adam", "sgd"],
        "weight_decay": {"low": 0, "high": 0.1},
    }
    arguments: dict[str, Any] = {"batch_size": None, "epochs": 1, "metric": "accuracy", "options": {"deploy": "never"}}
    tuning = tune(conn, space=space, trials=2, seed=3, **arguments)  # seed: one of each type
    finished(conn, tuning)
    for params, architecture, batch_size, optimizer, options in conn.execute(
        "SELECT k.params, j.architecture, j.batch_size, j.optimizer, j.options"
        " FROM tensile.trials k JOIN tensile.jobs j ON j.job = k.job WHERE k.tuning = %s",
        (tuning,),
    ):
        kind = params["architecture"]
        hidden = params["hidden"] if kind == "tabular" else [params["hidden"]]
        layers = {"layers": params["layers"]} if kind == "tabular" else {}
        assert architecture == {"type": kind, "hidden": hidden} | layers
        assert (batch_size, optimizer) == (params["batch_size"], params["optimizer"])
        assert options["weight_decay"] == params["weight_decay"] and options["deploy"] == "never"
    assert {row[0]["architecture"] for row in trials(conn, tuning, "params")} == {"mlp", "tabular"}
    values = [row[2] for row in trials(conn, tuning)]
    best = value(conn, "SELECT best_trial FROM tensile_internal.tunings WHERE id = %s", tuning)
    assert values[best] == max(values)
    assert value(conn, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") is None


@pytest.fixture(scope="module")
def rival(server: SharedServer) -> bytes:
    """The file of a version that has learned nothing."""
    with server.connect() as conn:
        finish(conn, submit(conn, "rival", MLP, epochs=1, learning_rate=1e-9))
        contents = bytes(value(conn, "SELECT export_model('rival')"))
        conn.execute("SELECT drop_model('rival')")
    return contents


@pytest.mark.parametrize(("margin", "decided"), [pytest.param(0, "deployed", marks=pytest.mark.long), (1, "kept")])
def test_a_version_is_deployed_only_if_it_is_better(
    conn: Connection, rival: bytes, margin: float, decided: str
) -> None:
    """The first case is long: the best trial is trained, and both versions are evaluated, once more; test_gate.py has a
    better version that is deployed."""
    conn.execute("SELECT import_model(%b, 'm')", (rival,))
    gate = {"deploy": "if_better", "gate": {"query": ROWS, "metric": "accuracy", "margin": margin}}
    tuning = tune(conn, options=gate, trials=1, epochs=10, space={"learning_rate": [0.03], "hidden": [[16]]})
    finished(conn, tuning)
    decision, reason = conn.execute(  # type: ignore[misc]
        "SELECT decision, reason FROM tensile.deployments ORDER BY id DESC LIMIT 1"
    ).fetchone()
    assert decision == decided and reason.startswith(f"tuning {tuning}, trial 0: accuracy is ")
    assert value(conn, "SELECT decision FROM tensile.tunings WHERE tuning = %s", tuning) == decided
    warned = (
        value(conn, "SELECT array_to_string(warnings, '; ') FROM tensile_internal.tunings WHERE id = %s", tuning) or ""
    )
    assert ("was not deployed" in warned) == (decided == "kept")
    model = "SELECT deployed_version, architecture FROM tensile.models WHERE model = 'm'"
    deployed = (1, MLP) if decided == "kept" else (2, MLP | {"hidden": [16]})
    assert conn.execute(model).fetchone() == deployed


# -- pruning ----------------------------------------------------------------------------------------------------------


def loses(rungs: list[float], known: list[list[float]], factor: int) -> bool:
    """Return whether a loss is not among the best 1 / factor of those known at its last comparison."""
    others = [other[len(rungs) - 1] for other in known if len(other) >= len(rungs)]
    better = sum(other < rungs[-1] for other in others)
    return len(others) + 1 >= factor and better >= (len(others) + 1) // factor


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_trial_is_compared_with_those_that_it_knows(db: Connection, factor: int, parallel: int) -> None:
    """The rule on values of many trials, of which those are pruned that it names."""
    generator = random.Random(5)
    insert = "INSERT INTO tensile_internal.trials (tuning, number, params, rungs) VALUES (-1, %s, '{}', %s)"
    prunes = (
        "SELECT tensile_internal._loses(t, k) FROM tensile_internal.tunings t"
        " JOIN tensile_internal.trials k ON k.tuning = t.id AND number = %s"
    )
    with db.transaction(force_rollback=True):
        register(db, "m", MLP)
        db.execute(
            "INSERT INTO tensile_internal.tunings (id, model_id, model, owner, architecture, arguments, settings,"
            " space,"
            " trials, parallel, metric, halving, state) SELECT -1, id, name, 'postgres', '{}', '{}', '{}', '{}', 60,"
            " %s, 'log_loss', %s, 'running' FROM tensile_internal.models",
            (parallel, Jsonb({"min_epochs": 1, "factor": factor})),
        )
        all_rungs: list[list[float]] = []
        decisions = []
        for number in range(60):
            rungs: list[float] = []
            while len(rungs) < 3:
                rungs.append(generator.randrange(30) / 8)
                db.execute(
                    f"{insert} ON CONFLICT (tuning, number) DO UPDATE SET rungs = excluded.rungs", (number, rungs)
                )
                lost = value(db, prunes, number)
                assert lost == loses(rungs, all_rungs[: max(number - 2 * parallel + 1, 0)], factor), (number, rungs)
                decisions.append(lost)
                if lost:
                    break
            all_rungs.append(rungs)
        assert 20 < sum(decisions) < len(decisions) - 20


def test_trials_that_are_worse_than_those_before_are_pruned(conn: Connection) -> None:
    """Each decision is that of the documented rule, made again here from the values."""
    arguments: dict[str, Any] = {"trials": 3, "parallel": 1, "epochs": 3, "halving": {"min_epochs": 1, "factor": 2}}
    tuning = tune(
        conn, space={"learning_rate": {"low": 1e-4, "high": 0.1, "log": True}}, seed=0, **arguments
    )  # the last one is worse than the first
    finished(conn, tuning)
    rows = trials(conn, tuning)
    assert {row[1] for row in rows} == {"finished", "pruned"}
    for number, state, found, _, _, rungs in rows:
        known = [row[5] for row in rows if row[0] <= number - 2]  # rungs of all earlier trials but the one just before
        for rung in range(len(rungs)):
            lost = loses(rungs[: rung + 1], known, 2)
            assert lost == (state == "pruned" and rung == len(rungs) - 1), (number, rung)
        assert state == "finished" or found == rungs[-1]
        assert state == "pruned" or len(rungs) == 2  # after 1 and 2 epochs
    pruned = "SELECT bool_and(j.state = 'finished' OR j.reason LIKE 'pruned after %% epochs') FROM tensile.trials k"
    assert value(
        conn, f"{pruned} JOIN tensile.jobs j ON j.job = k.job WHERE k.tuning = %s AND k.state = 'pruned'", tuning
    )
    assert value(conn, "SELECT count(*) FROM tensile.model_versions") == 1


def test_a_trial_that_does_not_fit_into_the_memory_is_no_error(conn: Connection) -> None:
    space = {"hidden": [[8], [1000, 1000]]}
    tuning = tune(conn, space=space, trials=2, epochs=1, policy="joint", memory_budget="4MB", seed=0)
    finished(conn, tuning)
    for state, params, least, sqlstate in trials(conn, tuning, "state, params, least_bytes, sqlstate"):
        if params["hidden"] == [8]:
            assert (state, sqlstate) == ("finished", None) and least < 4 << 20
        else:
            assert (state, sqlstate) == ("infeasible", "53200") and least > 4 << 20
    assert {row[0] for row in trials(conn, tuning, "state")} == {"finished", "infeasible"}


def test_values_that_exclude_each_other_are_infeasible(conn: Connection) -> None:
    register(conn, "words", {"type": "transformer", "layers": 1})
    query = "SELECT ARRAY[i % 7, i % 5] AS tokens, i % 2 = 0 AS y FROM generate_series(1, 100) i"
    space = {"dim": [8, 12], "heads": [2, 8]}
    tuning = tune(conn, "words", query=query, space=space, trials=2, epochs=1, batch_size=20, seed=0)
    finished(conn, tuning)
    assert {row[0] for row in trials(conn, tuning, "state")} == {"finished", "infeasible"}
    for state, params, error in trials(conn, tuning, "state, params, error"):
        fits = params["dim"] % params["heads"] == 0
        assert state == ("finished" if fits else "infeasible")
        assert fits or "divisible" in error


# -- the same trials, whatever happens --------------------------------------------------------------------------------


@pytest.mark.long
def test_kills_lose_no_trial_and_the_same_seed_gives_the_same_trials(
    server: Any, conn: Connection, wait_until: Wait
) -> None:
    arguments: dict[str, Any] = {"trials": 7, "epochs": 30, "seed": 11, "halving": {"min_epochs": 3, "factor": 2}}
    arguments["policy"] = "joint"
    first = tune(conn, options={"keep": "last", "deploy": "never"}, **arguments)
    finished(conn, first)
    expected = trials(conn, first, "number, state, value, params, rungs")
    server.expect("was terminated by signal 9")

    second = tune(conn, options={"keep": "last", "deploy": "never"}, **arguments)
    over = "SELECT ended_at IS NOT NULL FROM tensile_internal.tunings WHERE id = %s"
    running = "SELECT job FROM tensile.trials WHERE tuning = %s AND state = 'running' ORDER BY number DESC LIMIT 1"

    def trainer() -> int | None:
        job = value(conn, running, second)
        return None if job is None else trainer_pid(conn, job)

    def tuner() -> int | None:
        controller = value(conn, CONTROLLER)
        named = [pid for pid in children(controller or 0) if "tuner" in server.processes().get(pid, "")]
        return named[0] if named else None

    def worker() -> int | None:
        pid: int | None = value(
            conn, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker' LIMIT 1"
        )
        return pid or (value(conn, CONTROLLER) if value(conn, over, second) else None)

    def kill(find: Callable[[], int | None]) -> None:
        """Kill the process once it is there; it may end while it is looked for."""

        def killed() -> bool:
            pid = find()
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False

        wait_until(killed)

    kill(trainer)
    kill(tuner)
    wait_until(lambda: value(conn, "SELECT count(*) >= 2 FROM tensile.trials WHERE tuning = %s"
                                   " AND ended_at IS NOT NULL", second))  # fmt: skip
    conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                 " WHERE backend_type = 'pg_tensile controller'")  # fmt: skip
    kill(worker)
    conn = after_restart(server, conn, wait_until)
    with conn:
        finished(conn, second)
        assert trials(conn, second, "number, state, value, params, rungs") == expected
        other = tune(conn, options={"keep": "last", "deploy": "never"}, **arguments | {"seed": 12, "trials": 2})
        finished(conn, other)
        assert trials(conn, other, "params") != [row[3:4] for row in expected[:2]]


@pytest.mark.long
def test_a_stop_of_the_server_continues_the_tuning(server: SharedServer, conn: Connection, wait_until: Wait) -> None:
    """Long: the server restarts, and trains three trials."""
    tuning = tune(conn, trials=3, epochs=100, options={"keep": "last"})
    wait_until(lambda: value(conn, "SELECT count(*) > 0 FROM tensile.trials WHERE state = 'running'"))
    conn.close()
    server.restart("fast")
    with server.connect() as conn:
        finished(conn, tuning)
        assert [row[1] for row in trials(conn, tuning)] == ["finished"] * 3
        assert value(conn, "SELECT sum(attempts) >= 4 FROM tensile.jobs")
        wait_until(lambda: not rows_files(server))


def test_the_max_time_ends_the_tuning_with_the_best_trial_so_far(conn: Connection, wait_until: Wait) -> None:
    """Its space is the default: that of the architecture."""
    register(conn, "plain", {"type": "mlp", "dropout": 0.1})
    tuning = tune(conn, "plain", space=None, trials=10_000, parallel=1, epochs=1)
    space = value(conn, "SELECT space FROM tensile_internal.tunings WHERE id = %s", tuning)
    assert set(space) == {"learning_rate", "weight_decay", "hidden", "norm"}  # dropout is the model's
    wait_until(lambda: value(conn, "SELECT best_trial IS NOT NULL FROM tensile_internal.tunings WHERE id = %s", tuning))
    conn.execute("UPDATE tensile_internal.tunings SET max_time = '1 ms' WHERE id = %s", (tuning,))
    finished(conn, tuning)
    assert value(conn, "SELECT count(*) < 10000 FROM tensile.trials WHERE tuning = %s", tuning)
    assert value(conn, "SELECT decision FROM tensile.tunings WHERE tuning = %s", tuning) == "deployed"


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_query_that_fails_ends_the_tuning(conn: Connection) -> None:
    query = "SELECT i AS x, 1 / (i - 3) AS y FROM generate_series(1, 9) i"
    tuning = tune(conn, query=query, batch_size=None, trials=2)
    with pytest.raises(psycopg.errors.DivisionByZero):
        value(conn, ENDED, tuning)
    assert {row[1] for row in trials(conn, tuning)} == {"failed"}


def test_a_metric_of_another_task_ends_the_tuning(conn: Connection) -> None:
    tuning = tune(conn, metric="rmse", trials=1)
    refused("22023", 'has no metric "rmse"', "log_loss", lambda: value(conn, ENDED, tuning))


def test_a_model_that_is_dropped_ends_its_tuning(conn: Connection, wait_until: Wait) -> None:
    tuning = tune(conn, query=SLOW_ROWS)
    wait_until(lambda: value(conn, "SELECT count(*) > 0 FROM tensile.jobs WHERE state = 'running'"))
    refused("55006", "is being tuned by tuning", "cancel_tuning",
            lambda: conn.execute("SELECT register_model('m', '{\"type\": \"mlp\"}', replace => true)"))  # fmt: skip
    conn.execute("SELECT drop_model('m')")
    refused("42704", 'model "m" was dropped', "Register", lambda: value(conn, ENDED, tuning))


def test_an_open_tuning_of_a_dump_goes_on_where_it_is_restored(conn: Connection, wait_until: Wait) -> None:
    """A dump has no open jobs: their trials are submitted again."""
    tuning = tune(conn, trials=2, epochs=1)
    finished(conn, tuning)
    expected = trials(conn, tuning, "number, state, value, params")
    conn.execute(
        "UPDATE tensile_internal.tunings SET state = 'running', ended_at = NULL;"
        " UPDATE tensile_internal.trials SET state = 'running', value = NULL, ended_at = NULL, job = 1000000"
        " WHERE number > 0;"
        " SELECT tensile_internal._notify(-1)"
    )
    finished(conn, tuning)
    assert trials(conn, tuning, "number, state, value, params") == expected
