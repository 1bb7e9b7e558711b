"""No policy's plan repeats a collective, or changes the order of any two: other ranks would wait for ever."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given

from pg_tensile.errors import BudgetError
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency.collectives import ALL_REDUCE, WAIT
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.unit.graphs import dice, random_order, traces

BUDGETS = (0.0, 0.4, 1.0)  # of the memory between the least and what there is without a plan


def with_collectives(trace: Trace, random: Random) -> Trace:
    """Return the trace with some all-reduces of tensors that it has created, which take turns, and the waits for them.

    Nothing accesses a tensor between the two."""
    turn = trace.tensor_count
    created = [tensor for tensor in range(turn) if not trace.persistent[tensor]]
    tensors = [*trace.tensors, Tensor(8, Kind.ACTIVATION, "turn", "i64", ())]
    first, *others = trace.operators
    under_way: list[int] = []
    last = len(others)

    def written(tensor: int) -> tuple[Access, ...]:
        return Access(tensor, Mode.WRITE), Access(turn, Mode.WRITE)

    operators = [first, Operator("aten.zeros.default", Phase.FORWARD, (Access(turn, Mode.CREATE),))]
    for index, operator in enumerate(others, 1):
        ready = [tensor for tensor in created if trace.tensor_first[tensor] < index]
        used = {tensor for tensor, _ in operator.accesses}
        while under_way and (under_way[0] in used or used & {*under_way} or random.random() < 0.3 or index == last):
            operators.append(Operator(WAIT, Phase.OPTIMIZER, written(under_way.pop(0)), signature="f32[4], i64[]"))
        ready = [tensor for tensor in ready if tensor not in {*under_way, *used}]
        if ready and random.random() < 0.5 and index < last:
            under_way.append(random.choice(ready))
            accesses = written(under_way[-1])
            operators.append(Operator(ALL_REDUCE, Phase.OPTIMIZER, accesses, signature="f32[4], i64[], f64[], 2"))
        operators.append(operator)
    return Trace.build(operators, tensors, trace.device)


def collectives(trace: Trace) -> list[int]:
    return [index for index, operator in enumerate(trace.operators) if operator.target in (ALL_REDUCE, WAIT)]


def executed(trace: Trace, plan: Plan) -> list[int]:
    """Return the collectives in the order in which they are executed, those that are recomputed included."""
    validate(trace, plan)
    known = set(collectives(trace))
    return [index for index in AccessSequence(trace, plan).operators.tolist() if index in known]


@pytest.mark.usefixtures("brief_search")
@pytest.mark.parametrize("policy", POLICIES)
@given(trace=traces(most_operators=12, most_tensors=12), random=dice())
@examples(10, long=25)
def test_collectives_stay_as_they_are(policy: str, trace: Trace, random: Random) -> None:
    trace = with_collectives(trace, random)
    least, most = least_bytes(trace), footprint(trace).device_peak_bytes
    for part in BUDGETS if policy != "swapadvisor" else BUDGETS[1:2]:  # it searches
        try:
            plan = POLICIES[policy]({0: trace}, RTX_A6000, int(least + part * (most - least)))[0]
        except BudgetError:
            continue
        assert executed(trace, plan) == collectives(trace)


@given(trace=traces(most_operators=20, most_tensors=20), random=dice())
@examples(15)
def test_no_valid_order_changes_that_of_collectives(trace: Trace, random: Random) -> None:
    trace = with_collectives(trace, random)
    plan = Plan.build([], order=np.array(random_order(random, trace), np.int32))
    assert executed(trace, plan) == collectives(trace)


def test_a_collective_that_returns_a_new_tensor_would_be_repeated() -> None:
    """So do those of torch.distributed that are functions: the tests above would see that."""
    tensors = [Tensor(8, Kind.INPUT, "x"), Tensor(800, Kind.GRADIENT, "g"), Tensor(8, Kind.TEMPORARY, "y")]
    create, read = Mode.CREATE, Mode.READ
    rows = [
        ("placeholder", {0: create}),
        (ALL_REDUCE, {0: read, 1: create}),
        ("f", {1: read, 2: create}),
        ("g", {0: read, 2: read}),
        ("h", {1: read}),
        ("output", {2: read}),
    ]
    operators = [
        Operator(target, Phase.FORWARD, tuple(Access(*access) for access in accesses.items()), signature="2")
        for target, accesses in rows
    ]
    trace = Trace.build(operators, tensors)
    plan = POLICIES["recompute_all"]({0: trace}, RTX_A6000, None)[0]
    assert executed(trace, plan) == [1, 1]
