"""The server's grants (csrc/state/banker.c) are those of grants.py, and go on where nothing is safe any more."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pg_tensile.planning.memory_flow.grants import OVERTAKEN, Grants, GroupedJob
from pg_tensile.planning.memory_flow.groups import MOST_GROUPS, Group
from tests.repository import REPOSITORY
from tests.unit.planning.memory_flow.test_grants import groups, wave

GROUP, WHOLE, CONSTANT = range(3)


class Flow(ctypes.Structure):
    """TensileFlow of csrc/state/banker.h."""

    _fields_ = (
        *(("ngroups", ctypes.c_int32), ("position", ctypes.c_int32)),
        *((name, ctypes.c_bool) for name in ("joined", "running", "whole", "waiting")),
        *(("overtaken", ctypes.c_int32), ("claim", ctypes.c_int)),
        *((name, ctypes.c_int64) for name in ("claim_bytes", "kept_bytes", "whole_bytes")),
        *((name, ctypes.c_int64 * MOST_GROUPS) for name in ("most_bytes", "rest_bytes", "needed_bytes")),
    )


class Bank:
    """Jobs within a budget, as the server has them in shared memory."""

    def __init__(self, library: ctypes.CDLL, budget: int) -> None:
        self._library = library
        self.budget = self.new_budget = budget
        self.flows: dict[int, Flow] = {}

    def _call(self, name: str, number: int | None = None, *budgets: int) -> int:
        flows = (ctypes.POINTER(Flow) * len(self.flows))(*map(ctypes.pointer, self.flows.values()))
        job = () if number is None else (ctypes.byref(self.flows[number]),)
        return int(
            getattr(self._library, f"tensile_banker_{name}")(flows, len(flows), *job, *map(ctypes.c_int64, budgets))
        )

    def add(self, number: int, job: Sequence[Group], whole: int | None = None, kept: int = 0) -> None:
        flow = self.flows[number] = Flow(ngroups=len(job), kept_bytes=kept)
        for n, group in enumerate(job):
            flow.most_bytes[n], flow.rest_bytes[n] = group.most_bytes, group.rest_bytes
        largest = max(group.most_bytes for group in job)
        self._library.tensile_banker_prepare(ctypes.byref(flow), ctypes.c_int64(largest if whole is None else whole))

    def join(self, number: int, job: Sequence[Group]) -> bool:
        self.add(number, job)
        joined = bool(self._call("join", number, self.new_budget))
        if not joined:
            del self.flows[number]
        return joined

    def begin(self, number: int, claim: int = GROUP) -> bool:
        self.flows[number].claim = claim
        return bool(self._call("begin", number, self.budget, self.new_budget))

    def end(self, number: int) -> None:
        self._library.tensile_banker_end(ctypes.byref(self.flows[number]))

    def rest(self, number: int) -> None:
        self._library.tensile_banker_rest(ctypes.byref(self.flows[number]))

    def may_leave(self, number: int, size: int) -> bool:
        self.flows[number].claim, self.flows[number].claim_bytes = CONSTANT, size
        return bool(self._call("may_leave", number, self.new_budget))

    def held(self) -> int:
        return sum(self._library.tensile_banker_held(ctypes.byref(flow)) for flow in self.flows.values())

    def safe_bytes(self) -> int:
        return self._call("safe_bytes")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("banker") / "banker.so"
    sources = REPOSITORY / "pg_tensile" / "csrc"
    source = sources / "state" / "banker.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", f"-I{sources}", "-o", target, source], check=True)
    loaded = ctypes.CDLL(str(Path(target)))
    for name in ("join", "begin", "may_leave", "could_go"):
        getattr(loaded, f"tensile_banker_{name}").restype = ctypes.c_bool
    for name in ("held", "fit_bytes", "safe_bytes"):
        getattr(loaded, f"tensile_banker_{name}").restype = ctypes.c_int64
    return loaded


def random_job(random: Random) -> list[Group]:
    most = [random.randint(1, 100) for _ in range(random.randint(1, 12))]
    following = most[1:] + most[:1]
    return groups(*((size, random.randint(0, min(size, after))) for size, after in zip(most, following, strict=True)))


def compare(bank: Bank, grants: Grants, random: Random, jobs: dict[int, list[Group]], turns: int) -> int:
    """Ask both for the same; return how often a job had to wait because another one was overtaken."""
    overtaken = 0
    favourites = random.sample(sorted(jobs), k=random.randint(1, len(jobs)))  # others ask seldom
    for _ in range(turns):
        number = random.choice(favourites if random.random() < 0.9 else sorted(jobs))
        if number not in grants.jobs:
            assert bank.join(number, jobs[number]) == grants.join(number, jobs[number])
        elif grants.jobs[number].running:
            bank.end(number)
            grants.end(number)
        elif random.random() < 0.002:
            del bank.flows[number]
            grants.leave(number)
        else:
            overtaken += grants.jobs[number].waiting is not None and grants._is_overtaken(grants.jobs[number])
            assert bank.begin(number) == grants.begin(number)
        assert list(bank.flows) == list(grants.jobs) and bank.held() == grants.held_bytes() <= grants.budget_bytes
    return overtaken


def test_both_answer_the_same_requests_alike(library: ctypes.CDLL) -> None:
    overtaken = 0
    for seed in range(120):
        random = Random(seed)
        budget = random.randint(50, 400)
        jobs = {number: random_job(random) for number in range(random.randint(1, 6))}
        overtaken += compare(Bank(library, budget), Grants(budget), random, jobs, 600)
    assert overtaken > 100, "the rule about overtaken jobs was tried"


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(25), id="few"), pytest.param(range(25, 100), marks=pytest.mark.long, id="many")]
)
def test_all_end_an_iteration_wherever_they_are_when_there_is_less_memory(library: ctypes.CDLL, seeds: range) -> None:
    """An overhead is a fact: what is left may be less than what the jobs hold. Long for the many seeds."""
    unsafe = 0
    for seed in seeds:
        random = Random(seed)
        bank = Bank(library, random.randint(120, 400))
        jobs = {number: random_job(random) for number in range(random.randint(1, 5))}
        joined = [number for number in jobs if bank.join(number, jobs[number])]
        for _ in range(random.randint(0, 40)):
            number = random.choice(joined)
            if bank.flows[number].running:
                bank.end(number)
            else:
                bank.begin(number)
        bank.budget = bank.new_budget = random.randint(0, 100)
        unsafe += bank.safe_bytes() > bank.budget
        iterations = dict.fromkeys(joined, 0)
        for _ in range(len(joined) * 12 * 4 * OVERTAKEN):
            number = random.choice(joined)
            flow = bank.flows[number]
            if flow.running:
                bank.end(number)
                iterations[number] += flow.position == 0
            else:
                held = bank.held()
                if bank.begin(number) and held > bank.budget:
                    assert sum(other.running for other in bank.flows.values()) == 1, "one at a time"
        assert all(iterations.values()), iterations
    assert unsafe > len(seeds) // 4


def test_a_whole_iteration_takes_all_that_the_job_may(library: ctypes.CDLL) -> None:
    bank = Bank(library, 100)
    for number in (0, 1):
        bank.add(number, wave(60, 3, base=10), whole=90)
        assert bank._call("join", number, 100)
    assert bank.begin(0, WHOLE) and bank.held() == 100
    assert not bank.begin(1) and not bank.begin(1, WHOLE)
    bank.end(0)
    assert bank.held() == 20 and bank.begin(1)
    assert not bank.begin(0, WHOLE), "job 1 could not end its iteration"
    bank.rest(1)
    assert bank.begin(0, WHOLE)


def test_of_jobs_that_take_memory_back_the_one_that_leaves_the_most_ends_last(library: ctypes.CDLL) -> None:
    """Both hold nothing. One takes 12 bytes and keeps 2, the other takes 3 and keeps them: 15 the other way round."""
    bank, grants = Bank(library, 100), Grants(100)
    for number, job in enumerate((groups((12, 0), (12, 2)), groups((3, 0), (3, 3)))):
        assert bank.join(number, job) and grants.join(number, job)
        assert bank.begin(number) and grants.begin(number)
        bank.end(number)
        grants.end(number)
    assert bank.held() == grants.held_bytes() == 0 and bank.safe_bytes() == 12
    for grants.budget_bytes in (11, 12):
        assert grants._is_safe(list(grants.jobs.values())) == (grants.budget_bytes == 12)


def test_a_constant_grant_has_to_leave_the_others_what_they_need(library: ctypes.CDLL) -> None:
    bank = Bank(library, 100)
    for number in (0, 1):
        assert bank.join(number, wave(60, 3, base=10))
    assert not bank.may_leave(0, 31), "the other one takes 70"
    assert bank.may_leave(0, 30)
    bank.begin(1)
    assert bank.may_leave(0, 30)
    del bank.flows[1]
    assert bank.may_leave(0, 70)
    bank.new_budget = 20
    assert bank.may_leave(0, 70), "alone it goes on, as it could before"
    assert not bank.may_leave(0, 71)


def test_one_that_cannot_go_on_at_all_holds_up_nobody(library: ctypes.CDLL) -> None:
    """A job that waits for a constant grant of others is passed over for ever, one that waits for these is not."""
    for size, blocks in ((90, False), (30, True)):
        bank = Bank(library, 100)
        for number in (0, 1):
            assert bank.join(number, wave(60, 3, base=10))
        flow = bank.flows[0]
        flow.claim, flow.claim_bytes, flow.waiting, flow.overtaken = CONSTANT, size, True, OVERTAKEN
        assert bank.begin(1) is not blocks


def test_a_job_that_has_not_joined_keeps_what_it_has(library: ctypes.CDLL) -> None:
    bank = Bank(library, 100)
    assert bank.join(0, wave(60, 3, base=10))
    bank.add(1, wave(80, 4, base=20), kept=20)
    assert not bank._call("join", 1, 100) and bank.held() == 30, "its 100 do not fit beside the other's 10"
    assert bank.begin(0) and bank.held() == 10 + 20 + 20


def test_a_constant_grant_waits_until_what_others_hold_is_safe(library: ctypes.CDLL) -> None:
    """New iterations are held to the smaller budget, those that have begun are not."""
    bank = Bank(library, 100)
    for number in (0, 1):
        assert bank.join(number, wave(40, 2, base=10))
    assert bank.begin(0)
    bank.new_budget = bank._call("fit_bytes")
    assert bank.new_budget == 60
    assert not bank.begin(1)
    bank.end(0)
    assert bank.begin(0)


def test_the_model_of_a_flow_is_that_of_the_server(library: ctypes.CDLL) -> None:
    """Between two groups, in one, and whole."""
    job: Any = GroupedJob(wave(60, 3, base=10))
    bank = Bank(library, 100)
    assert bank.join(0, job.groups) and bank.held() == job.held_bytes == job.least_bytes
