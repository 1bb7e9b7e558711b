"""Memory that flows between jobs: who may take it, who has to wait, and what becomes of a job that breaks the rules.

On a stage, workers and scheduler are real but execute SQL of the tests, and the test is the trainers' end of their
sockets (memory_flow.py). The last tests have trainers that are processes, and real workers.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.cluster import child_python
from tests.server.memory_flow import CONNECT, CONSTANT, REST, WHOLE, Player, flow_call, group_rows, request, wave
from tests.server.stage import Stage, publish, restart_processes, set_the_stage, use_device
from tests.server.support import Connection, Wait, register, value

BUDGET = 1000
WAVE = wave(100, 300, 400, 500)  # six groups: 300, 400, 500, and back to 100


@pytest.fixture
def players(stage: Stage, job: int, second: int, wait_until: Wait) -> Iterator[tuple[Player, Player]]:
    """Two jobs on a device of 1000 bytes."""
    if not value(stage.conn, "SELECT to_regproc('stage.connect') IS NOT NULL"):
        stage.conn.execute(CONNECT)
    for number in (job, second):
        use_device(stage, number, "cuda:0", BUDGET)
    both = Player(stage, wait_until, job), Player(stage, wait_until, second)
    yield both
    for player in both:
        player.end.close()


@pytest.fixture
def third(stage: Stage, players: object) -> Iterator[int]:
    """A third job on the device."""
    if not value(stage.conn, "SELECT count(*) FROM tensile.models WHERE model = 'o'"):
        register(stage.alice, "o")
    number = stage.job("o")
    use_device(stage, number, "cuda:0", BUDGET)
    yield number
    stage.cancel(number)


def device(stage: Stage, columns: str) -> Any:
    return stage.alice.execute(f"SELECT {columns} FROM tensile.devices WHERE name = 'cuda:0'").fetchone()


# -- taking and giving back -------------------------------------------------------------------------------------------


def test_a_flowing_job_holds_what_its_group_takes(stage: Stage, players: tuple[Player, Player]) -> None:
    first, _ = players
    assert first.publish(WAVE) == 1
    columns = "flowing_jobs, flowing_bytes, granted_bytes"
    assert device(stage, columns) == (0, 0, 0), "a plan alone enters nothing"
    for code, held in enumerate((300, 400, 500, 500, 400, 300)):
        first.take(code)
        assert device(stage, columns) == (1, held, held)
    stage.order(first.job, "SELECT tensile_worker._acknowledge_plan(1)")
    assert device(stage, columns) == (1, 300, 300)
    first.ask(REST)
    first.take(WHOLE)
    assert device(stage, columns) == (1, 500, 500)
    first.take(0, 1)
    first.ask(REST)  # the iteration has failed
    first.take(0)
    rows = stage.order(
        "scheduler", f"SELECT granted_bytes, flows FROM tensile_internal._grants() WHERE job = {first.job}"
    )
    assert rows == [{"granted_bytes": 500, "flows": True}]


def test_what_jobs_hold_never_exceeds_the_budget(
    stage: Stage, players: tuple[Player, Player], wait_until: Wait
) -> None:
    """Each goes on, begins a whole iteration, or ends one early, as it likes."""
    chance = random.Random(5)
    waited = 0
    position = dict.fromkeys(players, -1)
    for player in players:
        player.publish(wave(100, 400, 700, 800), 900)
    for _ in range(50):
        for player in players:
            if player.has_answer():
                player.granted()
            elif position[player] >= 0:
                waited += 1
                continue
            if chance.random() < 0.1 and position[player] >= 0:
                player.ask(REST)
                position[player] = -1
            position[player] = (position[player] + 1) % 6
            whole = position[player] == 0 and chance.random() < 0.3
            player.asks(WHOLE if whole else position[player])
            position[player] -= whole
            if whole and not player.has_answer():
                position[player] = 5  # which the next one follows
        assert device(stage, "flowing_bytes")[0] <= BUDGET
        # What one gives back the other one's worker may not have seen yet.
        wait_until(lambda: any(player.has_answer() for player in players), what="that not both wait")
    assert waited > 5


def test_a_group_waits_until_the_way_back_is_safe_and_a_worker_answers_as_soon_as_it_is(
    players: tuple[Player, Player],
) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 700, 900))
    first.take(0, 1)
    second.ask(0)
    second.waits()  # 700 + 400 > 1000
    first.take(2, 3, 4)
    assert second.state()["waits"]
    first.take(5)
    second.granted()  # first can end with what it has
    first.ask(REST)
    second.take(1, 2, 3)


def test_requests_are_served_within_one_wait(stage: Stage, players: tuple[Player, Player]) -> None:
    """A request, or memory that has become free, causes no step in Python."""
    for player in players:
        player.publish(wave(100, 400, 900))
    first, second = players
    first.take(0, 1)
    second.ask(0)
    second.waits()
    number = stage.place(second.job, "WAIT 0; WAIT 500")
    served = 0
    while stage._answer(number) is None:
        first.take(2, 3)
        second.granted()
        first.ask(0)
        second.take(1, 2, 3)
        first.granted()
        second.ask(0)
        first.take(1)
        served += 1
    assert served and stage.answer(number) == [{"bits": 8}]


def test_the_end_of_a_trainer_frees_what_it_held(stage: Stage, players: tuple[Player, Player]) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 900))
    first.take(0, 1)
    second.ask(0)
    second.waits()
    first.end.close()
    second.granted()
    assert device(stage, "flowing_jobs, flowing_bytes") == (1, 400)


def test_the_end_of_a_worker_frees_what_its_job_held(stage: Stage, players: tuple[Player, Player]) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 900))
    second.take(0, 1)
    first.ask(0)
    first.waits()
    stage.cancel(second.job)
    first.granted()


# -- joining, and constant grants -------------------------------------------------------------------------------------


def test_jobs_that_had_constant_grants_give_them_back_to_the_flow(
    players: tuple[Player, Player], stage: Stage, wait_until: Wait
) -> None:
    first, second = players
    assert first.publish([], 600) == 1 and second.publish([], 400) == 1
    for player in players:
        assert player.publish(wave(100, 400, 900)) == 2
        player.generation = 2
    first.ask(0)
    first.waits()  # the other one still has 400
    assert device(stage, "granted_bytes") == (500,), "it rests with 100"
    second.ask(0)  # either may have what it has given back
    wait_until(lambda: first.has_answer() or second.has_answer())
    ahead, behind = players if first.has_answer() else (second, first)
    ahead.granted()
    ahead.take(1, 2)
    behind.waits()
    ahead.take(3)
    behind.granted()  # the other one can end with what it has


def test_a_job_joins_when_it_fits(players: tuple[Player, Player]) -> None:
    first, second = players
    first.publish(wave(100, 400, 900))
    second.publish(wave(200, 400, 500))
    first.take(0)
    second.ask(0)
    second.waits()  # the first could not take 900 beside its 200 any more
    first.publish(wave(100, 400, 800))
    first.take(1, 2, 3)
    assert second.state()["waits"]
    first.generation = 2
    first.ask(0)
    first.granted()
    second.granted()


def test_a_job_leaves_the_flow_when_its_constant_grant_fits(stage: Stage, players: tuple[Player, Player]) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 600))
        player.take(0)
    assert first.publish([], 500) == 2
    assert device(stage, "granted_bytes") == (800,), "the plan alone enters nothing"
    first.ask(REST)
    first.generation = 2
    first.ask(CONSTANT)
    first.waits()  # the other one needs 600
    assert device(stage, "granted_bytes") == (500,)
    assert second.publish(wave(100, 400, 500)) == 2
    second.ask(REST)
    second.generation = 2
    second.take(0)
    first.granted()
    assert device(stage, "flowing_jobs, flowing_bytes, granted_bytes") == (1, 400, 900)
    stage.order(first.job, "SELECT tensile_worker._acknowledge_plan(2)")
    assert device(stage, "granted_bytes") == (900,)


@pytest.mark.parametrize("part", [450, 600], ids=["they fit", "the setting was lowered"])
def test_two_jobs_that_both_leave_the_flow_do_not_wait_for_each_other(
    stage: Stage, players: tuple[Player, Player], part: int
) -> None:
    """From its request on, each counts with the constant grant, not with the most of its groups."""
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 900))
        player.take(WHOLE)
        player.ask(REST)
        assert player.publish([], part) == 2
    for player in players:
        player.generation = 2
    first.ask(CONSTANT)
    first.waits()
    second.ask(CONSTANT)
    for player in players:
        player.granted()
    assert device(stage, "flowing_jobs, granted_bytes") == (0, 2 * part)


def test_a_constant_grant_comes_when_those_that_flow_are_safe_within_less(
    stage: Stage, players: tuple[Player, Player], third: int
) -> None:
    """Although both begin their next iteration at once, one after the other has to wait with it."""
    for player in players:
        player.publish(WAVE)
        player.take(0)
    assert publish(stage, third, [], 401) is None, "they need 600"
    positions = dict.fromkeys(players, 0)
    refused = 0
    while publish(stage, third, [], 350) is None:
        refused += 1
        assert refused < 100
        for player in players:
            if player.state()["waits"] or (refused > 1 and not player.has_answer()):
                continue
            if player.has_answer():
                player.granted()
            positions[player] = (positions[player] + 1) % len(WAVE)
            player.asks(positions[player])
    assert refused
    assert device(stage, "granted_bytes")[0] <= BUDGET


def test_where_facts_leave_too_little_one_job_at_a_time_goes_on(
    stage: Stage, players: tuple[Player, Player], third: int, wait_until: Wait
) -> None:
    for player in players:
        player.publish(WAVE)
        player.take(0, 1)
    use_device(stage, third, "cuda:0", BUDGET, overhead=500)
    first, second = players
    first.ask(2)
    first.waits()  # both need 100 more, and the other one's group has not ended
    second.ask(2)
    wait_until(lambda: any(player.has_answer() for player in players), 60)
    leader, follower = players if first.has_answer() else players[::-1]
    leader.granted()
    leader.take(3, 4, 5)
    follower.waits()
    leader.ask(REST)
    follower.granted()
    follower.take(3, 4, 5)


# -- breaking the rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (request(1, 2), "it is the turn of another group"),
        (request(1, 6), "it is the turn of another group"),
        (request(1, WHOLE), "its iteration has not ended"),
        (request(1, CONSTANT), "no plan with a constant grant is of that generation"),
        (request(2, CONSTANT), "its iteration has not ended"),
        (request(2, 1), "no plan with groups is of that generation"),
        (request(7, 0), "no plan with groups is of that generation"),
        (request(3, 0), "its iteration has not ended"),
        (request(3, REST), "no plan of that generation is in use"),
        (request(1, -4), "there is no such request"),
        (request(1, 1, 1), "there is no such request"),
        (request(1, 1)[:-1], "another length"),
        (request(1, 1) + b"\0", "another length"),
        (b"", "another length"),
    ],
    ids=[
        *("next but one", "no group", "whole within an iteration", "constant of groups", "constant too early"),
        *("groups of a constant grant", "of no plan", "another plan too early", "rest of another plan", "no code"),
        *("no zero", "too short", "too long", "empty"),
    ],
)
def test_a_request_out_of_order_ends_the_service_for_that_job_alone(
    stage: Stage, players: tuple[Player, Player], message: bytes, problem: str
) -> None:
    first, second = players
    for player in players:
        player.publish(WAVE)
    first.publish([], 10)
    first.publish(WAVE)
    first.take(0)
    first.end.send(message)
    assert problem in first.fault()
    second.take(0, 1)
    assert device(stage, "flowing_bytes")[0] >= 400 + 100, "what it held counts until it is gone"
    first.end.close()
    stage.order(first.job, "SELECT tensile_worker._group_socket(-1)")
    assert device(stage, "flowing_jobs") == (1,)


def test_a_fault_ends_the_wait_of_the_worker(stage: Stage, players: tuple[Player, Player]) -> None:
    bits = stage.wait_bits(players[0].job, lambda: players[0].ask(0, 7))
    assert bits & 128


def test_one_request_at_a_time_but_a_job_may_withdraw_its_own(players: tuple[Player, Player]) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 900))
    first.take(0, 1)
    second.ask(0)
    second.waits()
    second.ask(REST)
    second.ask(0)
    second.waits()
    second.ask(0)
    assert "another request waits" in second.fault()


def test_a_job_with_a_constant_grant_has_nothing_to_ask_for(players: tuple[Player, Player]) -> None:
    first, _ = players
    first.publish([], 500)
    first.ask(CONSTANT)
    assert "its grant is constant" in first.fault()


@pytest.fixture
def impatience(stage: Stage, wait_until: Wait) -> Iterator[None]:
    """A job may hold up another one for a second."""

    def limit(seconds: str) -> None:
        stage.cluster.configure({"pg_tensile.flow_timeout": seconds})
        stage.cluster.reload()
        wait_until(lambda: value(stage.conn, "SHOW pg_tensile.flow_timeout") == seconds)

    limit("1s")
    yield
    limit("30s")


def test_a_job_that_holds_up_another_one_is_late(
    stage: Stage, players: tuple[Player, Player], impatience: None
) -> None:
    first, second = players
    for player in players:
        player.publish(wave(100, 400, 900))
    first.take(0, 1)
    second.ask(0)
    reason = first.fault()
    assert reason.startswith("held memory for ") and f" s that job {second.job} waited for" in reason
    assert first.state()["late"] and not second.state()["late"]
    assert not second.has_answer(), "what it held counts until it is gone"
    stage.order(first.job, "SELECT tensile_worker._group_socket(-1)")
    second.granted()


# -- plans ------------------------------------------------------------------------------------------------------------


def test_groups_travel_with_the_plan_and_show_in_sql(stage: Stage, planned: int) -> None:
    groups = group_rows((300, 200), (250, 100))
    assert stage.order("scheduler", f"SELECT {flow_call(planned, groups, 400)} AS g") == [{"g": 1}]
    fetched = stage.order(
        planned, "SELECT encode(groups, 'hex') AS g, granted_bytes FROM tensile_worker._fetch_plan(0)"
    )
    assert fetched == [{"g": groups.hex(), "granted_bytes": 400}]
    columns = "sequence, event, tensor, trigger_operator, deadline_operator, bytes"
    assert stage.alice.execute(f"SELECT {columns} FROM tensile.plan_events WHERE job = %s", (planned,)).fetchall() == [
        (0, "begin_group", None, 0, 0, 300),
        (1, "end_group", None, 0, 0, 200),
        (2, "begin_group", None, 1, 1, 250),
        (3, "end_group", None, 1, 1, 100),
    ]


NONSENSE = {
    "half": group_rows((1, 1))[:-1],
    "keeps more": group_rows((1, 2)),
    "keeps less than nothing": group_rows((1, -1)),
    "beyond the grant": group_rows((501, 1)),
    "not from 0": group_rows((1, 1), (1, 1))[32:],
    "twice": group_rows((1, 1)) * 2,
    "too many": group_rows(*[(1, 1)] * 65),
}


def test_groups_that_make_no_sense_are_refused(stage: Stage, planned: int) -> None:
    for name, groups in NONSENSE.items():
        assert stage.refusal("scheduler", f"SELECT {flow_call(planned, groups, 500)}") == "22023", name
    stage.order("scheduler", f"SELECT {flow_call(planned, group_rows(*[(1, 1)] * 64), 500)}")


# -- processes --------------------------------------------------------------------------------------------------------


class Theatre:
    """A cluster with real workers, trainers that are memory_flow.py, and a scheduler that publishes for the test."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster, self.wait_until = cluster, wait_until
        self.folder = cluster.folder / "memory_flow"
        self.folder.mkdir()
        shutil.copy(Path(__file__).parent / "memory_flow.py", self.folder)
        script = self.folder / "python"
        script.write_text(f'#!/bin/sh\nexec "{child_python()}" "{self.folder}/memory_flow.py" "{self.folder}"\n')
        script.chmod(0o755)
        shutil.chown(self.folder, cluster.os_user)
        cluster.configure({"pg_tensile.python": script})
        cluster.reload()
        self.conn: Connection = cluster.connect()
        set_the_stage(self.conn, "scheduler")
        restart_processes(cluster, self.conn, wait_until)

    def order(self, sql: str) -> Any:
        insert = "INSERT INTO stage.orders (process, sql) VALUES ('scheduler', %s) RETURNING id"
        number = value(self.conn, insert, sql)
        answer = "SELECT answer FROM stage.orders WHERE id = %s"
        return self.wait_until(lambda: value(self.conn, answer, number), 60, sql)

    def job(self, model: str, *codes: int) -> int:
        """Start a job under a plan with groups that asks for these, one after the other."""
        register(self.conn, model)
        job = int(value(self.conn, "SELECT train_model(%s, 'SELECT 1.0 AS x, 2.0 AS y', 'y')", model))
        traced = "SELECT count(*) FROM tensile.traces WHERE job = %s"
        self.wait_until(lambda: value(self.conn, traced, job), 60, lambda: self.row(job))
        assert self.order(
            f"SELECT {flow_call(job, group_rows(*wave(100, 400, 700)[:3], (400, 400), (400, 100)), 900)} g"
        )
        partial = self.folder / f"{job}.part"
        partial.write_text(" ".join(map(str, codes)))
        partial.rename(self.folder / str(job))
        return job

    def granted(self, job: int, code: int) -> None:
        file = self.folder / f"{job}.granted"
        self.wait_until(lambda: file.exists() and file.read_text() == str(code), 60, lambda: self.row(job))

    def row(self, job: int) -> Any:
        columns = "state, sqlstate, error, reason"
        return self.conn.execute(f"SELECT {columns} FROM tensile.jobs WHERE job = %s", (job,)).fetchone()


@pytest.fixture(scope="module")
def theatre(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Theatre]:
    settings = {"pg_tensile.device_memory": "1kB", "pg_tensile.max_retries": 0, "pg_tensile.flow_timeout": "1s"}
    theatre = Theatre(new_cluster(settings), wait_until)
    yield theatre
    theatre.conn.close()
    theatre.cluster.end()


def test_a_late_trainer_is_killed_and_another_job_goes_on(theatre: Theatre) -> None:
    late = theatre.job("late", 0, 1, 2)
    theatre.granted(late, 2)
    other = theatre.job("other", 0)
    theatre.granted(other, 0)
    state, sqlstate, error, _ = theatre.row(late)
    assert (state, sqlstate) == ("failed", "58000") and "trainer held memory for" in error, error
    assert f"s that job {other} waited for (pg_tensile.flow_timeout)" in error
    theatre.conn.execute("SELECT cancel_job(%s)", (other,))


def test_a_trainer_that_asks_for_nonsense_fails_its_job(theatre: Theatre) -> None:
    job = theatre.job("nonsense", 0, 3)
    theatre.wait_until(lambda: theatre.row(job)[0] == "failed", 60, lambda: theatre.row(job))
    _, sqlstate, error, _ = theatre.row(job)
    assert sqlstate == "08P01" and error.startswith("the trainer broke the protocol: it asked for memory with code 3")
