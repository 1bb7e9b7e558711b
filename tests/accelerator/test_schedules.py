"""Every policy under seeded schedules of the emulated device: bits, races, and what is left behind.

A schedule is one training step, or one prediction, whose kernels and copies are delayed as its seed says, or whose
copies or kernels come as late as possible. Training goes on from step to step, so that a wrong bit stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from itertools import count, islice, product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pg_tensile.errors import BudgetError
from pg_tensile.execution.capture import Captured, capture
from pg_tensile.execution.runtime.accelerator import AcceleratorDevice, make_deterministic
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.training.prediction import Served
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.latency.roofline import estimate
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from tests.accelerator.mutants.job import coded_plan
from tests.accelerator.target import DEVICE, TYPE
from tests.accelerator.test_executor import JOBS, Attention, Convolutions, Recurrent, images, sentences, series

# The jobs with fewer operators, and tensors so small that operators take no time.
BUILD: dict[str, Callable[[], nn.Module]] = {"attention": partial(Attention, 1), "lstm": Recurrent}
BATCH = {"attention": partial(sentences, 2), "lstm": partial(series, 3)}
SMALL = {
    name: job._replace(build=BUILD.get(name, partial(Convolutions, 2)), batch=BATCH.get(name, partial(images, 16, 2)))
    for name, job in JOBS.items()
}
VARIANTS = [*POLICIES, "coded", "changing"]
EXTREMES = [("late_copies", 0), ("late_compute", 0)]
SOME = 3  # schedules of a job, under the plan of the default policy and, for CHANGING, under all plans in turn
CHANGING = ("convolutions",)  # in make test; the others are in the long tests
# For the long test: fewer where a step moves or computes everything, and takes ten times as long.
BUSY = ("swap_all", "recompute_all", "coded", "changing")
MANY = {variant: 22 if variant in BUSY else 114 for variant in VARIANTS}


class Subject(NamedTuple):
    captured: Captured
    model: nn.Module  # on the device, never trained
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    plan: Callable[[str], Plan]  # by policy, or "coded"; made once


@pytest.fixture(scope="module")
def subject():
    """Captures a job once, and plans it once under each policy."""
    make_deterministic(TYPE, strict=True)
    subjects: dict[str, Subject] = {}

    def made(name: str) -> Subject:
        if name not in subjects:
            job = SMALL[name]
            torch.manual_seed(0)
            model = job.build().to(DEVICE)
            batches = [job.batch() for _ in range(5)]
            captured = capture(model, batches[0][:1], batches[0][1:], job.spec)
            subjects[name] = Subject(captured, model, batches, cache(partial(planned, trace=captured.trace)))
        return subjects[name]

    return made


def planned(policy: str, trace: Trace) -> Plan:
    """Return the plan for the smallest of some budgets for which the policy has one; "coded" has one by hand."""
    if policy == "coded":
        return coded_plan(trace)
    trace = trace.with_latencies(estimate(trace, A100_40GB))
    whole = footprint(trace, NO_EVENTS).device_peak_bytes
    for tenths in (7, 8, 9):
        try:
            return POLICIES[policy]({0: trace}, A100_40GB, whole * tenths // 10)[0]
        except BudgetError:
            continue
    return POLICIES[policy]({0: trace}, A100_40GB, whole)[0]


@pytest.fixture(autouse=True)
def quick_reports(control: Any) -> Iterator[None]:
    """Reports without Python's stack, which costs time with every operator."""
    control.stacks(False)
    yield
    control.stacks(True)


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]  # weights, buffers and the optimizer's, on the CPU


def train(
    subject: Subject, device: AcceleratorDevice, variant: str, schedules: list[tuple[str, int]], control: Any
) -> Trained:
    """Take a step under each schedule, after one that the executor verifies. "changing" has another plan at each."""
    names = [*POLICIES, "coded"]
    Random(len(schedules)).shuffle(names)
    torch.manual_seed(1)
    plan = subject.plan(variant) if variant in names else NO_EVENTS
    model = copy.deepcopy(subject.model)
    losses = []
    with closing(Executor(subject.captured, model, device, plan)) as executor:
        for number, schedule in enumerate([("eager", 0), *schedules]):
            control.schedule(*schedule)
            if variant == "changing":
                executor.change_plan(subject.plan(names[number % len(names)]))
            x, y = subject.batches[number % len(subject.batches)]
            losses.append(executor.step([x], [y]).loss)
        control.schedule("late_copies", 0)
        state = executor.state_dict()
        optimizer = {f"{name}, {key}": own[key] for name, own in state.optimizer.items() for key in own}
        return Trained(torch.stack(losses).tolist(), state.model | optimizer)


@pytest.fixture(scope="module")
def expected(subject):
    """What training gives without any plan and without delays, by job and number of steps."""
    found: dict[tuple[str, int], Trained] = {}

    def trained(name: str, steps: int, control: Any) -> Trained:
        if (name, steps) not in found:
            with closing(AcceleratorDevice(DEVICE, profile=A100_40GB, strict=True)) as device:
                found[name, steps] = train(subject(name), device, "none", [("eager", 0)] * steps, control)
        return found[name, steps]

    return trained


def schedules_of(name: str, variant: str) -> Iterator[tuple[str, int]]:
    """Yield schedules without end, other seeds for each job and variant."""
    yield from EXTREMES
    first = (list(SMALL).index(name) * len(VARIANTS) + VARIANTS.index(variant)) * 1000
    yield from (("random", seed) for seed in count(first))


def check(name: str, variant: str, steps: int, subject: Any, expected: Any, device: Any, control: Any) -> None:
    """Train under that many schedules and compare; the fixture `checked` finds races."""
    from tests.accelerator.leftovers import leftovers  # which registers the device

    reference, job, before = expected(name, steps, control), subject(name), leftovers()
    schedules = list(islice(schedules_of(name, variant), steps))
    found = train(job, device, variant, schedules, control)
    differs = (one != other for one, other in zip(found.losses, reference.losses, strict=True))
    wrong = next(
        (schedule for schedule, differ in zip([("eager", 0), *schedules], differs, strict=True) if differ), None
    )
    assert wrong is None, f"the loss is another one from {wrong} on"
    assert found.state.keys() == reference.state.keys()
    for key, each in reference.state.items():
        assert torch.equal(found.state[key], each), key
    device.close()
    assert leftovers() == before


@pytest.mark.parametrize(("name", "variant"), [*product(SMALL, ["joint"]), *product(CHANGING, ["changing"])])
def test_a_policy_under_some_schedules(device, control, subject, expected, name, variant):
    check(name, variant, SOME, subject, expected, device, control)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SMALL)
def test_a_policy_under_many_schedules(device, control, subject, expected, name, variant):
    """Long: 5,000 schedules in all."""
    assert sum(MANY.values()) * len(SMALL) == 5_000
    check(name, variant, MANY[variant], subject, expected, device, control)


@pytest.mark.parametrize("schedules", [24, pytest.param(500, marks=pytest.mark.long)])
def test_predictions_under_schedules(control, schedules):
    """Weights that come from the host for each prediction; long for the number of schedules."""
    from tests.accelerator.leftovers import leftovers

    make_deterministic(TYPE)
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).eval()
    rows = torch.randn(4, 64)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(DEVICE)(rows.to(DEVICE)).cpu()
    before = leftovers()
    budget = sum(parameter.nbytes for parameter in model.parameters()) // 2
    with (
        closing(AcceleratorDevice(DEVICE, A100_40GB, budget)) as device,
        closing(Served(model, [rows], device, 4)) as served,
    ):
        served.predict([rows])
        for kind, seed in islice([*EXTREMES, *(("random", seed) for seed in range(schedules))], schedules):
            control.schedule(kind, seed)
            assert torch.equal(served.predict([rows]), expected), (kind, seed)
    assert leftovers() == before
