"""Jobs that leave settings open: what is chosen for them, where it is shown, and when their training ends."""

from __future__ import annotations

import pytest

from pg_tensile.execution.training import recipe
from tests.server.explaining import explain, explained
from tests.server.support import FOREVER, ROWS, Connection, Row, finish, register, submit, value

HISTORY = "SELECT batch_size, learning_rate, epochs FROM tensile.job_history WHERE job = %s"
TRAINING = "SELECT training FROM tensile.model_versions WHERE job = %s"
NOISE = "SELECT sin(i * i) AS a, cos(7 * i * i) AS b, sin(i * i * i) AS y FROM generate_series(1, 90) i"


def train(conn: Connection, arguments: str, query: str = ROWS) -> int:
    """Submit a job with the defaults, except for arguments given as SQL."""
    return int(value(conn, f"SELECT train_model('m', $q${query}$q$, 'y', {arguments})"))


@pytest.mark.long
def test_what_a_job_leaves_open_is_chosen_and_shown(db: Connection, job_row: Row) -> None:
    register(db, "m")
    job = train(db, "epochs => 3")
    finish(db, job)
    row = job_row(db, job)
    batch_size, rate = row["chosen_batch_size"], row["chosen_learning_rate"]
    assert (row["batch_size"], row["learning_rate"]) == (None, None)
    rows = value(
        db, "SELECT samples FROM tensile_internal.epochs WHERE job = %s AND epoch = 1 AND split = 'training'", job
    )
    assert (batch_size, rate) == (recipe.batch_size_for(rows), recipe.LEARNING_RATES["mlp"])
    assert db.execute(HISTORY, (job,)).fetchone() == (batch_size, rate, 3)
    training = value(db, TRAINING, job)
    assert (training["batch_size"], training["learning_rate"]) == (batch_size, rate)
    assert (training["epochs"], training["stopped"], training["keep"]) == (3, "epochs", "best")
    explanation = explained(db)
    assert (explanation["batch_size"], explanation["learning_rate"]) == (batch_size, rate)
    assert explanation["epochs"] == 200 and explanation["patience"] == recipe.PATIENCE
    assert any(f"learning rate {rate:g}, until {recipe.PATIENCE} epochs" in line for line in explain(db))


def test_what_a_job_gives_is_not_chosen(db: Connection, job_row: Row) -> None:
    register(db, "m")
    job = train(db, "epochs => 1, batch_size => 50, learning_rate => 0.5, policy => 'none'")
    finish(db, job)
    row = job_row(db, job)
    assert (row["chosen_batch_size"], row["chosen_learning_rate"]) == (None, None)
    assert db.execute(HISTORY, (job,)).fetchone() == (50, 0.5, 1)


def test_a_schedule_that_ends_limits_the_epochs(db: Connection) -> None:
    job = submit(db, "m", {"type": "tabular", "members": 1, "hidden": 4, "projection": 4, "layers": 1}, epochs=FOREVER)
    finish(db, job)
    training = value(db, TRAINING, job)
    assert training["learning_rate_schedule"] == "cosine" and training["epochs"] <= recipe.EPOCHS[1]
    assert explained(db)["epochs"] == recipe.EPOCHS[1]
    of_user = {"learning_rate_schedule": "constant"}
    assert explained(db, epochs=FOREVER, options=of_user)["epochs"] == FOREVER


def test_training_stops_by_itself_and_keeps_the_best_epoch(db: Connection) -> None:
    register(db, "m")
    job = train(db, f"epochs => {FOREVER}, policy => 'none'", NOISE)
    finish(db, job)
    training = value(db, TRAINING, job)
    best = value(db, "SELECT (metrics->>'epoch')::int FROM tensile.model_versions WHERE job = %s", job)
    losses = "SELECT epoch FROM tensile.epoch_metrics WHERE job = %s AND split = 'validation' ORDER BY loss, epoch"
    assert training["stopped"] == "early_stopping" and best == value(db, losses, job)
    assert training["epochs"] == best + recipe.PATIENCE


def test_max_time_ends_the_training(db: Connection) -> None:
    job = submit(db, "m", {"type": "mlp", "hidden": [4]}, epochs=FOREVER, max_time="1 s")
    finish(db, job)
    training = value(db, TRAINING, job)
    assert training["stopped"] == "max_time" and 1 <= training["epochs"] < FOREVER
    assert value(db, "SELECT max(epoch) FROM tensile_internal.epochs WHERE job = %s", job) == training["epochs"]
    assert (
        value(db, "SELECT (metrics->>'epoch')::int FROM tensile.model_versions WHERE job = %s", job)
        == (training["epochs"])
    )
