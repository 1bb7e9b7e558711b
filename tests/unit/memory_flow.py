"""Executors in threads of one process whose memory flows between them, and what all of them take together."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.together.arbiter import Arbiter
from pg_tensile.execution.capture import Captured
from pg_tensile.execution.runtime import executor as executors
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.memory_flow import GroupSocket, claimed
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.plan import Plan
from tests.unit.executing import FAST


class FlowJob(NamedTuple):
    """A job whose memory flows: its model has no random operators, because threads share the random numbers."""

    captured: Captured
    model: Callable[[], nn.Module]
    plan: Plan
    groups: Sequence[Group]
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]


@dataclass
class FlowResult:
    """Results of jobs that ran together."""

    losses: list[list[Tensor]] = field(default_factory=list)  # by job
    most_bytes: int = 0  # in all registries together, at any operator
    asked: list[tuple[int, int]] = field(default_factory=list)  # job and request, in order
    overlapped: bool = False  # a job has begun a group while another one stood within an iteration


class Sum:
    """The bytes in all registries together."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = 0


def counted(total: Sum) -> type[Registry]:
    """Return registries that add what they have to `total` whenever it changes."""

    class Counted(Registry):
        _own = 0

        @property
        def in_use(self) -> int:
            return self._own

        @in_use.setter
        def in_use(self, size: int) -> None:
            with total.lock:
                total.now += size - self._own
                total.most = max(total.most, total.now)
                self._own = size

    return Counted


class Watched(Arbiter):
    """An arbiter that records what is asked."""

    def __init__(self, budget_bytes: int, sockets: dict[int, socket.socket], groups: dict[int, Sequence[Group]]):
        super().__init__(budget_bytes, sockets, groups)
        self.flow = FlowResult()

    def _receive(self, job: int, generation: int, request: int) -> None:
        self.flow.asked.append((job, request))
        super()._receive(job, generation, request)

    def _try(self, job: int) -> None:
        super()._try(job)
        begun = [number for number, other in self._grants.jobs.items() if other.begun and number not in self._waiting]
        within = [number for number, other in self._grants.jobs.items() if other.position > 0]
        self.flow.overlapped |= any(set(begun) - {number} for number in within)


def train(executor: Executor, job: FlowJob, steps: int) -> list[Tensor]:
    return [executor.step(job.inputs, job.targets).loss.clone() for _ in range(steps)]


def alone(job: FlowJob, steps: int) -> list[Tensor]:
    """Return the losses of a run without groups."""
    device = HostDevice(FAST)
    with Executor(job.captured, job.model(), device, job.plan) as executor:
        losses = train(executor, job, steps)
    device.close()
    return losses


def run_together(jobs: Sequence[FlowJob], budget_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> FlowResult:
    """Run the jobs in threads at once, each for `steps` steps, with memory that flows within the budget."""
    total = Sum()
    monkeypatch.setattr(executors, "Registry", counted(total))
    failures: list[BaseException] = []
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in jobs]
        for ours, _ in pairs:
            stack.enter_context(ours)
        sockets = {number: ours for number, (ours, _) in enumerate(pairs)}
        arbiter = Watched(budget_bytes, sockets, {number: job.groups for number, job in enumerate(jobs)})
        stack.enter_context(arbiter)
        flow = arbiter.flow
        flow.losses = [[] for _ in jobs]

        def run(number: int) -> None:
            torch.set_num_threads(1)
            job, theirs = jobs[number], pairs[number][1]
            device = HostDevice(FAST, max(group.most_bytes for group in job.groups))
            try:
                with theirs:
                    requests = GroupSocket(theirs)
                    with claimed(requests, job.plan.generation, True):
                        executor = Executor(
                            job.captured, job.model(), device, job.plan, groups=job.groups, requests=requests
                        )
                    with executor:
                        flow.losses[number] = train(executor, job, steps)
            except BaseException as failure:
                failures.append(failure)
            finally:
                device.close()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures
    flow.most_bytes = total.most
    return flow
