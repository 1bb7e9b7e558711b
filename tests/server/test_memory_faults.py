"""Jobs, planner and scheduler die or hang while jobs share a device: the weights stay the same.

Long: a test trains two or three jobs to their end and waits for processes to restart.
"""

from __future__ import annotations

import os
import signal

import pytest

from pg_tensile.planning.scheduling.keeping import GAIN
from tests.server.pressure import STEPS, Lab
from tests.server.stage import SCHEDULER, processes, terminate
from tests.server.support import FOREVER, alive, children, steps, trainer_pid, value


@pytest.mark.long
def test_memory_of_a_killed_job_goes_to_a_waiting_one_and_weights_stay_the_same(lab: Lab) -> None:
    """Set memory for the minimal plans of two networks, not of three.

    Takes seconds: three jobs train to their end, one of them twice.
    """
    lab.set_memory(2.8 * lab.sizes["mlp"].least)
    with lab.watch():
        jobs = [lab.submit("mlp", seed, options={"checkpoint_interval": 0}) for seed in (1, 2, 1)]
        sql = "SELECT job FROM tensile.jobs WHERE job = ANY(%s) AND state = 'waiting' AND reason ~ 'needs at least'"
        swapping = (
            "SELECT job FROM tensile.progress JOIN tensile_internal.checkpoints USING (job)"
            " WHERE job = ANY(%s) AND bytes_swapped > 0 AND epoch > 1 AND meta IS NOT NULL"
        )
        waiting, killed = lab.bring_together(
            *jobs, until=lambda: (w := value(lab.conn, sql, jobs)) and (k := value(lab.conn, swapping, jobs)) and (w, k)
        )
        pid = trainer_pid(lab.conn, killed)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        lab.wait_until(lambda: lab.is_training(waiting) or lab.column(waiting, "ended_at"), what=lab.told)
        lab.wait_until(lambda: lab.is_training(killed), what=lab.told)
        assert steps(lab.conn, killed) >= STEPS  # from its checkpoint
        weights = [lab.digest(job) for job in jobs]
    assert weights == [lab.weights["mlp", seed] for seed in (1, 2, 1)]
    assert lab.column(killed, "attempts") == 2 and not lab.column(killed, "warnings")


@pytest.mark.long
def test_others_get_the_memory_of_a_cancelled_job_and_make_room_for_a_new_one(lab: Lab) -> None:
    """Plans that cost next to nothing stay in force, whatever memory is free."""
    lab.set_memory(0.5 * lab.vanilla(["mlp", "cnn", "mlp"]))
    with lab.watch():
        jobs = [lab.submit("mlp", 1), lab.submit("cnn", 1)]
        doomed = lab.submit("mlp", epochs=FOREVER)
        lab.bring_together(*jobs, doomed)
        before = sum(map(lab.granted, jobs))
        lab.conn.execute("SELECT cancel_job(%s)", (doomed,))
        lab.bring_together(
            *jobs,
            until=lambda: (
                sum(map(lab.granted, jobs)) > before or sum(map(lab.slowdown, jobs)) < (1 + 2 * GAIN) * len(jobs)
            ),
        )
        jobs.append(lab.submit("mlp", 2))
        weights = [lab.digest(job) for job in jobs]
    assert weights == [lab.weights["mlp", 1], lab.weights["cnn", 1], lab.weights["mlp", 2]]


def planner_pid(lab: Lab) -> int:
    pid: int = lab.wait_until(lambda: next(iter(children(processes(lab.conn)[SCHEDULER][0])), None), what=lab.told)
    return pid


@pytest.mark.long
@pytest.mark.parametrize("end", ["killed", "left hanging"])
def test_a_planner_that_ends_while_it_plans(lab: Lab, end: str) -> None:
    """Jobs continue under their plans; the waiting one gets its plan from the next planner."""
    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    if end == "left hanging":
        lab.set("executor_timeout", "15s")  # a planner may need some seconds to start beside other work
    deaths = len(lab.log("planner"))
    first = lab.submit("mlp", epochs=FOREVER)
    lab.await_training(first)
    planner = planner_pid(lab)
    os.kill(planner, signal.SIGSTOP)
    second = lab.submit("mlp", 2)
    lab.wait_until(lambda: lab.column(second, "state") == "waiting", what=lab.told)
    lab.await_steps(first)
    assert lab.column(second, "state") == "waiting"
    if end == "killed":
        os.kill(planner, signal.SIGKILL)
    lab.wait_until(lambda: len(lab.log("planner")) > deaths, what=lab.told)
    assert ("signal 9" if end == "killed" else "no plan within 15 s") in lab.log("planner")[-1][2]
    assert lab.digest(second) == lab.weights["mlp", 2]
    assert not alive(planner)
    lab.set("executor_timeout", "5min")
    lab.cancel(first)


@pytest.mark.long
def test_jobs_run_without_a_scheduler_and_the_next_one_continues(lab: Lab) -> None:
    lab.set_memory(0.62 * lab.vanilla(["mlp", "cnn"]))
    first = lab.submit("cnn", epochs=FOREVER)
    lab.await_training(first)
    with lab.watch():
        terminate(lab.conn, SCHEDULER)
        lab.wait_until(lambda: SCHEDULER not in processes(lab.conn))
        generation = lab.newest_generation(first)
        second = lab.submit("mlp", 1)
        lab.await_steps(first)
        assert lab.newest_generation(first) == generation
        assert lab.digest(second) == lab.weights["mlp", 1]
        assert lab.newest_generation(first) > generation
        lab.await_steps(first)
    lab.cancel(first)
