"""Which role a stored query runs as: the rows of the table in docs/operations.md.

The query that `predict_rows(model)` derives is tested in test_lineage.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.server.cast import current_user
from tests.server.support import MLP, ROWS, Connection, Wait, finish, submit, value
from tests.server.tuning import tune

RAN_AS = """
CREATE FUNCTION public.ran_as(role text) RETURNS int STABLE LANGUAGE plpgsql AS $$
BEGIN
    IF current_user <> role OR session_user <> role THEN
        RAISE EXCEPTION 'it ran as %, in a session of %', current_user, session_user;
    END IF;
    RETURN 1;
END $$
"""
RAN_AS_QUERY = f"SELECT * FROM ({ROWS}) r WHERE public.ran_as('{{}}') = 1"
JOBS = "SELECT max(job) FROM tensile.jobs WHERE kind = %s"


@pytest.fixture
def alice(db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]) -> Iterator[Connection]:
    """A role for which alone the rows of `query(alice)` are there."""
    db.execute(RAN_AS)
    yield connect(user=roles("alice"))
    db.execute("DROP FUNCTION public.ran_as")


def query(alice: Connection) -> str:
    return RAN_AS_QUERY.format(current_user(alice))


def test_of_jobs_schedules_and_tunings(db: Connection, alice: Connection, wait_until: Wait) -> None:
    rows = query(alice)
    job = submit(alice, "strange", MLP, query=RAN_AS_QUERY.format("postgres"))
    with pytest.raises(psycopg.Error, match=f"it ran as {current_user(alice)}"):
        finish(alice, job)
    gate = {"deploy": "if_better", "gate": {"query": rows}}
    first = submit(alice, "m", MLP, query=rows, validation_query=f"{rows} LIMIT 50", options=gate)
    finish(alice, first)
    finish(alice, submit(alice, "m", query=rows, options=gate, seed=1))  # compared with the first

    call = "SELECT schedule_training('m', %s, 'y', epochs => 1, policy => 'none', batch_size => 64, every => '1 day')"
    alice.execute(call, (rows,))
    before = value(db, JOBS, "train")
    db.execute("UPDATE tensile_internal.schedules SET next_run = now(); SELECT tensile_internal._notify(-1)")
    wait_until(lambda: value(db, JOBS, "train") > before)
    finish(db, value(db, JOBS, "train"))

    alice.execute("SELECT unschedule_training('m'), schedule_evaluation('m', %s, '1 day')", (rows,))
    db.execute("UPDATE tensile_internal.evaluation_schedules SET next_run = now(); SELECT tensile_internal._notify(-1)")
    wait_until(lambda: value(db, JOBS, "evaluate"))
    finish(db, value(db, JOBS, "evaluate"))

    tuning = tune(alice, "m", query=rows, epochs=1, trials=1, space={"hidden": [[4]]})
    assert value(alice, "SELECT wait_for_tuning(%s, '100 s')", tuning) == "finished"


def test_in_sessions_they_run_as_the_caller(db: Connection, alice: Connection) -> None:
    rows = query(alice)
    finish(alice, submit(alice, "m", MLP, query=rows))
    keyed = f"SELECT row_number() OVER () AS id, a, b, c FROM ({rows}) r"
    for call, selected in (
        ("SELECT count(*) FROM evaluate_model('m', %s)", rows),
        ("SELECT count(*) FROM feature_importance('m', %s)", rows),
        ("SELECT count(*) FROM explain_training('m', %s, 'y')", rows),
        ("SELECT count(*) FROM predict_rows('m', %s)", rows),
        ("SELECT predicted FROM materialize_predictions('m', %s, 'pg_temp.kept', '{id}')", keyed),
    ):
        assert value(alice, call, selected) > 0
        with pytest.raises(psycopg.Error, match="it ran as postgres"):
            value(db, call, selected)
