"""Jobs whose swaps are compressed: to the same weights as without a plan, with what is compressed shown in SQL."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from pg_tensile.profile import RTX_A6000
from tests.server.pressure import Wait
from tests.server.support import Connection, executor_pid, register, value

ROWS, BATCH_SIZE = 4096, 2048
WIDE = {"type": "mlp", "hidden": [256] * 6}  # the output of each layer is 2 MB
IMAGES = f"""
    CREATE TABLE images AS
    SELECT i % 4 AS label, (SELECT array_agg(sin(i * 0.37 + p * 0.011 * (1 + i % 4))::float4 ORDER BY p)
                            FROM generate_series(1, 64) p) AS image
    FROM generate_series(1, {ROWS}) i
"""
# What it computes in the time of a copy takes about as long as the copy.
PROFILE = replace(RTX_A6000, name="slow link", kind="host", flops_per_s=5e10, bytes_per_s=1e10).with_link(3e8)


class Lab:
    """A server with a slow link, and images to train on."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster = cluster
        self.wait_until = wait_until
        self.conn: Connection = cluster.connect()
        self.conn.execute(IMAGES)
        self.conn.execute("INSERT INTO tensile.device_profiles VALUES ('cpu', %s)", (json.dumps(asdict(PROFILE)),))
        self._models = 0

    def submit(self, epochs: int = 6, budget: str = "20MB", **options: Any) -> int:
        self._models += 1
        register(self.conn, f"m{self._models}", WIDE)
        options |= {"task": "classification"}
        policy = "none" if budget == "" else "joint"
        return int(
            value(
                self.conn,
                "SELECT train_model(%s, 'SELECT * FROM images', 'label', epochs => %s, batch_size => %s,"
                " validation => 0, optimizer => 'sgd', policy => %s, memory_budget => %s, options => %s)",
                *(f"m{self._models}", epochs, BATCH_SIZE, policy, budget or None, json.dumps(options)),
            )
        )

    def shown(self, job: int) -> list[Any]:
        return self.conn.execute("SELECT * FROM tensile.compression WHERE job = %s", (job,)).fetchall()


@pytest.fixture(scope="module")
def lab(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Lab]:
    cluster = new_cluster()
    lab = Lab(cluster, wait_until)
    yield lab
    lab.conn.close()
    cluster.end()


def test_x(lab: Lab) -> None:
    import time

    plain = lab.submit(epochs=4, budget="")
    for budget in ("14MB", "18MB", "22MB"):
        for o in ({}, {"compression": "auto"}):
            t = time.time()
            job = lab.submit(epochs=12, budget=budget, **o)
            n = 0
            while value(lab.conn, "SELECT state FROM tensile.jobs WHERE id=%s", job) not in ("finished", "failed"):
                r = lab.conn.execute(
                    "SELECT phase, epoch, step, bytes_swapped, raw_bytes_swapped, stall_us, plan_generation, samples_per_s FROM tensile.progress WHERE job=%s",
                    (job,),
                ).fetchone()
                if r and r != n:
                    print(round(time.time() - t, 2), r)
                n = r
                time.sleep(0.3)
            print(budget, o, time.time() - t)
            print(lab.conn.execute("SELECT state, error, traceback FROM tensile.jobs WHERE id=%s", (job,)).fetchone())
            print(
                lab.conn.execute(
                    "SELECT event, reason, details FROM tensile.scheduler_log WHERE job=%s", (job,)
                ).fetchall()
            )
            for x in lab.shown(job):
                print(x)
            print(
                lab.conn.execute(
                    "SELECT iteration_us, vanilla_us, planned_bytes, stall_us, recomputes, out_bytes, in_bytes FROM tensile.footprints WHERE job=%s",
                    (job,),
                ).fetchone()
            )
    print(lab.conn.execute("SELECT relative_error FROM tensile.codec_times").fetchall())
    print(lab.conn.execute("SELECT vanilla_bytes, least_bytes FROM tensile.traces").fetchall())
    assert 0
