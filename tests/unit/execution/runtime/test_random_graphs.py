"""Random graphs on the same persistent tensors, in random turns under random plans, some of which fail."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pg_tensile.execution.capture import Captured
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Trace
from tests.examples import examples
from tests.unit.executing import (
    opened,
    peak_of,
    recorded,
)
from tests.unit.graphs import random_plan, random_trace
from tests.unit.realised import Realised, Seen, Stops, _evaluate, _start, realise, with_learning_rate

randoms = st.integers(0, 1 << 40).map(Random)


def part_of(realised: Realised, random: Random) -> tuple[Realised, dict[int, int]]:
    """The beginning of an iteration as another graph, with only the tensors that it uses, and their numbers in the
    whole one → here."""
    trace = realised.trace
    operators = list(trace.operators)[: random.randint(1, trace.operator_count - 1)]
    used = sorted({access.tensor for operator in operators for access in operator.accesses})
    numbers = {tensor: number for number, tensor in enumerate(used)}
    returned = Access(random.choice(used), Mode.READ)
    operators.append(trace.operators[-1]._replace(accesses=(returned,)))
    rate = trace.tensor_count - 1
    order = [tensor for tensor in used if tensor != rate] + [rate]
    numbers = {tensor: number for number, tensor in enumerate(order)}
    rows = [
        operator._replace(accesses=tuple(Access(numbers[tensor], mode) for tensor, mode in operator.accesses))
        for operator in operators
    ]
    part = realise(Trace.build(rows, [trace.tensors[tensor] for tensor in order], trace.device), random)
    whole = {numbers[entry.tensor]: entry for entry in realised.captured.persistents if entry.tensor in numbers}
    persistents = tuple(
        whole[entry.tensor]._replace(tensor=entry.tensor, slot=entry.slot) for entry in part.captured.persistents
    )
    return Realised(replace(part.captured, persistents=persistents), part.log), numbers


def as_evaluation(captured: Captured) -> Captured:
    """The learning rate is one input more."""
    return replace(captured, learning_rate=None, inputs=captured.given)


class Plainly:
    """Graphs on the same persistent tensors, with all the memory there is."""

    def __init__(self, whole: Realised, parts: list[tuple[Realised, dict[int, int]]]) -> None:
        model, captured = whole.model(), whole.captured
        self.graphs = [whole, *(part for part, _ in parts)]
        self.values: list[list[Tensor]] = [[torch.empty(0)] * len(graph.captured.values) for graph in self.graphs]
        self.finals = {entry.tensor: _start(entry, captured, model) for entry in captured.persistents}
        for values, graph, numbers in zip(self.values, self.graphs, [None, *(n for _, n in parts)], strict=True):
            count = captured.trace.tensor_count
            own = {own_number: number for number, own_number in numbers.items()} if numbers else range(count)
            for persistent in graph.captured.persistents:
                values[persistent.slot] = self.finals[own[persistent.tensor]]
            _evaluate(graph.captured.persistent_views, values)

    def run(self, index: int, iteration: int) -> Seen:
        graph, values = self.graphs[index], self.values[index]
        captured = graph.captured
        assert captured.learning_rate is not None
        for slot, given_ in zip(captured.inputs, graph.inputs(iteration), strict=True):
            values[slot] = given_.clone()
        values[captured.learning_rate] = torch.tensor(0.1, dtype=torch.float64)
        for operator in captured.operators:
            _evaluate([operator.call] if operator.call else [], values)
            _evaluate(operator.views, values)
        return Seen(graph.log.take(), [values[slot].clone() for slot in captured.returned])


@pytest.mark.long
@examples(100)
@given(randoms)
def test_random_graphs_in_random_turns_under_random_plans(random):
    whole = realise(with_learning_rate(random_trace(random)), random)
    parts = [part_of(whole, random) for _ in range(2)]
    graphs = [whole, *(part for part, _ in parts)]
    plans = [random_plan(random, graph.trace) for graph in graphs]
    turns = random.choices(range(3), k=7)
    reference = Plainly(whole, parts)
    torch.manual_seed(3)
    expected = [reference.run(index, turn) for turn, index in enumerate(turns)]
    generator = torch.manual_seed(3)
    budget = max(peak_of(graph.captured, plan) for graph, plan in zip(graphs, plans, strict=True))
    with opened(budget) as device, Executor(whole.captured, whole.model(), device, plans[0]) as executor:
        evaluates = [False, *(random.random() < 0.5 for _ in parts)]
        handles = [executor.graphs[0]]
        for graph, plan, is_evaluation in zip(graphs[1:], plans[1:], evaluates[1:], strict=True):
            captured = as_evaluation(graph.captured) if is_evaluation else graph.captured
            handles.append(executor.add(captured, plan))
        executor.recording = True
        for turn, index in enumerate(turns):
            inputs, graph, fails = graphs[index].inputs(turn), graphs[index], random.random() < 0.2
            before, state = generator.get_state(), executor.state_dict()
            graph.log.fails_after = random.randint(0, graph.trace.operator_count) if fails else None
            for _ in range(2):  # a second time if it fails
                with contextlib.suppress(Stops):
                    if evaluates[index]:
                        rate = torch.tensor(0.1, dtype=torch.float64)
                        loss, outputs = executor.evaluate([*inputs, rate], graph=handles[index])
                    else:
                        loss, outputs = executor.step(inputs, graph=handles[index])
                    break
                if executor.inspect().poison:
                    constants = whole.trace.tensor_kind == Kind.CONSTANT
                    if whole.trace.tensor_writes[constants].any():
                        return  # they are in no state to go back to
                    executor.load_state_dict(state)
                graph.log.take()
                generator.set_state(before)
            graph.log.fails_after = None
            record = recorded(executor)
            assert record.device_peak_bytes <= budget
            if not record.transition:
                others = record.footprint - AccessSequence(handles[index].captured.trace, handles[index].plan).footprint
                assert len(set(others.tolist())) == 1 and others[0] >= 0, "tensors that it does not use"
            assert graph.log.take() == expected[turn].digests
            assert loss is not None and all(map(torch.equal, (loss, *outputs), expected[turn].results))
        for entry in whole.captured.persistents:
            assert torch.equal(executor.inspect().read(entry.tensor), reference.finals[entry.tensor])
