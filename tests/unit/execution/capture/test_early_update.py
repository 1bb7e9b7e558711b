"""Moving updates up changes the order of operators and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.early_update import early_update
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.trace.trace import Kind, Mode, Operator
from tests.unit.interpreter import Interpreter
from tests.unit.zoo import NAMED
from tests.unit.zoo_habits import HABITS

CASES = {**NAMED, **HABITS}
NAMES = [
    "resnet26",
    "gpt2",
    "bert",
    "lstm",
    "shared",
    "checkpointed",
    "containers",
    "clipped_sgd",
    "accumulated",
    "averaged",
]


def network(*optimizer: object, **options: object) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    spec = StepSpec(F.cross_entropy, OptimizerSpec(*optimizer), **options)  # type: ignore[arg-type]
    return capture(model, [torch.randn(4, 8)], [torch.randint(0, 3, (4,))], spec)


def dependent(earlier: Operator, later: Operator) -> bool:
    """Return whether two operators must keep their order: one changes what the other accesses, or both draw."""
    changes = {tensor for tensor, mode in earlier.accesses if mode != Mode.READ}
    changed = {tensor for tensor, mode in later.accesses if mode != Mode.READ}
    accesses, accessed = ({tensor for tensor, _ in operator.accesses} for operator in (earlier, later))
    return bool(changes & accessed or changed & accesses) or (earlier.random and later.random)


def updates(captured: Captured) -> list[int]:
    return [index for index, operator in enumerate(captured.trace.operators) if "_fused_" in operator.target]


@pytest.mark.parametrize("name", NAMES)
def test_results_are_the_same_to_the_last_bit(name):
    model, inputs, targets, spec = CASES[name].make()
    captured = capture(model, inputs, targets, spec)
    results = []
    for step in (captured, early_update(captured)):
        interpreter = Interpreter(step, model)
        torch.manual_seed(1)
        results.append(([interpreter.step(inputs, targets) for _ in range(3)], interpreter.state()))
    (losses, state), (early_losses, early_state) = results
    assert all(map(torch.equal, losses, early_losses))
    assert all(torch.equal(value, early_state[key]) for key, value in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_dependent_operators_keep_their_order(name):
    captured = capture(*CASES[name].make())
    early = early_update(captured)
    indices = {id(operator): index for index, operator in enumerate(captured.operators)}
    order = [indices[id(operator)] for operator in early.operators]
    assert sorted(order) == list(range(len(order)))
    operators = list(captured.trace.operators)
    assert [operators[index] for index in order] == list(early.trace.operators)
    assert list(early.trace.tensors) == list(captured.trace.tensors)
    index_of = {index: position for position, index in enumerate(order)}
    last: dict[int, list[int]] = {}  # tensor → operators that access it so far
    for index, operator in enumerate(operators):
        for tensor in {tensor for tensor, _ in operator.accesses}:
            for earlier in last.get(tensor, ()):
                assert not dependent(operators[earlier], operator) or index_of[earlier] < index_of[index]
            last.setdefault(tensor, []).append(index)
    drawing = [index_of[index] for index, operator in enumerate(operators) if operator.random]
    assert drawing == sorted(drawing)


def test_every_update_stands_right_after_the_last_operator_it_must_not_pass():
    early = early_update(network())
    operators = list(early.trace.operators)
    for update in updates(early):
        index = update
        while index in updates(early) or ("add_" in operators[index].target and len(operators[index].accesses) == 1):
            index -= 1
        assert dependent(operators[index], operators[update]) or dependent(operators[index], operators[update - 1])


def test_a_gradient_dies_where_it_is_made():
    captured, early = network(), early_update(network())

    def span(step: Captured) -> int:
        trace = step.trace
        gradients = [tensor for tensor, row in enumerate(trace.tensors) if row.kind == Kind.GRADIENT]
        return max(int(trace.tensor_last[tensor] - trace.tensor_first[tensor]) for tensor in gradients)

    assert span(early) < 10 < span(captured)
    assert updates(early)[0] < updates(captured)[0]


def test_averages_move_with_their_updates():
    """The update, the two operators of the average's weight, and the average: the parameter is needed once."""
    model, inputs, targets, spec = CASES["averaged"].make()
    early = early_update(capture(model, inputs, targets, spec))
    operators = list(early.trace.operators)
    assert updates(early)
    for update in updates(early):
        following = operators[update + 1 : update + 4]
        assert [operator.target.split(".")[1] for operator in following] == ["add_", "reciprocal", "lerp_"]
        parameter = operators[update].accesses[0].tensor
        assert parameter in {tensor for tensor, _ in following[-1].accesses}


def test_step_counters_move_with_their_updates():
    early = early_update(network())
    for update in updates(early):
        counter = early.trace.operators[update - 1]
        ((tensor, mode),) = counter.accesses
        assert early.trace.tensor_name[tensor].endswith(".step") and mode == Mode.WRITE


def test_the_peak_falls():
    captured = capture(*CASES["resnet26"].make())
    assert footprint(early_update(captured).trace).peak_bytes < 0.9 * footprint(captured.trace).peak_bytes


def test_clipping_is_a_barrier():
    captured = network(clip=1.0)
    early = early_update(captured)
    clipping = [index for index, operator in enumerate(early.trace.operators) if "vector_norm" in operator.target]
    assert min(updates(early)) > max(clipping)


def test_is_idempotent_and_an_option_of_capture():
    early = early_update(network("sgd", 0.1, 0.9))
    assert early_update(early).trace.fingerprint == early.trace.fingerprint
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    spec = StepSpec(lambda output: output.sum())
    asked = capture(model, [x], [], spec, early_update=True)
    assert asked.trace.fingerprint == early_update(capture(model, [x], [], spec)).trace.fingerprint
