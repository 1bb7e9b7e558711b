"""Jobs at the limits: host memory is exhausted, or predictions need device memory that jobs hold.

Long: a test trains five jobs, two at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.server.pressure import Lab
from tests.server.support import FOREVER, value

pytestmark = pytest.mark.long


def answer(lab: Lab, ask: str) -> object:
    """Return the prediction; None if jobs have not made room in the time that they have, as on a busy machine."""
    try:
        return value(lab.conn, ask)
    except psycopg.errors.OutOfMemory:
        return None


@pytest.fixture(autouse=True)
def by_the_predictor(lab: Lab) -> Iterator[None]:
    """Have the predictor answer, as a session that predicts by itself takes no memory of the device."""
    lab.conn.execute("SET pg_tensile.predict_in_session = off")
    yield
    lab.conn.execute("RESET pg_tensile.predict_in_session")


def test_a_model_for_prediction_gets_memory_beside_jobs(lab: Lab) -> None:
    model = lab.submit("mlp", 1)
    assert lab.digest(model) == lab.weights["mlp", 1]
    ask = f"SELECT predict_class('{lab.column(model, 'model')}', i) FROM images i WHERE id = 7"
    lab.set_memory(2.05 * lab.sizes["mlp"].least)
    jobs = [lab.submit("mlp", seed, epochs=FOREVER) for seed in (1, 2)]
    lab.await_training(*jobs)
    with pytest.raises(psycopg.Error, match="there is no device memory for the") as full:
        lab.conn.execute(ask)
    assert full.value.sqlstate == "53200" and "pg_tensile.device_memory" in (full.value.diag.message_hint or "")
    assert device(lab, "inference_bytes") == 0
    for job in jobs:
        lab.await_steps(job)
    lab.cancel(*jobs)

    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    jobs = [lab.submit("mlp", seed, epochs=FOREVER) for seed in (1, 2)]
    lab.await_training(*jobs)
    weights = value(lab.conn, "SELECT weight_bytes FROM tensile.model_versions WHERE job = %s", model)
    assert device(lab, "granted_bytes") + weights > device(lab, "budget_bytes")
    with lab.watch():
        assert lab.wait_until(lambda: answer(lab, ask)) == "3"  # 7 % 4
        assert device(lab, "inference_bytes") >= weights
        for job in jobs:
            lab.await_steps(job)
    assert any("models for prediction" in reason for _, _, reason in lab.log("scheduled"))
    lab.cancel(*jobs)


def device(lab: Lab, column: str) -> int:
    return int(value(lab.conn, f"SELECT {column} FROM tensile.devices WHERE name = 'cpu'"))


def test_a_job_whose_copies_have_no_room_on_the_host_waits(lab: Lab) -> None:
    lab.set("host_memory", "1MB")
    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    jobs = [lab.submit("mlp", seed) for seed in (1, 2)]
    waiting = "SELECT reason FROM tensile.jobs WHERE job = ANY(%s) AND state = 'waiting' AND reason ~ 'host memory'"
    reason = lab.bring_together(*jobs, until=lambda: value(lab.conn, waiting, jobs))
    assert "1.0 MB are allowed (pg_tensile.host_memory)" in reason
    assert value(lab.conn, "SELECT sum(host_bytes) FROM tensile.plans WHERE job = ANY(%s)", jobs) <= 1 << 20
    assert [lab.digest(job) for job in jobs] == [lab.weights["mlp", seed] for seed in (1, 2)]
