"""Devices in shared memory, and the ledger, which divides the memory of a device among jobs.

Workers and scheduler execute SQL of the tests (stage.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pyworker.cluster_device import cluster_device
from tests.server.stage import Stage, fetch, publish, report, use_device
from tests.server.support import Connection, Wait, value

# -- devices ----------------------------------------------------------------------------------------------------------


def device(conn: Connection, name: str, columns: str) -> Any:
    return conn.execute(f"SELECT {columns} FROM tensile.devices WHERE name = %s", (name,)).fetchone()


def test_devices_show_their_jobs_and_what_they_use(stage: Stage, job: int, second: int) -> None:
    use_device(stage, job, "cuda:7", 3_000_000_000, overhead=300)
    stage.order(
        second, "SELECT tensile_worker._register_device('cuda:7', 500, 1, 1, 40)"
    )  # the first registration decides
    everything = "total_bytes, budget_bytes, granted_bytes, in_use_bytes, inference_bytes, jobs, utilisation"
    assert device(stage.alice, "cuda:7", everything) == (3_000_000_000, 1 << 30, 340, 0, 0, 2, None)
    assert device(stage.alice, "cuda:7", "out_bytes_per_s, in_bytes_per_s") == (5e9, 6e9)
    report(stage, job, device_bytes=100, utilisation=0.5)
    report(stage, second, device_bytes=20, utilisation=0.25)
    publish(stage, job, [], 6000)
    with stage.cluster.connect(user="mallory") as conn:
        assert device(conn, "cuda:7", everything) == (3_000_000_000, 1 << 30, 6340, 120, 0, 2, 0.5)

    use_device(stage, job, "cuda:8")
    assert device(stage.alice, "cuda:7", everything) == (3_000_000_000, 1 << 30, 40, 20, 0, 1, 0.25)
    assert device(stage.alice, "cuda:8", "budget_bytes, granted_bytes, jobs") == (1000, 0, 1)


def test_unused_devices_make_room(stage: Stage, job: int) -> None:
    for number in range(40):  # more than the ledger holds, one after the other
        use_device(stage, job, f"device {number}")
    assert device(stage.alice, "device 39", "jobs") == (1,)
    for bad in ("'', 1, 1, 1, 0", "'x', 0, 1, 1, 0", "'x', 1, 0, 1, 0", "'x', 1, 1, 'NaN', 0", "'x', 1, 1, 1, -1"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            stage.order(job, f"SELECT tensile_worker._register_device({bad})")


MOST = 1 << 50  # bytes; no device has more


IMPOSSIBLE = {
    "more memory than there is": f"'cuda:7', {MOST + 1}, 1, 1, 0",
    "more memory than this host has": f"'cpu', {MOST}, 1, 1, 0",
    "an overhead beyond the memory": "'cuda:7', 1000, 1, 1, 1001",
    "the largest numbers": f"'cuda:7', {2**63 - 1}, 1, 1, {2**63 - 2}",
    "a link faster than light": "'cuda:7', 1000, 1e16, 1, 0",
    "an infinite rate": "'cuda:7', 1000, 1, 'Infinity', 0",
}


def test_impossible_numbers_of_a_device_are_refused_and_change_nothing(stage: Stage, job: int) -> None:
    """A child's report on its device affects all jobs on it. The slot keeps its device and its grant."""
    use_device(stage, job, "cuda:7", 1_000_000, overhead=300)
    publish(stage, job, [], 6000)
    columns = "total_bytes, granted_bytes, out_bytes_per_s, jobs"
    before = device(stage.alice, "cuda:7", columns)
    assert before == (1_000_000, 6300, 5e9, 1)
    for name, numbers in IMPOSSIBLE.items():
        assert stage.refusal(job, f"SELECT tensile_worker._register_device({numbers})") == "22023", name
        assert device(stage.alice, "cuda:7", columns) == before, name


def test_the_largest_numbers_do_not_overflow_the_sums(stage: Stage, job: int, second: int) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:7", MOST, overhead=MOST)
        report(stage, number, device_bytes=2**63 - 1, device_peak_bytes=2**63 - 1, utilisation=17)
    columns = "granted_bytes, in_use_bytes, utilisation"
    assert device(stage.alice, "cuda:7", columns) == (2 * MOST, 2 * MOST, 1)
    report(stage, job, device_bytes=-5, utilisation="'NaN'")
    report(stage, second, device_bytes=0, utilisation=-1)
    assert device(stage.alice, "cuda:7", columns) == (2 * MOST, 0, 0)


# -- the ledger -------------------------------------------------------------------------------------------------------


def acknowledge(stage: Stage, job: int, generation: int) -> None:
    stage.order(job, f"SELECT tensile_worker._acknowledge_plan({generation})")


def granted(stage: Stage, name: str) -> Any:
    return device(stage.alice, name, "granted_bytes")[0]


def test_a_grant_that_does_not_fit_is_not_published(stage: Stage, job: int, second: int) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000, overhead=100)
    assert publish(stage, job, [], 500) == 1
    assert publish(stage, second, [], 301) is None
    assert fetch(stage, second, 0) == [None]
    assert granted(stage, "cuda:0") == 700
    assert publish(stage, second, [], 300) == 1
    assert publish(stage, second, [], 301) is None
    assert granted(stage, "cuda:0") == 1000


def test_memory_of_a_shrinking_job_is_free_after_its_acknowledgement(stage: Stage, job: int, second: int) -> None:
    """The memory of the larger plan is not free until the trainer has done an iteration under the smaller one."""
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000)
    assert publish(stage, job, [], 700) == 1
    assert publish(stage, second, [], 300) == 1
    assert publish(stage, job, [], 400) == 2
    assert publish(stage, second, [], 600) is None
    acknowledge(stage, job, 1)  # for the old plan, although the new one is published
    assert publish(stage, second, [], 600) is None
    acknowledge(stage, job, 2)
    assert granted(stage, "cuda:0") == 700
    assert publish(stage, second, [], 600) == 2
    assert publish(stage, job, [], 500) is None, "now this job has to wait"


def test_grants_are_listed_for_the_scheduler(stage: Stage, job: int, second: int) -> None:
    use_device(stage, job, "cuda:0", 1000, overhead=7)
    publish(stage, job, [], 700, planned=600)
    acknowledge(stage, job, 1)
    publish(stage, job, [], 400, planned=300)
    rows = {
        row["job"]: list(row.values())[1:]
        for row in stage.order("scheduler", "SELECT * FROM tensile_internal._grants()")
    }
    assert rows == {job: ["cuda:0", 700, 7, 2, 1, 300, 400, False], second: [None, 0, 0, 0, 0, 0, 0, False]}


def test_the_end_of_a_job_gives_its_memory_back(stage: Stage, job: int, second: int, wait_until: Wait) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000, overhead=50)
    assert publish(stage, job, [], 900) == 1
    assert publish(stage, second, [], 900) is None
    stage.cancel(job)
    wait_until(lambda: granted(stage, "cuda:0") == 50)
    assert publish(stage, second, [], 900) == 1


def test_a_lower_limit_stops_only_growth(stage: Stage, job: int, wait_until: Wait) -> None:
    def limit(memory: str) -> None:
        stage.cluster.configure({"pg_tensile.device_memory": memory})
        stage.cluster.reload()
        show = "SELECT current_setting('pg_tensile.device_memory') AS s"
        wait_until(lambda: stage.order("scheduler", show)[0]["s"] == memory)

    use_device(stage, job, "cuda:0", 1 << 31)
    assert publish(stage, job, [], 100 << 20) == 1
    limit("64MB")
    try:
        rows = stage.order("scheduler", "SELECT * FROM tensile_internal._device_memory() WHERE device = 'cuda:0'")
        assert list(rows[0].values())[:6] == ["cuda:0", 1 << 31, 64 << 20, 0, 0, 0]
        assert publish(stage, job, [], 101 << 20) is None
        assert publish(stage, job, [], 100 << 20) == 2
        assert publish(stage, job, [], 50 << 20) == 3
        acknowledge(stage, job, 3)
        assert publish(stage, job, [], 65 << 20) is None
        assert publish(stage, job, [], 64 << 20) == 4
    finally:
        limit("1GB")


def test_the_sum_never_exceeds_the_budget_whatever_the_order(stage: Stage, job: int, second: int) -> None:
    """The reference is a ledger of a few lines without locks and slots."""
    budget = 1000
    jobs = (job, second)
    entry = dict.fromkeys(jobs, 0)
    plans: dict[int, list[int]] = {number: [] for number in jobs}
    random.seed(4)
    refused = 0
    for number in jobs:
        use_device(stage, number, "cuda:0", budget)
    for _ in range(60):
        number = random.choice(jobs)
        if plans[number] and random.random() < 0.4:
            generation = random.choice((len(plans[number]), max(1, len(plans[number]) - 1)))
            acknowledge(stage, number, generation)
            if generation == len(plans[number]):
                entry[number] = plans[number][-1]
        else:
            grant = random.randrange(0, budget)
            fits = grant <= entry[number] or sum(entry.values()) - entry[number] + grant <= budget
            generation_or_none = publish(stage, number, [], grant)
            assert generation_or_none == (len(plans[number]) + 1 if fits else None)
            refused += not fits
            if fits:
                plans[number].append(grant)
                entry[number] = max(entry[number], grant)
        assert granted(stage, "cuda:0") == sum(entry.values()) <= budget
    assert refused > 5


@pytest.fixture
def inference(stage: Stage) -> Any:
    """The inference process, started by a prediction that times out."""
    stage.conn.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
        " weight_bytes)"
        """ SELECT id, 1, 'regression', '{"target": {"name": "y"}, "features":"""
        """ [{"name": "x", "kind": "numeric", "type": "float8"}]}', '{}', 1"""
        " FROM tensile_internal.models WHERE name = 'm'; UPDATE tensile_internal.models SET deployed_version = 1"
        " WHERE name = 'm'"
    )
    with stage.alice.transaction(), pytest.raises(psycopg.errors.QueryCanceled), stage.alice.transaction():
        stage.alice.execute("SET LOCAL pg_tensile.predict_timeout = 100; SELECT predict('m', ARRAY[1.0])")
    yield "inference"
    stage.conn.execute(
        "UPDATE tensile_internal.models SET deployed_version = NULL; DELETE FROM tensile_internal.model_versions"
    )


def test_a_device_beyond_the_limit_changes_nothing(
    stage: Stage, job: int, second: int, inference: str, wait_until: Wait
) -> None:
    """The ledger holds a device for each of 16 jobs and 16 more; a job that registers one more keeps its own."""

    def take(number: int, size: int) -> None:
        stage.order(inference, f"SELECT tensile_internal._inference_memory('device {number}', 1000, {size}, {size})")

    for number in (job, second):
        use_device(stage, number, "shared", 1000, overhead=10)
    publish(stage, job, [], 500)
    for number in range(31):
        take(number, 1)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        use_device(stage, job, "one too many")
    assert device(stage.alice, "shared", "jobs, granted_bytes") == (2, 520)
    assert device(stage.alice, "device 30", "inference_bytes") == (1,)
    stage.cancel(second)
    wait_until(lambda: device(stage.alice, "shared", "jobs") == (1,))
    use_device(stage, job, "another")  # the only job on its device, whose entry the new one replaces
    assert device(stage.alice, "another", "jobs, granted_bytes") == (1, 0)
    assert device(stage.alice, "shared", "jobs") is None
    for number in range(31):
        take(number, 0)


def test_a_device_of_a_cluster_is_none_of_this_machine(stage: Stage, job: int, inference: str) -> None:
    """pg_tensile.device_memory is 1 GB here."""
    name, total = cluster_device(job), 8 << 30
    assert value(
        stage.conn, "SELECT tensile_internal._on_cluster(%s) AND NOT tensile_internal._on_cluster('cuda:0')", name
    )
    use_device(stage, job, name, total, overhead=100)
    assert device(stage.alice, name, "budget_bytes, jobs") == (total, 1)
    rows = stage.order("scheduler", f"SELECT * FROM tensile_internal._device_memory() WHERE device = '{name}'")
    assert list(rows[0].values())[:4] == [name, total, total, 0]
    assert publish(stage, job, [], total - 100) == 1
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        stage.order(inference, f"SELECT tensile_internal._inference_memory('{name}', 1000, 1, 1)")


@pytest.fixture
def memory(stage: Stage, inference: str) -> Iterator[Callable[[int, int], Any]]:
    """`memory(least, wanted)`: what the predictor may take of cuda:0; at the end it takes nothing."""

    def take(least: int, wanted: int) -> Any:
        sql = f"SELECT tensile_internal._inference_memory('cuda:0', 1000, {least}, {wanted}) AS bytes"
        return stage.order(inference, sql)[0]["bytes"]

    yield take
    take(0, 0)
    stage.order("scheduler", "SELECT tensile_internal._lack_memory('cuda:0', '{}', 0, 0)")


def claimed(stage: Stage) -> tuple[int, float]:
    """Return the bytes that a prediction claims, and the seconds since it has come."""
    (row,) = stage.order("scheduler", "SELECT * FROM tensile_internal._device_memory() WHERE device = 'cuda:0'")
    return row["claimed_bytes"], row["claimed_s"]


def test_a_prediction_that_has_waited_in_vain_keeps_its_place(
    stage: Stage, job: int, second: int, memory: Callable[[int, int], Any], wait_until: Wait
) -> None:
    """Whether a job comes first is decided by the scheduler, so the ledger gives the first grant to any job."""
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000)
    assert publish(stage, job, [], 600) == 1
    assert memory(500, 500) is None
    bytes, waited_s = claimed(stage)
    assert (bytes, waited_s >= 0) == (500, True)
    assert memory(100, 100) == 100  # of another model
    assert memory(500, 500) is None
    assert claimed(stage)[0] == 500 and claimed(stage)[1] > waited_s
    assert publish(stage, job, [], 601) is None
    assert publish(stage, second, [], 300) == 1
    assert publish(stage, second, [], 301) is None
    stage.cancel(second)
    stage.cancel(job)
    wait_until(lambda: granted(stage, "cuda:0") == 0)
    assert memory(500, 500) == 500
    assert claimed(stage)[0] == 0


def test_what_idle_models_give_up_is_for_the_jobs_that_lack_it(
    stage: Stage, job: int, second: int, memory: Callable[[int, int], Any], wait_until: Wait
) -> None:
    for number in (job, second):
        use_device(stage, number, "cuda:0", 1000)
    assert publish(stage, job, [], 400) == 1
    assert memory(0, 600) == 600
    lacking = "SELECT number, bytes, slowed_bytes FROM tensile_internal._lacking_memory() WHERE device = 'cuda:0'"
    lack = "SELECT tensile_internal._lack_memory('cuda:0', '{%s}', %s, %s)"
    stage.woken("inference", lambda: stage.order("scheduler", lack % ("500,100", 7, 600)))
    (before,) = stage.order("inference", lacking)
    assert (before["bytes"], before["slowed_bytes"]) == ([500, 100], 7)
    assert memory(150, 150) == 150, "models have been dropped"
    (meanwhile,) = stage.order("inference", lacking)
    assert (meanwhile["bytes"], meanwhile["slowed_bytes"]) == ([50, 0], 0), "the decision did not know that"
    assert memory(100, 100) == 100
    assert memory(101, 101) is None
    assert publish(stage, second, [], 500) == 1
    stage.order("scheduler", lack % (",".join(["1"] * 20), 0, 100))
    (after,) = stage.order("inference", lacking)
    assert (after["bytes"], after["slowed_bytes"]) == ([1] * 8, 0) and after["number"] > before["number"]
    stage.cancel(second)
    wait_until(lambda: granted(stage, "cuda:0") == 400)
    assert memory(101, 101) == 101


def test_the_predictor_takes_the_memory_that_is_free(stage: Stage, job: int, inference: str, wait_until: Wait) -> None:
    """The last test with an inference process: the next one is not started at once."""

    def ask(least: int, wanted: int) -> Any:
        sql = f"SELECT tensile_internal._inference_memory('cuda:0', 1000, {least}, {wanted}) AS bytes"
        return stage.order(inference, sql)[0]["bytes"]

    use_device(stage, job, "cuda:0", 1000, overhead=50)
    assert publish(stage, job, [], 450) == 1
    assert ask(100, 600) == 500
    assert device(stage.alice, "cuda:0", "granted_bytes, inference_bytes") == (500, 500)
    assert publish(stage, job, [], 451) is None
    assert ask(100, 200) == 200
    assert ask(700, 700) is None, "but the rest is reserved for jobs"
    memory = "SELECT inference_bytes, wanted_bytes FROM tensile_internal._device_memory() WHERE device = 'cuda:0'"
    assert stage.order("scheduler", memory) == [{"inference_bytes": 200, "wanted_bytes": 700}]
    assert publish(stage, job, [], 451) is None
    assert publish(stage, job, [], 250) == 2
    acknowledge(stage, job, 2)
    assert ask(700, 700) == 700
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        ask(2, 1)
    stage.conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type ~ 'inference'")
    wait_until(lambda: device(stage.alice, "cuda:0", "inference_bytes") == (0,))
    assert publish(stage, job, [], 950) == 3


def test_plans_jobs_and_reloads_wake_the_scheduler(stage: Stage, planned: int) -> None:
    publish(stage, planned, [], 100)
    stage.woken("scheduler", lambda: acknowledge(stage, planned, 1))
    stage.woken("scheduler", lambda: stage.conn.execute("SELECT tensile_internal._notify(%s)", (planned,)))
    stage.woken("scheduler", stage.cluster.reload)
    stage.woken("scheduler", lambda: stage.end(planned))


def test_the_worker_is_woken_by_a_plan(stage: Stage, planned: int) -> None:
    stage.woken(planned, lambda: publish(stage, planned, []))


def test_an_acknowledgement_wakes_sessions_that_wait_for_a_change(stage: Stage, planned: int) -> None:
    publish(stage, planned, [])
    stage.alice.execute("SELECT tensile_worker._wait_for_change(0)")
    acknowledge(stage, planned, 1)
    stage.alice.execute(
        "BEGIN; SET LOCAL statement_timeout = '30 s'; SELECT tensile_worker._wait_for_change(60000); COMMIT"
    )
