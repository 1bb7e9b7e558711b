"""Jobs with compressed swaps: the weights are those without a plan, and SQL shows the compressed tensors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.plan import CODECS
from tests.server.pressure import Wait
from tests.server.support import FOREVER, Connection, register, trainer_pid, value

ROWS, BUDGET = 4096, "16MB"
WIDE = {"type": "mlp", "hidden": [256] * 6}  # the output of each layer is 4 MB, of all of them 36 MB with gradients
IMAGES = f"""
    CREATE TABLE images AS
    SELECT i % 4 AS label, (SELECT array_agg(sin(i * 0.37 + p * 0.011 * (1 + i % 4))::float4 ORDER BY p)
                            FROM generate_series(1, 64) p) AS image
    FROM generate_series(1, {ROWS}) i
"""
# A layer is computed in about the time that half of its output takes over the link.
PROFILE = replace(
    RTX_A6000, name="slow link", kind="host", memory_bytes=4 << 30, flops_per_s=5e10, bytes_per_s=1e10
).with_link(2e8)


class Lab:
    """A server with a slow link, and images to train on."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster = cluster
        self.wait_until = wait_until
        self.conn: Connection = cluster.connect()
        self.conn.execute(IMAGES)
        self.conn.execute(
            "INSERT INTO tensile_internal.device_profiles VALUES ('cpu', %s)", (json.dumps(asdict(PROFILE)),)
        )
        self._models = 0

    def submit(self, budget: str | None = BUDGET, epochs: int = FOREVER, **options: Any) -> int:
        """Submit a job of a new model; without a budget it has no plan."""
        self._models += 1
        model, policy = f"m{self._models}", "joint" if budget else "none"
        register(self.conn, model, WIDE)
        query = (
            "SELECT train_model(%s, 'SELECT label, image FROM images', 'label', epochs => %s, batch_size => %s,"
            " validation => 0, optimizer => 'sgd', policy => %s, memory_budget => %s, options => %s)"
        )
        options |= {"task": "classification", "keep": "last"}
        return int(value(self.conn, query, model, epochs, ROWS, policy, budget, json.dumps(options)))

    def losses(self, job: int) -> list[Any]:
        """Return loss and accuracy of each epoch."""
        sql = "SELECT loss, accuracy FROM tensile.epoch_metrics WHERE job = %s ORDER BY epoch"
        return self.conn.execute(sql, (job,)).fetchall()

    def await_epochs(self, job: int, more: int) -> None:
        before = len(self.losses(job))
        self.wait_until(lambda: len(self.losses(job)) >= before + more, what=lambda: self.told(job))

    def cancel(self, *jobs: int) -> None:
        for job in jobs:
            self.conn.execute("SELECT cancel_job(%s)", (job,))
        for job in jobs:
            assert value(self.conn, "SELECT wait_for_job(%s, '30 s')", job) == "cancelled"

    def compressed(self, job: int) -> list[Any]:
        """Return tensors compressed by the decisions and by the plan in use, none until both agree."""
        return self.conn.execute(
            "SELECT c.tensor, c.kind, c.bytes, c.zero_share, c.codec, c.coded_bytes, c.coded_us, c.plain_us"
            " FROM tensile.compression c JOIN tensile.plan_events p USING (job, tensor, codec)"
            " JOIN tensile.progress g ON g.job = c.job AND g.plan_generation = p.generation"
            " WHERE c.job = %s AND c.compressed",
            (job,),
        ).fetchall()

    def await_compressed(self, job: int) -> list[Any]:
        tensors: list[Any] = self.wait_until(lambda: self.compressed(job), what=lambda: self.told(job))
        return tensors

    def told(self, job: int) -> str:
        lines = self.conn.execute("SELECT event, reason, details FROM tensile.scheduler_log WHERE job = %s", (job,))
        shown = self.conn.execute("SELECT * FROM tensile.compression WHERE job = %s", (job,))
        return "\n".join(map(str, [*lines.fetchall(), *shown.fetchall()]))


@pytest.fixture(scope="module")
def lab(module_cluster: Any, wait_until: Wait) -> Iterator[Lab]:
    lab = Lab(module_cluster, wait_until)
    yield lab
    lab.conn.close()


@pytest.mark.long
def test_compressed_tensors_are_shown_and_change_no_result(lab: Lab) -> None:
    """This includes a job whose trainer is killed.

    Takes seconds: codecs are measured, and the job is killed and trained again without plans.
    """
    assert value(lab.conn, "SELECT count(*) FROM tensile_internal.codec_times") == 0
    job = lab.submit(compression="auto")
    rows = lab.await_compressed(job)
    for _, kind, nbytes, zero_share, codec, coded_bytes, coded_us, plain_us in rows:
        assert kind == "activation" and 0.2 < zero_share < 0.9 and codec in CODECS[1:]
        assert coded_bytes < nbytes and coded_us < plain_us
    lab.await_epochs(job, 2)
    moved, raw, error = lab.conn.execute(
        "SELECT bytes_swapped, raw_bytes_swapped, relative_error FROM tensile.progress, tensile_internal.codec_times"
        " WHERE job = %s AND device = 'cpu'",
        (job,),
    ).fetchone()  # type: ignore[misc]
    assert 0 < moved < raw and 0 <= error < 1
    counted = "SELECT bool_or(moved_bytes < bytes) FROM tensile.compression WHERE job = %s AND compressed"
    assert value(lab.conn, counted, job), lab.told(job)
    reasons = "SELECT string_agg(reason, '; ') FROM tensile.scheduler_log WHERE job = %s AND event = 'planned'"
    assert "zeros in tensors" in value(lab.conn, reasons, job)
    pid = trainer_pid(lab.conn, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    lab.wait_until(lambda: value(lab.conn, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 2)
    lab.await_compressed(job)
    lab.await_epochs(job, 2)
    lab.cancel(job)
    losses = lab.losses(job)
    plain = lab.submit(None, epochs=len(losses))
    assert value(lab.conn, "SELECT wait_for_job(%s, '90 s')", plain) == "finished"
    assert lab.losses(plain) == losses


@pytest.mark.long
def test_jobs_on_one_link_compress_by_their_own_options(lab: Lab) -> None:
    compressing, plain = lab.submit(compression="zvc"), lab.submit(compression="none")
    assert {row[4] for row in lab.await_compressed(compressing)} == {"zvc"}
    lab.await_epochs(plain, 2)
    assert value(lab.conn, "SELECT count(*) FROM tensile.compression WHERE job = %s", plain) == 0
    assert value(lab.conn, "SELECT count(codec) FROM tensile.plan_events WHERE job = %s", plain) == 0
    lab.cancel(compressing, plain)
