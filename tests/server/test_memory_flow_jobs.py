"""Jobs that each need most of the device train at once because their memory flows, to the weights of a run alone.

Constant grants are impossible here: no plan of a job takes less than two thirds of the memory."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.pressure import STEPS, Lab, Watch
from tests.server.stage import SCHEDULER, processes, terminate
from tests.server.support import FOREVER, Wait, steps, trainer_pid, value

# minutes on a busy machine: jobs move their memory at every iteration
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("FLOW_KILLS", "10"))
NEEDED = 0.9  # of the memory, by each job without a plan
FLOWING = "SELECT flowing_jobs FROM tensile.devices"


@pytest.fixture(scope="module")
def flow_lab(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Lab]:
    cluster = new_cluster({"pg_tensile.max_retries": 100})
    lab = Lab(cluster, wait_until, [("bulky", 1), ("bulky", 2)])
    vanilla, least = lab.sizes["bulky"]
    lab.set_memory(vanilla / NEEDED)
    assert 2 * least > vanilla / NEEDED
    yield lab
    lab.conn.close()
    cluster.end()


@pytest.fixture
def lab(flow_lab: Lab) -> Iterator[Lab]:
    yield flow_lab
    flow_lab.cancel(*(job for (job,) in flow_lab.conn.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL")))


def flows(lab: Lab, jobs: int) -> bool:
    return bool(value(lab.conn, FLOWING) == jobs)


def await_flow(lab: Lab, *jobs: int) -> None:
    """Wait until all jobs train and their memory flows."""
    lab.wait_until(lambda: all(map(lab.is_training, jobs)) and flows(lab, len(jobs)), what=lab.told)


class FlowWatch(Watch):
    """A watch that also looks at what flows."""

    most_flowing = 0

    def _run(self) -> None:
        held = "SELECT granted_bytes + inference_bytes, flowing_bytes, budget_bytes FROM tensile.devices"
        while not self._ended.wait(0.005):
            for taken, flowing, budget in self._conn.execute(held).fetchall():
                self.samples += 1
                self.granted, self.most_flowing = max(self.granted, taken), max(self.most_flowing, flowing)
                if not flowing <= taken <= budget:
                    self.excesses.append((taken, flowing, budget))


def set_memory(lab: Lab, factor: float) -> None:
    """Set the device's memory to a multiple of what a job needs without a plan, while jobs run."""
    lab.set("device_memory", f"{int(factor * lab.sizes['bulky'].vanilla) // 1024}kB")


def test_two_jobs_train_at_once_while_a_third_comes_and_goes(lab: Lab) -> None:
    """Long because four jobs train."""
    seen = FlowWatch(lab.cluster.connect())
    with seen:
        first = lab.submit("bulky", 1)
        lab.await_training(first)
        assert flows(lab, 0)  # it is alone
        second = lab.submit("bulky", 2)
        await_flow(lab, first, second)
        third = lab.submit("bulky", 3, epochs=FOREVER)
        await_flow(lab, first, second, third)
        for job in (first, second, third):
            lab.await_steps(job, STEPS)
        lab.cancel(third)
        weights = [lab.digest(job) for job in (first, second)]
    assert weights == [lab.weights["bulky", seed] for seed in (1, 2)]
    assert seen.most_flowing > lab.sizes["bulky"].vanilla  # more than one of them held memory


def test_what_is_left_has_a_constant_grant_again(lab: Lab) -> None:
    """Long because two jobs train for a while."""
    first, second = (lab.submit("bulky", seed, epochs=FOREVER) for seed in (1, 2))
    await_flow(lab, first, second)
    lab.cancel(second)
    lab.wait_until(lambda: flows(lab, 0), what=lab.told)
    lab.await_steps(first)
    lab.cancel(first)


def test_two_jobs_change_between_flowing_and_constant_grants(lab: Lab) -> None:
    """Long because two jobs train for a while."""
    jobs = [lab.submit("bulky", seed, epochs=FOREVER) for seed in (1, 2)]
    least, vanilla = lab.sizes["bulky"].least, lab.sizes["bulky"].vanilla
    await_flow(lab, *jobs)
    for factor, flowing in ((2.2, 0), (1 / NEEDED, 2), ((2.1 * least) / vanilla, None), (1 / NEEDED, 2)):
        set_memory(lab, factor)
        if flowing is not None:
            lab.wait_until(lambda flowing=flowing: flows(lab, flowing), what=lab.told)
        for job in jobs:
            lab.await_steps(job)
    lab.cancel(*jobs)


def test_groups_are_shown_as_they_are_executed(lab: Lab) -> None:
    """Long because two jobs train for a while."""
    jobs = [lab.submit("bulky", seed, epochs=FOREVER) for seed in (1, 2)]
    await_flow(lab, *jobs)
    for job in jobs:
        rows = lab.conn.execute(
            "SELECT event, trigger_operator, deadline_operator, bytes FROM tensile.plan_events"
            " WHERE job = %s AND event IN ('begin_group', 'end_group') ORDER BY sequence",
            (job,),
        ).fetchall()
        begins, ends = rows[::2], rows[1::2]
        assert len(begins) > 1 and {row[0] for row in begins} == {"begin_group"}
        assert {row[0] for row in ends} == {"end_group"}
        assert max(row[3] for row in begins) == lab.granted(job)
        assert all(end[3] <= begin[3] for begin, end in zip(begins, ends, strict=True))
        assert begins[0][1] == 0 and all(begin[1] <= begin[2] for begin in begins)
    lab.cancel(*jobs)


def test_without_memory_flow_the_second_waits(lab: Lab) -> None:
    """Long because two jobs train."""
    lab.set("memory_flow", "off")
    try:
        first = lab.submit("bulky", 1, epochs=FOREVER)
        lab.await_training(first)
        second = lab.submit("bulky", 2)
        lab.await_waiting(second, "needs at least")
        lab.set("memory_flow", "auto")
        await_flow(lab, first, second)
        lab.set("memory_flow", "off")  # forms no more sets; this one cannot have constant grants
        lab.await_steps(first)
        lab.await_steps(second)
        lab.cancel(first)
        assert lab.digest(second) == lab.weights["bulky", 2]
    finally:
        lab.set("memory_flow", "auto")


def test_a_stopped_job_holds_up_others_for_a_limited_time(lab: Lab) -> None:
    """Long because it waits for the limit."""
    lab.set("flow_timeout", "2s")
    try:
        stopped, other = (lab.submit("bulky", seed) for seed in (1, 2))
        await_flow(lab, stopped, other)
        reason = None
        while reason is None:  # until it is stopped while it holds memory that the other one needs
            pid = trainer_pid(lab.conn, stopped)
            assert pid is not None
            before = steps(lab.conn, other)
            os.kill(pid, signal.SIGSTOP)
            lab.wait_until(lambda n=before: lab.column(stopped, "reason") or steps(lab.conn, other) > n + STEPS)
            reason = lab.column(stopped, "reason")
            if reason is None:
                os.kill(pid, signal.SIGCONT)
                lab.await_steps(stopped, 1)
        assert "flow_timeout" in reason
        assert [lab.digest(job) for job in (stopped, other)] == [lab.weights["bulky", seed] for seed in (1, 2)]
    finally:
        lab.set("flow_timeout", "30s")


def has_ended(lab: Lab, job: int) -> bool:
    return lab.column(job, "ended_at") is not None


@pytest.mark.timeout(120 + 40 * KILLS)
def test_a_job_killed_at_any_moment_leaves_its_memory_to_the_other(lab: Lab) -> None:
    """Long because a job starts again after each kill. FLOW_KILLS says how often: 10 times, unless asked for more."""
    dice = random.Random(KILLS)
    kills = 0
    with FlowWatch(lab.cluster.connect()):
        while kills < KILLS:
            jobs = [lab.submit("bulky", seed, options={"checkpoint_interval": 0}) for seed in (1, 2)]
            await_flow(lab, *jobs)
            while kills < KILLS and not any(has_ended(lab, job) for job in jobs):
                kills += kill(lab, dice, jobs)
            assert [lab.digest(job) for job in jobs] == [lab.weights["bulky", seed] for seed in (1, 2)]
    assert flows(lab, 0) and value(lab.conn, "SELECT flowing_bytes FROM tensile.devices") == 0


def kill(lab: Lab, dice: random.Random, jobs: list[int]) -> int:
    """Kill the trainer of one of two jobs after some steps, and wait until it trains again; return 1, or 0 if it has
    ended before. Meanwhile the other one goes on."""
    chosen, other = dice.sample(jobs, 2)
    target = steps(lab.conn, chosen) + dice.randrange(1, STEPS)
    lab.wait_until(lambda: has_ended(lab, chosen) or steps(lab.conn, chosen) >= target, what=lab.told)
    pid, before = trainer_pid(lab.conn, chosen), steps(lab.conn, other)
    if pid is None or has_ended(lab, chosen):
        return 0
    attempts = lab.column(chosen, "attempts")
    os.kill(pid, signal.SIGKILL)
    lab.wait_until(lambda: has_ended(lab, other) or steps(lab.conn, other) > before + 1, what=lab.told)
    lab.wait_until(lambda: has_ended(lab, chosen) or lab.column(chosen, "attempts") > attempts, what=lab.told)
    lab.wait_until(lambda: has_ended(lab, chosen) or lab.is_training(chosen), what=lab.told)
    return 1


def test_a_new_scheduler_goes_on_with_flowing_jobs(lab: Lab) -> None:
    """Long because two jobs train to their end."""
    jobs = [lab.submit("bulky", seed) for seed in (1, 2)]
    with FlowWatch(lab.cluster.connect()):
        await_flow(lab, *jobs)
        before = processes(lab.conn)[SCHEDULER][0]
        terminate(lab.conn, SCHEDULER)
        lab.wait_until(lambda: processes(lab.conn).get(SCHEDULER, (before,))[0] != before, what=lab.told)
        assert [lab.digest(job) for job in jobs] == [lab.weights["bulky", seed] for seed in (1, 2)]
