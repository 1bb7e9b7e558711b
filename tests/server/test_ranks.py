"""Jobs that are trained by ranks on a real Ray cluster, from SQL: their weights, what is told of them, and failures.

All long, because the processes of a Ray cluster take 20 seconds to start, and a job with ranks takes seconds. What the
server does with such jobs is in test_ranks_settings.py, and what the ranks do in tests/unit/execution/distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pg_tensile.planning.trace.trace import Trace
from tests.server.explaining import explain, explained
from tests.server.ranks_site import TRAINS, Site, making_site
from tests.server.support import (
    BY_CANCEL_JOB,
    FOREVER,
    MLP,
    SMALL_JOB,
    Row,
    Wait,
    ended,
    finish,
    reason,
    register,
    settle,
    state,
    value,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
PATIENCE = "270 s"  # for a job of LONG_EPOCHS, beside others
LONG_EPOCHS = 400


@pytest.fixture(scope="module")
def site(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Site]:
    with making_site(new_cluster, wait_until) as made:
        yield made


@pytest.fixture
def idle(site: Site) -> Iterator[Site]:
    """The site, on which nothing runs before and after a test."""
    yield site
    for (job,) in site.conn.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL").fetchall():
        site.conn.execute("SELECT cancel_job(%s)", (job,))
        settle(site.conn, site.wait_until, job)
    site.await_no_ranks()


def test_a_model_that_two_ranks_train_predicts(idle: Site) -> None:
    conn = idle.conn
    job = idle.submit(2, epochs=40, learning_rate=0.01)
    seen: list[tuple[Any, ...]] = []

    def reported() -> bool:
        seen[:] = conn.execute("SELECT rank, node, device, state FROM tensile.ranks WHERE job = %s", (job,)).fetchall()
        return ended(conn, job) or (len(seen) == 2 and all(row[3] == "training" for row in seen))

    idle.wait_until(reported, TRAINS, lambda: f"{idle.told(job)} {seen}")
    finish(conn, job)
    assert [(rank, device) for rank, _, device, _ in seen] == [(0, "cpu"), (1, "cpu")]
    assert {node for _, node, _, _ in seen} <= {idle.ray.node_address(0), idle.ray.node_address(1)}
    accuracy = "SELECT (metrics->'validation'->>'accuracy')::float8 FROM tensile.model_versions WHERE job = %s"
    assert value(conn, accuracy, job) > 0.9
    model = value(conn, "SELECT model FROM tensile.jobs WHERE job = %s", job)
    assert value(conn, 'SELECT predict_class(%s, \'{"a": 0.9, "b": 0.1, "c": "c1"}\'::jsonb)', model) == "yes"
    device = "SELECT count(*) FROM tensile.scheduler_log WHERE job = %s AND device = %s"
    assert value(conn, device, job, f"ray:{job}") > 0
    assert value(conn, "SELECT count(*) FROM tensile.ranks") == 0


def test_an_explanation_says_where_ranks_would_run(idle: Site) -> None:
    """Its numbers are those with which a job then begins."""
    arguments = {key: given for key, given in SMALL_JOB.items() if key not in ("options", "policy")}
    register(idle.conn, "explained", MLP)
    explanation = explained(idle.conn, "explained", options={"ranks": [1, 3], "keep": "last"}, **arguments)
    addresses = [idle.ray.node_address(number) for number in range(2)]
    assert explanation["ranks"] == {
        "count": 3,
        "least": 1,
        "most": 3,
        "takes": {"CPU": 1},
        "nodes": [{"node": address, "CPU": 2} for address in addresses],
        "waits_for": None,
    }
    assert (explanation["device"], explanation["start"]["when"]) == ("ray:cpu", "now")
    job = idle.submit(3, epochs=FOREVER, batch_size=arguments["batch_size"])
    idle.await_steps(job)
    trace = Trace.from_bytes(value(idle.conn, "SELECT traces[1] FROM tensile.traces WHERE job = %s", job))
    graph = explanation["graph"]
    assert (graph["operators"], graph["tensors"]) == (trace.operator_count, trace.tensor_count)
    assert explanation["steps"] == value(idle.conn, "SELECT steps FROM tensile.progress WHERE job = %s", job)
    for options, start in (({"ranks": [1, 3]}, "; with 1 rank after"), ({"ranks": 3}, "")):
        text = "\n".join(explain(idle.conn, "explained", options=options, **arguments))
        assert f"later, at an unknown time: 3 CPUs of the Ray cluster, 1 is free{start}" in text, text
        assert f"1 CPU, on {addresses[0]} (2 CPUs), {addresses[1]} (2 CPUs)" in text


def test_ranks_end_when_their_job_is_cancelled(idle: Site, job_row: Row) -> None:
    job = idle.submit(2, epochs=FOREVER)
    idle.await_steps(job)
    idle.conn.execute("SELECT cancel_job(%s)", (job,))
    settle(idle.conn, idle.wait_until, job)
    assert (job_row(idle.conn, job)["state"], reason(idle.conn, job)) == ("cancelled", BY_CANCEL_JOB)
    idle.await_no_ranks()


def test_a_job_waits_until_there_are_processors(idle: Site) -> None:
    first = idle.submit(3, epochs=FOREVER, batch_size=66)
    idle.await_steps(first)
    job = idle.submit(2, epochs=2)
    waits = "2 CPUs of the Ray cluster, 1 is free"
    idle.wait_until(lambda: (state(idle.conn, job), reason(idle.conn, job)) == ("waiting", waits), TRAINS)
    idle.conn.execute("SELECT cancel_job(%s)", (first,))
    finish(idle.conn, job)


def test_the_server_stops_and_the_job_goes_on(idle: Site) -> None:
    job = idle.submit(2, epochs=LONG_EPOCHS)
    idle.await_steps(job)
    idle.conn.close()
    idle.server.restart()
    idle.conn = idle.server.connect()
    finish(idle.conn, job, PATIENCE)
    assert value(idle.conn, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 2


def test_jobs_fail_clearly_with_another_token(idle: Site, job_row: Row) -> None:
    other = idle.server.folder / "token"
    idle.server.configure({"pg_tensile.ray_token_file": other})
    idle.server.reload()
    idle.wait_until(lambda: value(idle.conn, "SHOW pg_tensile.ray_token_file") == str(other))
    try:
        job = idle.submit(2)
        settle(idle.conn, idle.wait_until, job)
        row = job_row(idle.conn, job)
        assert (row["state"], row["sqlstate"]) == ("failed", "28000") and "cannot be read" in row["error"]
        assert "pg_tensile.ray_token_file" in row["hint"]
    finally:
        idle.server.configure({"pg_tensile.ray_token_file": idle.ray.token_file})
        idle.server.reload()
        idle.wait_until(lambda: value(idle.conn, "SHOW pg_tensile.ray_token_file") == str(idle.ray.token_file))


def test_a_job_goes_on_with_fewer_ranks_when_a_node_dies(new_cluster: Callable[..., Any], wait_until: Wait) -> None:
    with making_site(new_cluster, wait_until) as site:
        site.set_timeout("20s")
        job = site.submit([2, 4], epochs=FOREVER)
        site.await_steps(job)
        nodes = "SELECT count(*), count(DISTINCT node) FROM tensile.ranks WHERE job = %s"
        assert site.conn.execute(nodes, (job,)).fetchone() == (4, 2)
        site.ray.kill("raylet/raylet", f"--node_ip_address={site.ray.node_address(1)}")
        site.wait_until(lambda: site.conn.execute(nodes, (job,)).fetchone() == (2, 1), TRAINS, lambda: site.told(job))
        site.await_steps(job)
        site.conn.execute("SELECT cancel_job(%s)", (job,))
        settle(site.conn, site.wait_until, job)
        site.await_no_ranks()
