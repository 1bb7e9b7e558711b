"""The scheduler and its planner in a real server.

Workers execute SQL of the tests (stage.py): a job has sent the trace of a small network, and reads and acknowledges
plans as a trainer does.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import model_bytes
from pg_tensile.planning.latency.current_load import CurrentLoad
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.trace.trace import Trace
from tests.conftest import sweep
from tests.server.stage import SCHEDULER, await_turn, processes, restart_processes, set_the_stage, terminate
from tests.server.support import Wait, alive, children, register, state, value
from tests.unit.handmade import network
from tests.unit.slowed import slowed_by_load

NETWORK = network(12, latency_us=20.0)
LEAST = least_bytes(NETWORK)
MOST = footprint(NETWORK).device_peak_bytes
TOTAL = 1 << 30


def profile() -> dict[str, Any]:
    return {**asdict(RTX_A6000), "memory_bytes": TOTAL}


class Job:
    """A job whose trainer is played by the test."""

    def __init__(self, play: Play, number: int) -> None:
        self.play = play
        self.number = number
        self.trace: Trace | None = None
        self.revision = 0

    def order(self, sql: str) -> list[dict[str, Any]]:
        return self.play.order(self.number, sql)

    def send_trace(
        self,
        trace: Trace | None = NETWORK,
        claim: int = 0,
        data: bytes | None = None,
        device: str = "cpu",
        policy: str = "joint",
    ) -> None:
        """Store the trace as the worker does on a TRACE frame, with `data` instead of its own."""
        self.trace, self.revision = trace, self.revision + 1
        header = {"device": device, "profile": profile(), "revision": self.revision, "policy": policy}
        header |= {
            "overhead_bytes": 0,
            "overhead_measured": False,
            "operator": "backward",
            "graphs": [{"name": "train", "rows": 8}],
        }
        header |= {"least_bytes": claim if trace is None else least_bytes(trace), "load": 0.0}
        if trace is None:
            header |= {"policy": "none", "graphs": []}
        sent = "" if trace is None else f"'\\x{(data or trace.to_bytes()).hex()}'"
        self.order(f"SELECT tensile_worker._register_device('{device}', {TOTAL}, 1e9, 1e9, 0)")
        self.order(f"SELECT tensile_worker._job_trace('{json.dumps(header)}', ARRAY[{sent}]::bytea[], NULL)")

    def send_latency(self, factor: float) -> None:
        assert self.trace is not None
        latency_us = (self.trace.latency_us * factor).astype(np.float32)
        array = "ARRAY[" + ",".join(map(str, latency_us.tolist())) + "]::real[]"
        header = json.dumps({"samples": 3, "total_us": float(latency_us.sum()), "load": 0, "average_load": 0.0})
        self.order(f"SELECT tensile_worker._job_latency('{header}', {array}, {array}, {array})")

    def report_load(self, load: float) -> None:
        """Report the load of the device by others, as a trainer does."""
        self.order(f"SELECT tensile_worker._report('waiting', {'NULL, ' * 11} {load})")

    def plan(self, after: int = 0) -> dict[str, Any]:
        """Wait for a plan after generation `after`, validate it and return it with its grant."""
        fetch = (
            "SELECT generation, encode(events, 'hex') AS events, planned_bytes, granted_bytes, link_share"
            f" FROM tensile_worker._fetch_plan({after})"
        )
        plan: dict[str, Any] = self.play.wait_until(
            lambda: self.order(fetch)[0], what=lambda: f"a plan of job {self.number}: {self.play.log()}"
        )
        plan["plan"] = Plan.from_rows(bytes.fromhex(plan.pop("events")))
        assert plan["planned_bytes"] <= plan["granted_bytes"]
        if self.trace is not None:
            validate(self.trace, plan["plan"])
            assert footprint(self.trace, plan["plan"]).device_peak_bytes == plan["planned_bytes"]
        return plan

    def follow(self, after: int = 0) -> dict[str, Any]:
        """Adopt the next plan and acknowledge it, as after an iteration; return it."""
        plan = self.plan(after)
        self.order("SELECT tensile_worker._job_admitted()")
        self.order(f"SELECT tensile_worker._acknowledge_plan({plan['generation']})")
        return plan

    def reason(self) -> str:
        return str(value(self.play.conn, "SELECT reason FROM tensile.jobs WHERE job = %s", self.number))


class Play:
    """A server with the real scheduler and workers that execute orders."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster = cluster
        self.wait_until = wait_until
        self.conn = cluster.connect()
        set_the_stage(self.conn, "worker")
        self.jobs = 0
        self._altered: dict[str, None] = {}

    def reset(self) -> None:
        """End the jobs, forget what was stored about them and the device, and set the settings back."""
        sweep(self.conn)
        self.cluster.alter(self._altered)
        await_turn(self.conn, self.wait_until, SCHEDULER)  # which may have been about to plan for a job
        self.conn.execute(
            "TRUNCATE tensile_internal.scheduler_log, tensile_internal.latency_models,"
            " tensile_internal.device_profiles, stage.orders"
        )

    def order(self, process: int, sql: str) -> list[dict[str, Any]]:
        insert = "INSERT INTO stage.orders (process, sql) VALUES (%s, %s) RETURNING id"
        number = value(self.conn, insert, str(process), sql)

        def answer() -> Any:
            rows = value(self.conn, "SELECT answer FROM stage.orders WHERE id = %s", number)
            return [None] if rows == [] else rows

        rows = self.wait_until(answer, what=f"the answer to {sql[:80]}")
        assert isinstance(rows, list), rows
        return rows

    def job(self, **arguments: Any) -> Job:
        self.jobs += 1
        register(self.conn, f"m{self.jobs}")
        named = "".join(f", {name} => {text!r}" for name, text in arguments.items())
        sql = f"SELECT train_model('m{self.jobs}', 'SELECT 1.0 AS x, 2.0 AS y', 'y'{named})"
        job = Job(self, int(value(self.conn, sql)))
        job.order("SELECT 1 AS one")
        return job

    def end(self, job: Job) -> None:
        self.conn.execute("SELECT cancel_job(%s)", (job.number,))
        self.wait_until(lambda: state(self.conn, job.number) == "cancelled")

    def set(self, name: str, text: str) -> None:
        self._altered[f"pg_tensile.{name}"] = None
        self.cluster.alter({f"pg_tensile.{name}": text})

    def log(self, event: str | None = None) -> list[tuple[Any, ...]]:
        sql = "SELECT event, job, reason FROM tensile.scheduler_log WHERE event = coalesce(%s, event) ORDER BY id"
        return self.conn.execute(sql, (event,)).fetchall()

    def await_log(self, event: str, count: int = 1) -> tuple[Any, ...]:
        """Wait until the log has `count` lines of an event; return the last one."""
        lines = self.wait_until(lambda: len(self.log(event)) >= count and self.log(event), what=lambda: str(self.log()))
        result: tuple[Any, ...] = lines[-1]
        return result

    def planner(self) -> int:
        """Wait for the scheduler's child and return its pid."""
        result: int = self.wait_until(lambda: next(iter(children(processes(self.conn)[SCHEDULER][0])), None))
        return result

    def granted(self) -> int:
        return int(value(self.conn, "SELECT granted_bytes FROM tensile_worker._devices() WHERE name = 'cpu'") or 0)


@pytest.fixture(scope="module")
def theatre(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Play]:
    """A device with memory for one network without a plan, and for another one that loses much time by its plan."""
    memory = MOST + (3 * LEAST + MOST) // 4
    settings = {"pg_tensile.device_memory": f"{memory // 1024}kB", "pg_tensile.plan_events": 1024}
    play = Play(new_cluster(settings), wait_until)
    yield play
    play.conn.close()
    play.cluster.end()


@pytest.fixture
def play(theatre: Play) -> Iterator[Play]:
    """The server, without jobs."""
    yield theatre
    theatre.reset()


def budget(play: Play) -> int:
    return int(value(play.conn, "SELECT budget_bytes FROM tensile_worker._devices() WHERE name = 'cpu'"))


def test_a_job_waits_for_its_plan_and_gets_one(play):
    job = play.job()
    job.send_trace()
    first = job.follow()
    assert len(first["plan"]) == 0 and first["planned_bytes"] == MOST and first["link_share"] == 1.0
    assert first["granted_bytes"] == MOST + MOST // 50 == play.granted()
    assert state(play.conn, job.number) == "running"
    row = play.conn.execute("SELECT generation, planned, vanilla, host_bytes FROM tensile.plans").fetchone()
    assert row[0] == first["generation"] and max(row[1]) == MOST == max(row[2]) and row[3] == 0
    assert ("planned", job.number, f"job {job.number} has come") in play.log()


def test_the_planner_starts_with_the_first_trace_and_imports_no_torch(play):
    restart_processes(play.cluster, play.conn, play.wait_until)
    job = play.job()
    assert not children(processes(play.conn)[SCHEDULER][0])
    job.send_trace()
    job.plan()
    with open(f"/proc/{play.planner()}/maps") as maps:
        mapped = maps.read()
    assert "numpy" in mapped and "libtorch" not in mapped


def test_a_second_job_makes_the_first_one_smaller_before_it_begins(play):
    first_job, second_job = play.job(), play.job()
    first_job.send_trace()
    first = first_job.follow()
    second_job.send_trace()
    second = first_job.plan(first["generation"])
    assert second["granted_bytes"] < first["granted_bytes"]
    play.wait_until(lambda: "given memory back" in second_job.reason(), what=lambda: second_job.reason())
    assert play.granted() == first["granted_bytes"]  # until the first job acknowledges
    assert state(play.conn, second_job.number) == "waiting"
    first_job.follow(first["generation"])
    beside = second_job.follow()
    assert state(play.conn, second_job.number) == "running"
    assert second["granted_bytes"] + beside["granted_bytes"] == play.granted() <= budget(play)
    play.end(first_job)
    assert second_job.follow(beside["generation"])["granted_bytes"] == first["granted_bytes"]
    assert len([line for line in play.log("planned") if line[1] == second_job.number]) == 2


def test_jobs_of_policy_tensile_are_planned_together_each_with_its_swap_share(play):
    slow = network(12, latency_us=2000.0)
    limited = play.job(policy="tensile", options='{"swap_share": 0.4}')
    other = play.job(policy="tensile")
    limited.send_trace(slow, policy="tensile")
    alone = limited.follow()
    other.send_trace(slow, policy="tensile")
    plans = [limited.follow(alone["generation"]), other.follow()]
    limits = {1: rounds.Limits(swap_share=0.4), 2: rounds.Limits()}
    device = DeviceProfile.from_json(profile())
    expected = rounds.plan_limited(dict.fromkeys(limits, slow), device, budget(play), limits)
    assert [plan["plan"] for plan in plans] == [plan.with_bytes(slow) for plan in expected.values()]
    assert 0 < len(expected[1]) < len(expected[2])
    assert not play.log("note")


def test_when_a_job_comes_latencies_are_those_under_the_load_then(play):
    """The first job was planned, and has measured, without load."""
    models = slowed_by_load(NETWORK, RTX_A6000)
    sql = "INSERT INTO tensile_internal.latency_models (device, models, kinds, samples) VALUES ('cpu', %s, 1, 1)"
    play.conn.execute(sql, (model_bytes.encode(models),))
    first_job, second_job = play.job(), play.job()
    first_job.send_trace()
    first = first_job.follow()
    first_job.send_latency(1.1)  # less than another plan would need
    first_job.report_load(0.8)
    second_job.report_load(0.3)
    second_job.send_trace()
    first_job.follow(first["generation"])
    second_job.follow()
    us = "SELECT vanilla_us FROM tensile.plans WHERE job = %s"
    for job, factor, load in ((first_job, 1.1, 0.8), (second_job, 1.0, 0.3)):
        measured = NETWORK.with_latencies((NETWORK.latency_us * factor).astype(np.float32))
        expected = CurrentLoad(models).at(measured, RTX_A6000, 0.0, load).latency_us.sum()
        assert expected > 1.05 * measured.latency_us.sum()
        assert value(play.conn, us, job.number) == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_a_lasting_change_of_the_load_makes_plans_anew(play):
    """Takes longer than a change has to last, in both directions."""
    models = slowed_by_load(NETWORK, RTX_A6000)
    sql = "INSERT INTO tensile_internal.latency_models (device, models, kinds, samples) VALUES ('cpu', %s, 1, 1)"
    play.conn.execute(sql, (model_bytes.encode(models),))
    job = play.job(memory_budget=f"{(LEAST + MOST) // 2048}kB")
    job.report_load(0.0)
    job.send_trace()
    job.follow()
    for number, (before, now) in enumerate((("0%", 1.0), ("100%", 0.0))):
        job.report_load(now)
        reason = f"the load of cpu by others than job {job.number} has changed from {before} to {now:.0%}"
        play.wait_until(lambda: [line for line in play.log("scheduled") if line[2] == reason], 60)  # noqa: B023
        assert len(play.log("scheduled")) == number + 2


def test_impossible_jobs_are_refused_and_waiting_ones_get_the_reason(play):
    huge = network(4, activation_bytes=64 << 20)
    job = play.job()
    job.send_trace(huge)
    refusal = play.wait_until(lambda: job.order("SELECT tensile_worker._job_refusal()::text AS refusal")[0]["refusal"])
    assert json.loads(refusal) == {
        "budget_bytes": budget(play),
        "least_bytes": least_bytes(huge),
        "operator": "backward",
        "max_slowdown": None,
    }
    limited = play.job(memory_budget=f"{LEAST // 1024 - 1}kB")
    limited.send_trace()
    assert play.await_log("refused", 2)[1] == limited.number
    first, eager = play.job(), play.job()
    first.send_trace()
    assert first.follow()["planned_bytes"] == MOST
    eager.send_trace(None, claim=budget(play) - LEAST + 1)
    play.wait_until(lambda: "needs at least" in eager.reason(), what=lambda: str(play.log()))
    assert "the job that runs" in eager.reason()
    play.end(first)
    assert eager.follow()["granted_bytes"] == budget(play) - LEAST + 1


def test_a_lower_budget_makes_running_jobs_smaller(play):
    job = play.job()
    job.send_trace()
    first = job.follow()
    play.set("device_memory", f"{(LEAST + MOST) // 2048}kB")
    smaller = job.follow(first["generation"])
    assert smaller["granted_bytes"] <= (LEAST + MOST) // 2 and len(smaller["plan"]) > 0
    assert "the budget has changed" in play.await_log("planned", 2)[2]


def test_a_trainer_that_measured_more_gets_another_plan(play):
    play.set("device_memory", f"{(LEAST + MOST) // 2048}kB")
    job = play.job()
    job.send_trace()
    first = job.follow()
    workspaces = np.full(NETWORK.operator_count, 64 << 10)
    job.send_trace(NETWORK.with_latencies(NETWORK.latency_us, workspaces))
    again = job.follow(first["generation"])
    assert again["granted_bytes"] <= budget(play)


def test_only_lasting_changes_of_latency_cause_a_new_plan(play):
    def come() -> str:
        """Return the reason of the plans after the arrival of a job that needs almost no memory."""
        before = len(play.log("scheduled"))
        eager = play.job()
        eager.send_trace(None, claim=1)
        eager.follow()
        return str(play.await_log("scheduled", before + 1)[2])

    job = play.job(memory_budget=f"{(LEAST + MOST) // 2048}kB")
    job.send_trace(network(12, latency_us=2000.0))
    first = job.follow()
    job.send_latency(1.1)
    job.send_latency(1.15)
    assert come() == f"job {job.number + 1} has come"  # which is checked with the newest latency
    job.send_latency(1.15 * 1.3)
    assert play.await_log("scheduled", 3)[2] == f"latency of job {job.number} has changed by 30%"
    job.send_latency(1.3)  # close to the latency that was checked last
    assert come() == f"job {job.number + 2} has come"
    assert (
        len([line for line in play.log("planned") if line[1] == job.number]) == 1
    )  # the old plan is as good as a new one
    job.send_latency(0.01)
    assert job.follow(first["generation"])["plan"] != first["plan"]


def rounds_of(play) -> list[tuple[str, bool]]:
    """Return the reason of each round, and whether it was brief."""
    sql = "SELECT reason, (details->>'brief')::bool FROM tensile.scheduler_log WHERE event = 'scheduled' ORDER BY id"
    rounds: list[tuple[str, bool]] = play.conn.execute(sql).fetchall()
    return rounds


def thorough_after_brief(play) -> list[tuple[str, bool]]:
    rounds = rounds_of(play)
    brief = next((number for number, (_, brief) in enumerate(rounds) if brief), len(rounds))
    return [line for line in rounds[brief + 1 :] if line == ("the memory was divided in few passes", False)]


@pytest.mark.long
@pytest.mark.parametrize("options", ["{}", '{"max_slowdown": 50}'])
@pytest.mark.parametrize("jobs", [1, 2])
def test_jobs_with_long_traces_get_a_plan_soon_and_a_better_one_later(play, jobs, options):
    """Long: the memory of long traces is divided twice. One that binds nothing is promised to the last job."""
    trace = network(64)  # of more than planning.BRIEF_OPERATORS
    play.set("device_memory", f"{jobs * (least_bytes(trace) + footprint(trace).device_peak_bytes) // 2048}kB")
    generation, first_job = 0, None
    if jobs == 2:
        first_job = play.job()
        first_job.send_trace(trace)
        generation = first_job.follow()["generation"]
    last_job = play.job(options=options)
    last_job.send_trace(trace)
    play.wait_until(lambda: any(brief for _, brief in rounds_of(play)), what=lambda: str(rounds_of(play)))
    pid = play.planner()
    os.kill(pid, signal.SIGSTOP)  # many passes take as long as they like
    try:
        if first_job is not None:
            first_job.follow(generation)
        last_job.follow()
    finally:
        os.kill(pid, signal.SIGCONT)
    play.wait_until(lambda: thorough_after_brief(play), what=lambda: str(rounds_of(play)))
    assert play.granted() <= budget(play)


def test_a_planner_that_dies_is_replaced_and_jobs_keep_their_plans(play):
    first_job = play.job()
    first_job.send_trace()
    first = first_job.follow()
    pid = play.planner()
    os.kill(pid, signal.SIGKILL)
    assert play.await_log("planner")[2].startswith("planner died: planner was killed by signal 9 (SIGKILL)")
    assert play.granted() == first["granted_bytes"]
    second_job = play.job()
    second_job.send_trace()
    assert first_job.follow(first["generation"])["granted_bytes"] < first["granted_bytes"]
    second_job.follow()
    assert play.planner() != pid and not alive(pid)
    assert play.granted() <= budget(play)


@pytest.mark.long
def test_a_scheduler_that_dies_continues_with_its_plans(play):
    first_job, second_job = play.job(), play.job()
    first_job.send_trace()
    first = first_job.follow()
    pid = play.planner()
    terminate(play.conn, SCHEDULER)
    play.wait_until(lambda: not alive(pid), what="the planner ends with the scheduler")
    second_job.send_trace()
    smaller = first_job.follow(first["generation"])  # the launcher restarts the scheduler after some seconds
    beside = second_job.follow()
    assert smaller["granted_bytes"] + beside["granted_bytes"] == play.granted() <= budget(play)


def reject(job: Job, generation: int) -> dict[str, Any]:
    """Refuse a plan as the worker does when the trainer cannot use it; return the next plan."""
    job.order(f"SELECT tensile_worker._job_log('rejected', 'it cannot be used', {generation})")
    return job.follow(generation)


def test_a_job_keeps_its_plan_when_it_rejects_another_until_the_jobs_change(play):
    """The first job refuses a smaller plan; the second one is planned into the remaining memory."""
    first_job, second_job = play.job(), play.job()
    first_job.send_trace()
    first = first_job.follow()
    second_job.send_trace()
    smaller = first_job.plan(first["generation"])
    assert smaller["granted_bytes"] < first["granted_bytes"]
    again = reject(first_job, smaller["generation"])
    assert (again["plan"], again["granted_bytes"]) == (first["plan"], first["granted_bytes"])
    footprint = "SELECT generation FROM tensile.plans WHERE job = %s"
    assert value(play.conn, footprint, first_job.number) == again["generation"]
    beside = second_job.follow()
    assert first["granted_bytes"] + beside["granted_bytes"] == play.granted() <= budget(play)
    third = play.job()  # the first job gets another smaller plan
    third.send_trace(None, claim=1)
    assert first_job.follow(again["generation"])["granted_bytes"] < first["granted_bytes"]
    assert second_job.follow(beside["generation"])["granted_bytes"] > beside["granted_bytes"]
    third.follow()
    assert play.granted() <= budget(play)
    assert len([line for line in play.log("planned") if line[1] == first_job.number]) == 4


def test_the_grant_of_a_plan_that_is_rejected_is_given_back(play):
    play.set("device_memory", f"{(LEAST + MOST) // 2048}kB")
    job = play.job()
    job.send_trace()
    first = job.follow()
    play.set("device_memory", f"{2 * MOST // 1024}kB")
    larger = job.plan(first["generation"])
    assert play.granted() == larger["granted_bytes"] > first["granted_bytes"]
    assert reject(job, larger["generation"])["plan"] == first["plan"]
    assert play.granted() == first["granted_bytes"]


@pytest.mark.long
def test_a_trace_that_no_planner_survives_is_set_aside(play):
    """The planner ends with an error for statistics whose columns differ in length, which nothing expects.

    Takes seconds: the planner is restarted after growing pauses.
    """
    sound, deadly = play.job(), play.job()
    sound.send_trace()
    sound.follow()
    pid = play.planner()
    os.kill(pid, signal.SIGSTOP)  # it must not plan for the trace before there are statistics
    deadly.send_trace(device="cuda:0")
    play.conn.execute(
        "INSERT INTO tensile_internal.sparsities VALUES (%s, 1, '{0}', '{}', '{}', '{}', '{}')", (deadly.number,)
    )
    os.kill(pid, signal.SIGKILL)
    assert play.await_log("failed")[1] == deadly.number
    assert deadly.reason().startswith("its trace is set aside, because 3 planners that were given it have died")
    deaths = len(play.log("planner"))
    second_job = play.job()
    second_job.send_trace()
    sound.follow(1)
    second_job.follow()
    assert len(play.log("planner")) == deaths


def test_a_damaged_trace_does_not_hold_up_other_jobs(play):
    damaged, sound = play.job(), play.job()
    damaged.send_trace(data=b"nonsense")
    play.wait_until(lambda: "its trace cannot be read" in damaged.reason(), what=damaged.reason)
    sound.send_trace()
    assert sound.follow()["planned_bytes"] == MOST


def test_a_changed_priority_is_a_reason_to_plan(play):
    job = play.job()
    job.send_trace()
    job.follow()
    play.conn.execute("SELECT set_job_priority(%s, 40)", (job.number,))
    play.wait_until(lambda: "priorities have changed" in play.log("scheduled")[-1][2], what=lambda: str(play.log()))
