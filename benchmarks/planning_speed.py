"""Speed of planning: serialising, validating and analysing traces of 1k, 10k and 100k operators, and policies.

The traces are residual networks, layer by layer: convolution, batch norm with running statistics, an in-place ReLU and
an in-place sum; their backward operators; one fused Adam update for each parameter. The plans swap a third of the
activations, recompute a third, and keep the optimizer's state on the host between updates (cyclic swaps): an event for
every other operator. Policies plan for half of the memory. Every number is the median of several rounds in which
nothing is cached (a fresh trace each).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan import memory
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

SIZES = (1_000, 10_000, 100_000)
ROUNDS = 7
LAYER_OPERATORS = 10  # of all phases
READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE


class Measurement(NamedTuple):
    """Medians in milliseconds for one size."""

    operators: int
    accesses: int
    events: int
    trace_bytes: int
    serialise_ms: float
    read_ms: float
    validate_none_ms: float
    validate_ms: float
    footprint_ms: float
    actions_ms: float
    host_arena_ms: float
    simulate_ms: float


class Layer(NamedTuple):
    """Tensors of one layer of `build`, and the operators around which a plan moves them."""

    convolved: int
    activation: int  # two writers: batch norm creates it, ReLU changes it
    normalised: int  # the operator
    last_forward: int
    first_backward: int
    states: tuple[int, int]  # Adam's moments of the weight
    update: int


class Builder:
    """Collector of operators and tensors."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.tensors: list[Tensor] = []
        self.noise = Random(0)  # no two measured latencies are equal

    def tensor(self, kind: Kind, shape: tuple[int, ...], name: str = "") -> int:
        self.tensors.append(Tensor(4 * int(np.prod(shape)), kind, name, "f32", shape))
        return len(self.tensors) - 1

    def operator(self, target: str, phase: Phase, *accesses: tuple[int, Mode], module: str = "") -> int:
        shapes = [f"f32{list(self.tensors[tensor].shape)}" for tensor, _ in accesses]
        signature = ", ".join([*shapes, "None", "[1, 1]", "[0, 0]", "False", str(len(self.operators) % 89 / 89)])
        size = sum(self.tensors[tensor].bytes for tensor, _ in accesses)
        listed = tuple(Access(tensor, mode) for tensor, mode in accesses)
        source = f"model.py:{len(self.operators)}" if module else ""
        time_us = (3.0 + size / 600e3) * self.noise.lognormvariate(0, 0.3)
        self.operators.append(
            Operator(target, phase, listed, False, size * 9, size, time_us, 0, signature, module, source)
        )
        return len(self.operators) - 1


def build(operators: int) -> tuple[Trace, list[Layer]]:
    """Build a residual network with about `operators` operators in an iteration."""
    layers = max(1, (operators - 4) // LAYER_OPERATORS)
    make = Builder()
    batch = make.tensor(Kind.INPUT, (16, 64, 28, 28), "batch")
    rate = make.tensor(Kind.INPUT, (1,), "lr")
    make.operator("placeholder", Phase.FORWARD, (batch, CREATE), (rate, CREATE))
    parts, x = [], batch
    for number in range(layers):
        part = forward(make, number, x)
        parts.append(part)
        x = part["y"]
    loss = make.tensor(Kind.ACTIVATION, (1,), "loss")
    make.operator("aten.nll_loss_forward.default", Phase.FORWARD, (x, READ), (loss, CREATE))
    gradient = make.tensor(Kind.GRADIENT, (16, 64, 28, 28))
    make.operator("aten.nll_loss_backward.default", Phase.BACKWARD, (x, READ), (loss, READ), (gradient, CREATE))
    for part in reversed(parts):
        gradient = backward(make, part, gradient)
    for part in parts:
        optimize(make, part, rate)
    make.operator("output", Phase.OPTIMIZER, (loss, READ))
    return Trace.build(make.operators, make.tensors), [layer(part) for part in parts]


def width(number: int) -> tuple[int, ...]:
    """Return the shape of a layer's activations."""
    return (16, 32 + 8 * (number % 61), 28, 28)


def forward(make: Builder, number: int, x: int) -> dict[str, int]:
    name, wide = f"stage{number // 12}.block{number % 12}", width(number)
    part = {"x": x, "number": number}
    for key, kind, shape in (
        ("weight", Kind.PARAMETER, (64, 64, 3, 3)), ("scale", Kind.PARAMETER, (64,)),
        ("mean", Kind.BUFFER, (64,)), ("variance", Kind.BUFFER, (64,)),
        ("m", Kind.OPTIMIZER_STATE, (64, 64, 3, 3)), ("v", Kind.OPTIMIZER_STATE, (64, 64, 3, 3)),
        ("scale_m", Kind.OPTIMIZER_STATE, (64,)), ("scale_v", Kind.OPTIMIZER_STATE, (64,)),
        ("convolved", Kind.ACTIVATION, wide), ("y", Kind.ACTIVATION, wide), ("saved", Kind.ACTIVATION, (64,)),
        ("mask", Kind.ACTIVATION, wide),
    ):  # fmt: skip
        part[key] = make.tensor(kind, shape, f"{name}.{key}")
    p = part
    make.operator("aten.convolution.default", Phase.FORWARD, (x, READ), (p["weight"], READ), (p["convolved"], CREATE),
                  module=f"{name}.conv")  # fmt: skip
    part["normalised"] = make.operator(
        "aten.native_batch_norm.default", Phase.FORWARD, (p["convolved"], READ), (p["scale"], READ),
        (p["mean"], STATS), (p["variance"], STATS), (p["y"], CREATE), (p["saved"], CREATE), module=f"{name}.bn",
    )  # fmt: skip
    make.operator("aten.relu_.default", Phase.FORWARD, (p["y"], WRITE), module=f"{name}.relu")
    part["last_forward"] = make.operator("aten.gt.Scalar", Phase.FORWARD, (p["y"], READ), (p["mask"], CREATE))
    return part


def backward(make: Builder, part: dict[str, int], gradient: int) -> int:
    wide, p = width(part["number"]), part
    masked, normal, passed = (make.tensor(Kind.TEMPORARY, wide) for _ in range(3))
    part["weight_gradient"] = make.tensor(Kind.GRADIENT, (64, 64, 3, 3))
    part["scale_gradient"] = make.tensor(Kind.GRADIENT, (64,))
    part["first_backward"] = make.operator("aten.threshold_backward.default", Phase.BACKWARD, (gradient, READ),
                                           (p["mask"], READ), (p["y"], READ), (masked, CREATE))  # fmt: skip
    make.operator("aten.native_batch_norm_backward.default", Phase.BACKWARD, (masked, READ), (p["convolved"], READ),
                  (p["scale"], READ), (p["saved"], READ), (normal, CREATE), (p["scale_gradient"], CREATE))  # fmt: skip
    make.operator("aten.convolution_backward.default", Phase.BACKWARD, (normal, READ), (p["x"], READ),
                  (p["weight"], READ), (passed, CREATE), (p["weight_gradient"], CREATE))  # fmt: skip
    make.operator("aten.add_.Tensor", Phase.BACKWARD, (passed, WRITE), (masked, READ))
    return passed


def optimize(make: Builder, part: dict[str, int], rate: int) -> None:
    p = part
    part["update"] = make.operator("aten._fused_adam_.default", Phase.OPTIMIZER, (p["weight"], WRITE),
                                   (p["weight_gradient"], READ), (p["m"], WRITE), (p["v"], WRITE),
                                   (rate, READ))  # fmt: skip
    make.operator("aten._fused_adam_.default", Phase.OPTIMIZER, (p["scale"], WRITE), (p["scale_gradient"], READ),
                  (p["scale_m"], WRITE), (p["scale_v"], WRITE), (rate, READ))  # fmt: skip


def layer(part: dict[str, int]) -> Layer:
    return Layer(
        part["convolved"], part["y"], part["normalised"], part["last_forward"], part["first_backward"],
        (part["m"], part["v"]), part["update"],
    )  # fmt: skip


def plan(layers: Sequence[Layer]) -> Plan:
    """Return a valid plan with swaps, recomputations and releases all over the trace."""
    events: list[Event] = []
    for number, part in enumerate(layers):
        out, back = part.last_forward + 2, part.first_backward
        if number % 3 == 0 and back - out > 4:  # out behind the next layer, back ahead of the backward pass
            events.append(Event(EventKind.SWAP_OUT, part.convolved, part.last_forward, out, delay_us=5))
            events.append(Event(EventKind.SWAP_IN, part.convolved, back - 2, back + 1))
        elif number % 3 == 1:  # its next reader in the forward pass is the next layer's convolution
            events.append(Event(EventKind.RECOMPUTE, part.activation, back - 1, back, version=1))
        for state in part.states:
            events.append(Event(EventKind.SWAP_IN, state, part.update - 2, part.update))
            events.append(Event(EventKind.SWAP_OUT, state, part.update, part.update + 1))
    return Plan.build(events)


def median_ms(work: Callable[[Trace], Any], trace: Trace, rounds: int) -> float:
    """Return the median of several rounds, each on a copy of the trace with nothing cached."""
    data, times = trace.to_bytes(), []
    for _ in range(rounds):
        fresh = Trace.from_bytes(data)
        start = time.perf_counter()
        work(fresh)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> list[Measurement]:
    """Return one measurement for each size, in operators."""
    return [measure_size(size, rounds) for size in sizes]


def measure_size(size: int, rounds: int) -> Measurement:
    trace, layers = build(size)
    events = plan(layers)
    data = trace.to_bytes()

    def median(work: Callable[[Trace], Any]) -> float:
        return median_ms(work, trace, rounds)

    return Measurement(
        operators=trace.operator_count,
        accesses=len(trace.access_tensor),
        events=len(events),
        trace_bytes=len(data),
        serialise_ms=median(lambda fresh: fresh.to_bytes()),
        read_ms=median(lambda _: Trace.from_bytes(data)),
        validate_none_ms=median(lambda fresh: validate(fresh, NO_EVENTS)),
        validate_ms=median(lambda fresh: validate(fresh, events)),
        footprint_ms=median(lambda fresh: memory.footprint(fresh, events)),
        actions_ms=median(lambda fresh: AccessSequence(fresh, events).actions()),
        host_arena_ms=median(lambda fresh: memory.host_arena(fresh, events)),
        simulate_ms=median(lambda fresh: simulate([SimulatedJob(fresh, events)], RTX_A6000)),
    )


class PolicyMeasurement(NamedTuple):
    """Planning by one policy, for `jobs` jobs of `operators` operators each.

    `seconds` is the median, `events` that of all plans, and `saved` the share of the memory that they save (half of it
    was requested). `error`: why there is no plan, or no valid one.
    """

    policy: str
    operators: int
    jobs: int
    events: int = 0
    seconds: float | None = None
    saved: float | None = None
    error: str | None = None


def measure_policy(policy: str, operators: int, jobs: int = 1, rounds: int = 3) -> PolicyMeasurement:
    """Measure planning on an RTX A6000, with a budget of half of the memory that the jobs take without a plan."""
    trace, _ = build(operators)
    data, measured = trace.to_bytes(), PolicyMeasurement(policy, trace.operator_count, jobs)
    vanilla = memory.footprint(trace).device_peak_bytes
    times = []
    try:
        for _ in range(rounds):
            fresh = {job: Trace.from_bytes(data) for job in range(jobs)}
            start = time.perf_counter()
            plans = named_policy(policy)(fresh, RTX_A6000, jobs * vanilla // 2)
            times.append(time.perf_counter() - start)
        saved = 1 - sum(memory.footprint(trace, plan).device_peak_bytes for plan in plans.values()) / (jobs * vanilla)
    except Exception as error:
        return measured._replace(error=f"{type(error).__name__}: {error}")
    return measured._replace(
        events=sum(len(plan) for plan in plans.values()), seconds=statistics.median(times), saved=saved
    )
