"""Memory that flows between executors: both together keep within the budget at every operator, with the bits of a run
alone."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import InvalidPlanError, OutOfDeviceMemoryError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.memory_flow import CONSTANT, REPLY, REQUEST, REST, WHOLE, GroupSocket, claimed
from pg_tensile.execution.runtime.program import BEGIN_GROUP
from pg_tensile.planning.memory_flow.groups import Group, groups_of, resting_bytes, step_bytes
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from tests.examples import examples
from tests.unit.executing import FAST, plan_of
from tests.unit.graphs import dice
from tests.unit.memory_flow import FlowJob, alone, run_together

SPEC = StepSpec(F.cross_entropy, OptimizerSpec("adamw", 1e-3), returns_outputs=True)
PATIENCE_S = 120.0  # of a test, not a measure of speed


def tower(layers: int = 6, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10))


def batch(rows: int = 512, width: int = 64) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, width, generator=generator)], [torch.randint(0, 10, (rows,), generator=generator)]


@cache
def captured_tower(rows: int = 512) -> Captured:
    return capture(tower(), *batch(rows), SPEC, early_update=True)


def groups_of_plan(captured: Captured, plan: Plan = NO_EVENTS, count: int = 8) -> list[Group]:
    sequence = AccessSequence(captured.trace, plan)
    return groups_of(sequence, math.ceil(int(np.ptp(step_bytes(sequence))) / count))


def most_of(groups: Sequence[Group]) -> int:
    return max(group.most_bytes for group in groups)


@pytest.mark.parametrize("policy", ["none", "swap_all", "recompute_all"])
def test_two_executors_interlock_within_the_budget(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes more than half; one has another batch size, so that the two do not keep step."""
    sizes, steps = (512, 448), 12
    jobs = []
    for rows in sizes:
        captured = captured_tower(rows)
        plan = plan_of(policy, captured.trace)
        jobs.append(FlowJob(captured, tower, plan, groups_of_plan(captured, plan), *batch(rows)))
    most = [most_of(job.groups) for job in jobs]
    kept = [job.groups[-1].rest_bytes for job in jobs]
    budget = int(1.02 * max(most[0] + kept[1], most[1] + kept[0]))
    assert max(most) < budget < sum(most)
    expected = [alone(job, steps) for job in jobs]
    flow = run_together(jobs, budget, steps, monkeypatch)
    assert flow.most_bytes <= budget
    for job, own in enumerate(expected):
        assert all(torch.equal(*pair) for pair in zip(flow.losses[job], own, strict=True))
        # Of all iterations, only the first one, which is verified, is asked for as a whole.
        asked = [request for number, request in flow.asked if number == job and request not in (WHOLE, REST)]
        assert asked == list(range(len(jobs[job].groups))) * (steps - 1)


@given(random=dice())
@examples(10)
def test_groups_begin_before_memory_is_taken_for_their_steps(random: Random) -> None:
    """In a program, everything that a group's steps need is taken after the group begins, and what a job keeps between
    two groups is what the planner says."""
    captured = captured_tower()
    plan = plan_of(random.choice(("none", "swap_all", "recompute_all")), captured.trace)
    groups = groups_of_plan(captured, plan, random.randint(1, 20))
    sequence = AccessSequence(captured.trace, plan)
    resting, sizes = resting_bytes(sequence), captured.trace.tensor_bytes
    device = HostDevice(FAST)
    with Executor(captured, tower(), device, plan, groups=groups) as executor:
        program = executor.graphs[0].program
        held = set(sequence.boundary.device)
        begun, step = -1, -1
        for instruction in program.instructions:
            if instruction.code == BEGIN_GROUP:
                begun += 1
                assert (instruction.tensor, groups[begun].first) == (begun, step + 1)
                if begun:
                    assert sum(sizes[t] for t in held) == resting[step] == groups[begun - 1].rest_bytes
            elif instruction.code == ActionKind.RUN:
                step = instruction.step
                assert groups[begun].first <= step <= groups[begun].last
                assert instruction.work is not None
                held |= instruction.work.created.keys()
            elif instruction.code in (ActionKind.FREE, ActionKind.WAIT_OUT):
                held.discard(instruction.tensor)
            elif instruction.code in (ActionKind.COPY_IN, ActionKind.PASSIVE_IN):
                held.add(instruction.tensor)
            if begun >= 0:
                assert sum(sizes[t] for t in held) <= groups[begun].most_bytes
        assert begun == len(groups) - 1
    device.close()


class Log:
    """Requests that are granted at once, and recorded."""

    def __init__(self) -> None:
        self.flows = False
        self.asked: list[tuple[int, int]] = []

    def ask(self, generation: int, request: int) -> None:
        self.asked.append((generation, request))
        self.flows = request != CONSTANT

    def rest(self, generation: int) -> None:
        self.asked.append((generation, REST))

    def take(self) -> list[tuple[int, int]]:
        asked, self.asked = self.asked, []
        return asked


def with_generation(plan: Plan, generation: int) -> Plan:
    return Plan.from_rows(plan.rows.tobytes(), generation, plan.order_bytes)


@pytest.fixture
def flowing() -> Iterator[tuple[Executor, Log, list[Group]]]:
    """An executor with groups that has made its first iteration."""
    captured, log = captured_tower(), Log()
    groups = groups_of_plan(captured)
    device = HostDevice(FAST, most_of(groups))
    plan = with_generation(NO_EVENTS, 1)
    with Executor(captured, tower(), device, plan, groups=groups, requests=log) as executor:
        executor.step(*batch())
        assert log.take() == [(1, WHOLE), (1, REST)]
        yield executor, log, groups
    device.close()


def in_groups(generation: int, groups: list[Group]) -> list[tuple[int, int]]:
    return [*((generation, number) for number in range(len(groups))), (generation, REST)]


def test_another_graph_is_asked_for_as_a_whole(flowing: tuple[Executor, Log, list[Group]]) -> None:
    executor, log, groups = flowing
    smaller = executor.add(captured_tower(448))
    evaluation = executor.add(capture_evaluation(tower(), *batch(64), SPEC))
    for graph, rows in ((smaller, 448), (smaller, 448)):
        executor.step(*batch(rows), graph=graph)
        assert log.take() == [(1, WHOLE), (1, REST)]
    executor.evaluate(*batch(64), graph=evaluation)
    assert log.take() == [(1, WHOLE), (1, REST)]
    executor.step(*batch())
    assert log.take() == in_groups(1, groups)


def test_a_plan_without_groups_is_a_constant_grant_and_back(flowing: tuple[Executor, Log, list[Group]]) -> None:
    executor, log, groups = flowing
    executor.change_plan(with_generation(NO_EVENTS, 2))
    executor.step(*batch())
    assert log.take() == [(2, CONSTANT)]
    executor.step(*batch())
    assert log.take() == []
    executor.change_plan(with_generation(NO_EVENTS, 3), groups=groups)
    executor.step(*batch())
    assert log.take() == in_groups(3, groups)


def test_a_changed_plan_begins_with_a_whole_iteration_if_tensors_have_to_move(
    flowing: tuple[Executor, Log, list[Group]],
) -> None:
    executor, log, groups = flowing
    captured = captured_tower()
    swapping = with_generation(plan_of("swap_all", captured.trace), 2)
    swapped_groups = groups_of_plan(captured, swapping)
    executor.change_plan(swapping, groups=swapped_groups)
    executor.step(*batch())
    assert log.take() == in_groups(2, swapped_groups)  # it only had to copy out, before
    executor.change_plan(with_generation(NO_EVENTS, 3), groups=groups)
    executor.step(*batch())
    assert log.take() == [(3, WHOLE), (3, REST)]
    executor.step(*batch())
    assert log.take() == in_groups(3, groups)


def test_a_failed_iteration_gives_its_memory_back(flowing: tuple[Executor, Log, list[Group]]) -> None:
    executor, log, groups = flowing

    class Refusing(Exception):
        pass

    ask, state = log.ask, executor.state_dict()

    def refuse(generation: int, request: int) -> None:
        if request == 2:
            raise Refusing
        ask(generation, request)

    log.ask = refuse  # type: ignore[method-assign]
    with pytest.raises(Refusing):
        executor.step(*batch())
    assert log.take() == [(1, 0), (1, 1), (1, REST)]
    assert executor.device_bytes <= groups[-1].rest_bytes
    del log.ask
    executor.load_state_dict(state)  # statistics of batch normalisation have changed before group 2
    executor.step(*batch())
    assert log.take() == in_groups(1, groups)


def test_a_group_takes_no_more_than_it_was_granted(flowing: tuple[Executor, Log, list[Group]]) -> None:
    """The limit is still that of a group when the next one is asked for, and that of the executor in the end."""
    executor, log, groups = flowing
    registry, ask = executor._registry, log.ask
    limits: list[float] = []

    def watch(generation: int, request: int) -> None:
        limits.append(registry.limit)
        ask(generation, request)

    log.ask = watch  # type: ignore[method-assign]
    executor.step(*batch())
    most = most_of(groups)
    assert [*limits, registry.limit] == [most, *(group.most_bytes for group in groups[:-1]), most]
    assert len({group.most_bytes for group in groups}) > 2


def test_groups_that_are_too_small_are_refused_before_anything_is_asked() -> None:
    captured, log = captured_tower(), Log()
    groups = groups_of_plan(captured)
    groups[3] = groups[3]._replace(most_bytes=groups[3].most_bytes - 1)
    device = HostDevice(FAST, most_of(groups))
    with Executor(captured, tower(), device, groups=groups, requests=log) as executor:
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            executor.step(*batch())
        assert caught.value.budget == groups[3].most_bytes
    assert log.take() == []
    device.close()


def test_groups_of_another_iteration_are_refused() -> None:
    device = HostDevice(FAST)
    with pytest.raises(InvalidPlanError, match="its groups have"):
        Executor(captured_tower(), tower(), device, groups=groups_of_plan(captured_tower())[:-1], requests=Log())
    device.close()


# ---- the socket ----


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_request_waits_for_its_grant(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    alive = threading.Event()
    requests = GroupSocket(theirs, alive.set)
    thread = threading.Thread(target=requests.ask, args=(7, 3))
    thread.start()
    assert REQUEST.unpack(ours.recv(100)) == (7, 3, 0)
    assert alive.wait(PATIENCE_S) and thread.is_alive()
    ours.send(REPLY.pack(7))
    thread.join()
    assert requests.flows
    requests.rest(7)
    assert REQUEST.unpack(ours.recv(100)) == (7, REST, 0)


def test_work_between_iterations_is_claimed(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    requests = GroupSocket(theirs)
    with claimed(requests, 1, flows=False):
        pass  # a constant grant that was never anything else
    ours.send(REPLY.pack(2))
    with claimed(requests, 2, flows=True):
        assert REQUEST.unpack(ours.recv(100)) == (2, WHOLE, 0)
    assert REQUEST.unpack(ours.recv(100)) == (2, REST, 0)
    ours.send(REPLY.pack(3))
    with claimed(requests, 3, flows=False):
        assert REQUEST.unpack(ours.recv(100)) == (3, CONSTANT, 0)
    assert not requests.flows
    ours.close()
    with pytest.raises(EOFError), claimed(requests, 4, flows=True):
        pass
    assert not requests.flows


def test_the_end_of_the_other_side_ends_a_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    requests = GroupSocket(theirs)
    closing = threading.Thread(target=close_after_a_request, args=(ours,))
    closing.start()
    with pytest.raises(EOFError):
        requests.ask(1, 0)
    closing.join()


def close_after_a_request(ours: socket.socket) -> None:
    ours.recv(100)
    ours.close()
