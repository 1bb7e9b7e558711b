"""Refusals of tune_model, and tunings of other roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.cast import current_user
from tests.server.refusals import refused
from tests.server.support import MLP, ROWS, SLOW_ROWS, Connection, Wait, register, value
from tests.server.tuning import ENDED, finished, tune, tuning_state


@pytest.fixture
def conn(db: Connection) -> Connection:
    """A connection with model m."""
    register(db, "m", MLP)
    return db


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "message", "hint"),
    [
        ({"trials": 0}, "22023", "trials is out of range: 0", "1 to 10000"),
        ({"trials": None}, "22004", 'argument "trials" must not be null', "Pass a value"),
        ({"parallel": 65}, "22023", "parallel is out of range: 65", "1 to 64"),
        ({"max_time": "-1 s"}, "22023", "max_time is out of range", "1 hour"),
        ({"max_time": "200000 years"}, "22023", "max_time is out of range", "100 years"),
        ({"metric": "speed"}, "22023", 'trials have no metric "speed"', "log_loss"),
        ({"metric": "mape"}, "22023", 'trials have no metric "mape"', "rmse"),
        ({"validation": 0}, "22023", "no rows for validation", "validation_query"),
        ({"halving": []}, "22023", "halving must be a JSON object", "min_epochs"),
        ({"halving": {"factor": 1}}, "22023", 'key "factor" in the halving', "2 to 100"),
        ({"halving": {"rungs": 1}}, "22023", 'unknown key "rungs" in the halving', "keys"),
        ({"space": {}}, "22023", "at least one key", "For example"),
        ({"space": []}, "22023", "space must be a JSON object", "For example"),
        ({"space": {"lerning_rate": [1]}}, "22023", 'unknown key "lerning_rate" in the space', "learning_rate"),
        ({"space": {"members": [1]}}, "22023", 'unknown key "members" in the space', "keys"),
        ({"space": {"deploy": ["never"]}}, "22023", 'unknown key "deploy" in the space', "keys"),
        ({"space": {"hidden": []}}, "22023", 'list of key "hidden" in the space has 0 values', "1 to 1000"),
        ({"space": {"hidden": [[4], [4]]}}, "22023", "has a value twice", "Leave"),
        ({"space": {"hidden": 4}}, "22023", 'key "hidden" in the space is neither', "list"),
        ({"space": {"hidden": ["x"]}}, "22023", 'key "hidden[0]" in the space', "array"),
        ({"space": {"dropout": [0.5, 1.5]}}, "22023", 'key "dropout[1]" in the space: 1.5', "less than 1"),
        ({"space": {"dropout": {"low": 0.5, "high": 0.1}}}, "22023", "is empty: from 0.5 to 0.1", '"low": 0.1'),
        ({"space": {"dropout": {"low": 0}}}, "22023", 'needs the numbers "low" and "high"', "For example"),
        ({"space": {"dropout": {"low": 0, "high": 0.5, "log": True}}}, "22023", "logarithmic, but begins at 0", "log"),
        ({"space": {"dropout": {"low": 0, "high": 0.5, "steps": 1}}}, "22023", 'unknown key "dropout.steps"', "step"),
        ({"space": {"dropout": {"low": 0, "high": 1}}}, "22023", 'key "dropout.high" in the space: 1', "less than 1"),
        (
            {"space": {"batch_size": {"low": 1.5, "high": 4}}, "batch_size": None},
            "22023",
            '"batch_size.low"',
            "integer",
        ),
        ({"space": {"activation": {"low": 1, "high": 4}}}, "22023", "do not form one", "relu"),
        ({"space": {"dropout": {"low": 0, "high": 0.5, "step": 0}}}, "22023", '"step" a positive number', "For"),
        ({"space": {"architecture": ["mlp", "svm"]}}, "22023", '"architecture" in the space: "svm"', "tabular"),
        ({"space": {"architecture": "mlp"}}, "22023", 'key "architecture" in the space is neither', "list"),
        ({"space": {"learning_rate": [1]}, "learning_rate": 0.1}, "22023", '"learning_rate" has a value', "Leave"),
        ({"space": {"clip": [1]}, "options": {"clip": 2}}, "22023", '"clip" has a value, and is in the space', "Leave"),
        ({"query": "SELECT 1"}, "42703", "is not a column", "target"),
        ({"epochs": 0}, "22023", "epochs is out of range", "1 to"),
        ({"options": {"gate": {"query": ROWS}}}, "22023", 'option "gate" requires', "if_better"),
    ],
)
def test_wrong_arguments(conn: Connection, arguments: dict[str, Any], sqlstate: str, message: str, hint: str) -> None:
    refused(sqlstate, message, hint, lambda: tune(conn, **arguments))
    assert value(conn, "SELECT count(*) FROM tensile_internal.tunings") == 0


def test_waiting_for_what_cannot_end(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        tuning = tune(conn)
        refused(
            "55000", f"tuning {tuning} was submitted by this transaction", "Commit", lambda: value(conn, ENDED, tuning)
        )
    refused("42704", "tuning 999999 does not exist", "tensile.tunings", lambda: value(conn, ENDED, 999_999))
    refused("42704", "tuning 999999 does not exist", "tensile.tunings",
            lambda: conn.execute("SELECT cancel_tuning(999999)"))  # fmt: skip
    with conn.transaction(force_rollback=True):
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        refused("55000", "wait_for_tuning cannot see changes", "READ COMMITTED", lambda: value(conn, ENDED, 1))
    slow = tune(conn, query=SLOW_ROWS)
    refused("57014", f"tuning {slow} has not ended in time", "cancel_tuning",
            lambda: conn.execute("SELECT wait_for_tuning(%s, '10 ms')", (slow,)))  # fmt: skip


# -- other roles ------------------------------------------------------------------------------------------------------


def test_other_roles(
    conn: Connection, roles: Callable[..., str], connect: Callable[..., Connection], wait_until: Wait
) -> None:
    trainer, other = connect(roles("trainer")), connect(roles("other"))
    name = current_user(trainer)
    refused("42501", 'permission denied for model "m"', "grant_model", lambda: tune(trainer))
    conn.execute("SELECT grant_model('m', %s, 'train')", (name,))
    code = {"architecture": ["mlp", "python"], "learning_rate": [0.1]}
    hint = "pg_execute_server_program"
    refused("42501", 'architecture type "python"', hint, lambda: tune(trainer, space=code, trials=1))
    tuning = tune(trainer, trials=2, query=SLOW_ROWS, space={"learning_rate": [0.1, 0.2]})
    assert value(trainer, "SELECT count(*) FROM tensile.tunings") == 1
    assert value(other, "SELECT count(*) FROM tensile.tunings") == 0
    cancel = "SELECT cancel_tuning(%s)"
    refused("42704", "does not exist", "tensile.tunings", lambda: other.execute(cancel, (tuning,)))
    wait_until(lambda: value(conn, "SELECT count(*) > 0 FROM tensile.trials WHERE state = 'running'"))
    assert value(other, "SELECT count(*) FROM tensile.trials") == 0
    assert value(conn, "SELECT owner FROM tensile.jobs") == name
    conn.execute(f"REVOKE tensile_user FROM {name}; SELECT tensile_internal._notify(-1)")
    wait_until(lambda: tuning_state(conn, tuning) == "failed")
    assert value(conn, "SELECT error FROM tensile_internal.tunings") == "permission denied for function tune_model"


def test_a_deployed_winner_of_another_role_leaves_the_architecture(
    conn: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    trainer = connect(roles("trainer"))
    conn.execute("SELECT grant_model('m', %s, 'train')", (current_user(trainer),))
    finished(trainer, tune(trainer, trials=1, space={"hidden": [[5]]}))
    assert value(conn, "SELECT deployed_version FROM tensile.models WHERE model = 'm'") == 1
    assert value(conn, "SELECT architecture FROM tensile.models WHERE model = 'm'") == MLP
    assert value(conn, "SELECT architecture FROM tensile.model_versions") == {"type": "mlp", "hidden": [5]}
