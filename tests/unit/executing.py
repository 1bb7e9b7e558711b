"""A small model with the features that executors must handle, and helpers that execute it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.record import IterationRecord
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace

FAST = replace(RTX_A6000, kind="host", transfer_latency_us=0.0)
SIMPLE = ("none", "swap_all", "recompute_all")


def plan_of(policy: str, trace: Trace) -> Plan:
    return POLICIES[policy]({0: trace}, FAST, None)[0]


class Net(nn.Module):
    """Convolution, batch norm, an in-place operator, dropout, a linear layer, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(6 * 9, 10)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)
        return self.head(self.dropout(x.flatten(1)))


SPEC = StepSpec(F.cross_entropy, OptimizerSpec("adamw", 1e-2), returns_outputs=True)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int = 0, size: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return [x], [torch.randint(0, 10, (size,), generator=generator)]


@cache
def captured_net(size: int = 4) -> Captured:
    return capture(net(), *batch(size=size), SPEC)


@contextmanager
def starting() -> Iterator[Callable[..., Executor]]:
    """Yield a function that makes executors of Net; they are closed afterwards."""
    closing: list[Executor | HostDevice] = []

    def make(policy: str | Plan = "none", budget: int | None = None, model=None, device=None, **options) -> Executor:
        captured = captured_net()
        plan = plan_of(policy, captured.trace) if isinstance(policy, str) else policy
        device = device or HostDevice(FAST, budget)
        executor = Executor(captured, model or net(), device, plan, **options)
        closing.extend((device, executor))
        return executor

    yield make
    for closable in reversed(closing):
        closable.close()


def eager(steps: int, seed: int = 1) -> tuple[EagerStep, list[Tensor]]:
    reference = EagerStep(net(), SPEC)
    torch.manual_seed(seed)
    return reference, [reference.step(*batch(number)).loss.clone() for number in range(steps)]


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="asking")
    thread.start()
    return thread


@contextmanager
def opened(budget: int | None = None) -> Iterator[HostDevice]:
    with closing(HostDevice(FAST, budget)) as device:
        yield device


@cache
def validation_net(size: int = 5) -> Captured:
    return capture_evaluation(net(), *batch(size=size), SPEC)


def peak_of(captured: Captured, plan: Plan) -> int:
    return footprint(captured.trace, plan).device_peak_bytes


def peak(policy: str) -> int:
    """Peak device memory of Net's training step under a policy's plan."""
    return peak_of(captured_net(), plan_of(policy, captured_net().trace))


def change(executor: Executor, policy: str, budget: int | None = None) -> None:
    executor.change_plan(plan_of(policy, captured_net().trace), budget_bytes=budget)


def fail_at(graph: Graph, step: int, error: BaseException) -> None:
    """The work of a step of the graph's next iteration raises, once."""
    program, original = graph.program, graph.program.instructions
    index = next(i for i, each in enumerate(original) if each.work is not None and each.step == step)

    def fail(values: list[Tensor]) -> None:
        program.instructions = original
        raise error

    broken = original[index]._replace(work=program.work(step)._replace(function=fail))
    program.instructions = (*original[:index], broken, *original[index + 1 :])


class EagerJob:
    """Training and evaluation of Net by PyTorch: what an executor with these graphs must compute."""

    def __init__(self) -> None:
        self.training = EagerStep(net(), SPEC)

    def step(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        self.training.model.train()
        return self.training.step(x, y).loss

    def evaluate(self, x: list[Tensor], y: list[Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            output = self.training.model.eval()(*x)
            return SPEC.loss(output, *y), output

    def state(self) -> dict[str, Tensor]:
        return self.training.model.state_dict()


def run(executor: Executor, steps: int, seed: int = 1, first: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [executor.step(*batch(number)).loss for number in range(first, first + steps)]


def recorded(executor: Executor) -> IterationRecord:
    assert executor.record is not None
    return executor.record


def same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
