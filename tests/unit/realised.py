"""Random traces as executable steps: every operator is a small function of bytes, with views and random numbers.

The results of an operator depend on every byte that it reads, so that errors propagate; every execution is logged with
a digest of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pg_tensile.execution.capture import (
    Call,
    Captured,
    CapturedOperator,
    OptimizerSpec,
    Persistent,
    Slot,
    StepSpec,
    Value,
)
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Trace
from pg_tensile.planning.trace.trace import Tensor as TraceTensor

aten = torch.ops.aten
SPEC = StepSpec(lambda outputs: outputs, OptimizerSpec("sgd", 0.1))


class Stops(Exception):
    """The error that a failing operator raises."""


class Log:
    """Executed operators with digests of their inputs. `fails_after`: number of operators before one raises."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []
        self.fails_after: int | None = None

    def add(self, operator: int, seen: int) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.fails_after = None
                raise Stops(f"operator {operator}")
        self.entries.append((operator, seen))

    def take(self) -> dict[int, set[int]]:
        """Return the digests of each operator since the last call."""
        digests: dict[int, set[int]] = {}
        for operator, seen in self.entries:
            digests.setdefault(operator, set()).add(seen)
        self.entries.clear()
        return digests


class Realised(NamedTuple):
    """A trace with an additional tensor for the learning rate as a step, and the log of its executions."""

    captured: Captured
    log: Log

    @property
    def trace(self) -> Trace:
        return self.captured.trace

    def model(self) -> nn.Module:
        """Build a model, with the same weights in each call."""
        generator = torch.Generator().manual_seed(7)
        model = nn.Module()
        for persistent in self.captured.persistents:
            value = torch.randint(0, 256, self.captured.values[persistent.slot].shape, generator=generator).byte()
            if persistent.kind == Kind.PARAMETER:
                model.register_parameter(persistent.name, nn.Parameter(value, requires_grad=False))
            elif persistent.kind == Kind.BUFFER:
                model.register_buffer(persistent.name, value)
        return model

    def inputs(self, iteration: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(iteration)
        shapes = [self.captured.values[slot].shape for slot in self.captured.inputs]
        return [torch.randint(0, 256, shape, generator=generator).byte() for shape in shapes]


def observable(trace: Trace) -> Trace:
    """Adapt a trace so that no error stays unseen: every tensor has some bytes, and all that are not
    persistent are changed by what reads them."""

    def seen(access: Access) -> Access:
        hidden = access.mode == Mode.STATS and not trace.persistent[access.tensor]
        return Access(access.tensor, Mode.WRITE) if hidden else access

    operators = [row._replace(accesses=tuple(map(seen, row.accesses))) for row in trace.operators]
    return Trace.build(operators, [row._replace(bytes=max(row.bytes, 64)) for row in trace.tensors], trace.device)


def with_learning_rate(trace: Trace) -> Trace:
    """Return the trace with a learning rate that the placeholder creates."""
    rate = trace.tensor_count
    first, *others = trace.operators
    first = first._replace(accesses=(*first.accesses, Access(rate, Mode.CREATE)))
    tensors = [*trace.tensors, TraceTensor(8, Kind.INPUT, "learning rate", "f64", ())]
    return Trace.build([first, *others], tensors, trace.device)


def realise(trace: Trace, random: Random, view_share: float = 0.6) -> Realised:
    """Build a step. `trace`: result of `with_learning_rate`; all other tensors are bytes. `random` decides which
    tensors are used through views; `view_share` is the share of tensors that have any."""
    return _Builder(trace, random, view_share).build()


class _Builder:
    def __init__(self, trace: Trace, random: Random, view_share: float) -> None:
        self.trace = trace
        self.view_share = view_share
        self.random = random
        self.values: list[Value] = []
        self.whole: dict[int, int] = {}  # tensor → the slot that shows all of it
        self.views: dict[int, list[Call]] = {}
        self.shown: dict[int, list[int]] = {}  # tensor → its slots
        self.log = Log()

    def build(self) -> Realised:
        trace = self.trace
        rate = trace.tensor_count - 1
        for tensor, row in enumerate(trace.tensors):
            self._add_slots(tensor, row.bytes, is_rate=tensor == rate)
        operators = [CapturedOperator(None, self._created_views(0))]
        for operator_index in range(1, trace.operator_count - 1):
            operators.append(CapturedOperator(self._call(operator_index), self._created_views(operator_index)))
        operators.append(CapturedOperator(None))
        loss, *outputs = [self.random.choice(self.shown[a.tensor]) for a in trace.operators[-1].accesses]
        persistents = [self._persistent(t) for t in range(trace.tensor_count) if trace.persistent[t]]
        inputs = [a.tensor for a in trace.operators[0].accesses if a.tensor != rate]
        captured = Captured(
            trace=trace,
            operators=tuple(operators),
            values=tuple(self.values),
            persistents=tuple(persistents),
            persistent_views=tuple(view for persistent in persistents for view in self.views[persistent.tensor]),
            inputs=tuple(self.whole[tensor] for tensor in inputs),
            learning_rate=self.whole[rate],
            loss=loss,
            outputs=tuple(outputs),
            unknown_sizes=frozenset(),
            spec=SPEC,
        )
        return Realised(captured, self.log)

    def _slot(
        self, tensor: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> int:
        self.values.append(Value(tensor, dtype, shape, stride, offset, torch.device("cpu")))
        self.shown.setdefault(tensor, []).append(len(self.values) - 1)
        return len(self.values) - 1

    def _add_slots(self, tensor: int, size: int, is_rate: bool) -> None:
        self.views[tensor] = []
        if is_rate:
            self.whole[tensor] = self._slot(tensor, torch.float64, (), (), 0)
            return
        whole = self.whole[tensor] = self._slot(tensor, torch.uint8, (size,), (1,), 0)
        if size and self.random.random() < self.view_share:
            half = size // 2
            part = self._slot(tensor, torch.uint8, (size - half,), (1,), half)
            self.views[tensor].append(Call(aten.slice.Tensor, (Slot(whole), 0, half, size), {}, (part,)))
            if self.random.random() < 0.5:  # a view of a view
                column = self._slot(tensor, torch.uint8, (size - half, 1), (1, 1), half)
                self.views[tensor].append(Call(aten.unsqueeze.default, (Slot(part), 1), {}, (column,)))

    def _created_views(self, operator: int) -> tuple[Call, ...]:
        accesses = self.trace.operators[operator].accesses
        return tuple(view for access in accesses if access.mode is Mode.CREATE for view in self.views[access.tensor])

    def _persistent(self, tensor: int) -> Persistent:
        kind, slot = Kind(self.trace.tensor_kind[tensor]), self.whole[tensor]
        if kind == Kind.OPTIMIZER_STATE:
            return Persistent(tensor, slot, kind, f"of{tensor}", "moment", initial=float(tensor % 7))
        if kind == Kind.CONSTANT:
            size = int(self.trace.tensor_bytes[tensor])
            return Persistent(tensor, slot, kind, constant=torch.arange(size).to(torch.uint8))
        return Persistent(tensor, slot, kind, f"t{tensor}")

    def _call(self, operator_index: int) -> Call:
        operator = self.trace.operators[operator_index]
        of: dict[Mode, list[int]] = {mode: [] for mode in Mode}
        for tensor, mode in operator.accesses:
            of[mode].append(tensor)
        arguments = tuple([Slot(self.random.choice(self.shown[t])) for t in of[mode]] for mode in list(Mode)[:3])
        sizes = [int(self.trace.tensor_bytes[tensor]) for tensor in of[Mode.CREATE]]
        function = make_function(operator_index, operator, sizes, self.log)
        return Call(function, arguments, {}, tuple(self.whole[tensor] for tensor in of[Mode.CREATE]))


def make_function(operator_index: int, operator: Operator, sizes: list[int], log: Log) -> Callable[..., list[Tensor]]:
    """Return the function of an operator, from reads, statistics and writes to its results."""

    def function(reads: list[Tensor], statistics: list[Tensor], writes: list[Tensor]) -> list[Tensor]:
        seen = [digest(tensor) for tensor in (*reads, *writes)]
        if operator.random:
            seen.append(int(torch.randint(0, 1 << 30, ())))
        number = hash((operator_index, *seen)) & 0xFFFFFFFF
        log.add(operator_index, number)
        for which, tensor in enumerate(writes):
            tensor.copy_(pattern(number, 1000 + which, tensor.numel()).view(tensor.shape))
        for tensor in statistics:  # depend on themselves, and nothing else depends on them
            tensor.add_(pattern(number, 0, tensor.numel()).view(tensor.shape))
        return [pattern(number, 1 + which, size) for which, size in enumerate(sizes)]

    return function


def digest(tensor: Tensor) -> int:
    if tensor.dtype == torch.float64:
        return hash(tensor.item())
    return hash(bytes(tensor.flatten().tolist()))


def pattern(number: int, which: int, size: int) -> Tensor:
    """Return bytes that depend on all bits of `number` and on `which`."""
    generator = torch.Generator().manual_seed(hash((number, which)) & 0xFFFFFFFF)
    return torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)


class Seen(NamedTuple):
    """Observations of one iteration."""

    digests: dict[int, set[int]]  # operator → digests of its inputs in each execution
    results: list[Tensor]  # the loss and the outputs


def execute_plainly(realised: Realised, iterations: int) -> tuple[list[Seen], dict[int, Tensor]]:
    """Execute iterations with unlimited memory; return their observations and the final persistent tensors."""
    captured, model = realised.captured, realised.model()
    values: list[Tensor] = [torch.empty(0)] * len(captured.values)
    for persistent in captured.persistents:
        values[persistent.slot] = _start(persistent, captured, model)
    _evaluate(captured.persistent_views, values)
    seen = []
    assert captured.loss is not None and captured.learning_rate is not None
    for iteration in range(iterations):
        for slot, given in zip(captured.inputs, realised.inputs(iteration), strict=True):
            values[slot] = given.clone()
        values[captured.learning_rate] = torch.tensor(0.1, dtype=torch.float64)
        for operator in captured.operators:
            _evaluate([operator.call] if operator.call else [], values)
            _evaluate(operator.views, values)
        results = [values[slot].clone() for slot in (captured.loss, *captured.outputs)]
        seen.append(Seen(realised.log.take(), results))
    return seen, {persistent.tensor: values[persistent.slot] for persistent in captured.persistents}


def _start(persistent: Persistent, captured: Captured, model: nn.Module) -> Tensor:
    shape = captured.values[persistent.slot].shape
    if persistent.kind == Kind.OPTIMIZER_STATE:
        return torch.full(shape, persistent.initial).to(torch.uint8)
    if persistent.constant is not None:
        return persistent.constant.clone()
    return getattr(model, persistent.name).detach().clone()


def _evaluate(calls: object, values: list[Tensor]) -> None:
    def resolve(item: object) -> object:
        if isinstance(item, list):
            return [resolve(entry) for entry in item]
        return values[item.index] if isinstance(item, Slot) else item

    for call in calls:  # type: ignore[attr-defined]
        returned = call.target(*[resolve(argument) for argument in call.args])
        results = returned if isinstance(returned, list) else [returned]
        for slot, result in zip(call.results, results, strict=True):
            values[slot] = result
