"""Jobs with ranks, whatever is killed and whenever: they end with the bits of an undisturbed run, and leave nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.ranks_site import Site, making_site
from tests.server.support import (
    Wait,
    after_restart,
    digest,
    ended,
    finish,
    state,
    steps,
    trainer_pid,
    value,
    worker_pid,
)

KILLS = int(os.environ.get("RANK_KILLS", "4"))
EPOCHS, STEPS = 120, 600  # of a job
MOST_OF_A_JOB = 3  # kills, because each makes the next attempt wait longer
ROUND_S = 180  # for a job to get on, beside others
RAYLET = "raylet/raylet"


@pytest.fixture(scope="module")
def site(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Site]:
    with making_site(new_cluster, wait_until, restart_after_crash="on") as made:
        made.server.expect("was terminated by signal 9")
        made.set_timeout("20s")
        yield made


def kill_rank(site: Site, job: int, dice: random.Random) -> bool:
    return _killed(dice.choice(site.ray.ranks() or [None]))


def kill_driver(site: Site, job: int, dice: random.Random) -> bool:
    return _killed(trainer_pid(site.conn, job))


def kill_worker(site: Site, job: int, dice: random.Random) -> bool:
    """Kill the job's worker, after which PostgreSQL restarts all its processes."""
    if not _killed(worker_pid(site.conn, job)):
        return False
    site.conn = after_restart(site.server, site.conn, site.wait_until)
    return True


def kill_node(site: Site, job: int, dice: random.Random) -> bool:
    """Kill the second node, and start it again."""
    site.ray.kill(RAYLET, f"--node_ip_address={site.ray.node_address(1)}")
    site.wait_until(lambda: not site.ray.processes(RAYLET, f"--node_ip_address={site.ray.node_address(1)}"))
    site.ray.add_node(1)
    return True


def _killed(process: int | None) -> bool:
    """Kill a process; return whether there was one."""
    if process is None:
        return False
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


VICTIMS = (kill_rank, kill_driver, kill_worker, kill_node)


def kill(site: Site, dice: random.Random, job: int, victim: Callable[[Site, int, random.Random], bool]) -> bool:
    """Kill the victim at some moment of the job, from its submission to its last step; return whether that happened."""
    steps_before = dice.choice((0, 0, dice.randrange(1, STEPS)))
    if steps_before:
        site.wait_until(
            lambda: ended(site.conn, job) or steps(site.conn, job) >= steps_before, ROUND_S, lambda: site.told(job)
        )
    else:
        for _ in range(dice.randrange(40)):  # while it connects, waits for processors or starts its ranks
            site.conn.execute("SELECT pg_sleep(0.1)")
    return not ended(site.conn, job) and victim(site, job, dice)


def await_end(site: Site, job: int) -> None:
    """Wait until the job has ended, as long as it gets on."""
    while not ended(site.conn, job):
        before = steps(site.conn, job)

        def gets_on(before: int = before) -> bool:
            return ended(site.conn, job) or steps(site.conn, job) != before

        site.wait_until(gets_on, ROUND_S, lambda: site.told(job))


@pytest.mark.long
@pytest.mark.timeout(300 + 90 * KILLS)
def test_a_job_ends_with_its_weights_whatever_is_killed(site: Site) -> None:
    """Long because a job starts again after each kill. RANK_KILLS says how often: 4 times, unless asked for more.

    All victims take turns, so that four kills are one of each."""
    undisturbed = site.submit(2, epochs=EPOCHS)
    finish(site.conn, undisturbed, "250 s")
    assert value(site.conn, "SELECT count(*) FROM tensile.metrics WHERE job = %s", undisturbed) > 0
    expected = digest(site.conn, undisturbed)
    dice = random.Random(KILLS)
    victims = dice.sample(VICTIMS, len(VICTIMS))
    kills = 0
    while kills < KILLS:
        job = site.submit(2, epochs=EPOCHS)
        for _ in range(dice.randint(1, MOST_OF_A_JOB)):
            kills += kill(site, dice, job, victims[kills % len(victims)])
        await_end(site, job)
        print(f"{kills} kills, the last ones in job {job}")
        assert state(site.conn, job) == "finished", site.told(job)
        assert digest(site.conn, job) == expected
        site.await_no_ranks()
