"""Operators as generated functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pg_tensile.execution.capture import Call, Slot
from pg_tensile.execution.runtime.functions import _Source

aten = torch.ops.aten


def call(target: Any, *args: Any, results: tuple[int | None, ...], **kwargs: Any) -> Call:
    return Call(target, args, kwargs, results)


def execute(calls: list[Call], values: list[Any], copied: frozenset[int] = frozenset()) -> list[Any]:
    source = _Source()
    source.define("function", calls, copied)
    values = [*values, *[None] * 5]
    source.compile()["function"](values)
    return values


ONE, TEN = torch.arange(6.0).view(2, 3), torch.full((2, 3), 10.0)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (call(aten.add.Tensor, Slot(0), Slot(1), results=(2,), alpha=3), ONE + 3 * TEN),
        (call(aten.mul.Tensor, Slot(0), -math.inf, results=(2,)), ONE * -math.inf),
        (call(aten.cat.default, [Slot(0), Slot(1)], 1, results=(2,)), torch.cat([ONE, TEN], 1)),
        (call(aten.index.Tensor, Slot(0), [None, Slot(1)], results=(2,)), ONE[:, :2]),
        (call(aten._to_copy.default, Slot(0), results=(2,), dtype=torch.int64), ONE.long()),
        (call(aten.view.default, Slot(0), [3, 2], results=(2,)), ONE.view(3, 2)),
        (call(aten.linalg_vector_norm.default, Slot(0), 2, [0], True, results=(2,)), ONE.norm(2, 0, True)),
        (call(aten.sum.dim_IntList, Slot(0), (1,), results=(2,)), ONE.sum(1)),
        (call(aten.clamp.default, Slot(0), None, 2.0, results=(2,)), ONE.clamp(max=2)),
        (
            call(aten.pad.default, Slot(0), [1, 1], "constant", 7.5, results=(2,)),
            torch.constant_pad_nd(ONE, [1, 1], 7.5),
        ),
    ],
    ids=lambda value: str(value.target) if isinstance(value, Call) else "",
)
def test_arguments_are_slots_lists_and_constants(operation, expected):
    second = torch.tensor([0, 1]) if operation.target is aten.index.Tensor else TEN
    result = execute([operation], [ONE, second])[2]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_several_results_go_to_their_slots_and_the_others_nowhere():
    operation = call(aten.native_layer_norm.default, Slot(0), [3], None, None, 1e-5, results=(2, None, 3))
    output, mean, deviation = torch.native_layer_norm(ONE, [3], None, None, 1e-5)
    values = execute([operation], [ONE, TEN])
    assert torch.equal(values[2], output)
    assert torch.equal(values[3], deviation)
    assert values[4] is None
    assert not torch.equal(values[3], mean)


def test_lists_of_results_are_flattened():
    values = execute([call(aten.split.Tensor, Slot(0), 2, 1, results=(2, 3))], [ONE, TEN])
    assert torch.equal(values[2], ONE[:, :2])
    assert torch.equal(values[3], ONE[:, 2:])


def test_functions_of_python_may_return_anything():
    operation = call(lambda a, options: ([a + 1], None, (a * options[0],)), Slot(0), [2], results=(2, None, 3))
    values = execute([operation], [ONE, TEN])
    assert torch.equal(values[2], ONE + 1)
    assert torch.equal(values[3], ONE * 2)


def test_a_call_in_place_defines_nothing_and_later_calls_see_it():
    target = ONE.clone()
    calls = [call(aten.add_.Tensor, Slot(0), 1, results=(None,)), call(aten.neg.default, Slot(0), results=(2,))]
    values = execute(calls, [target, TEN])
    assert values[0] is target
    assert torch.equal(values[2], -(ONE + 1))


def test_a_keyword_may_be_one_of_pythons():
    generator_state = torch.get_rng_state()
    operation = Call(aten.random_.default, (Slot(0),), {"generator": None}, (None,))
    target = ONE.clone()
    execute([operation], [target, TEN])
    torch.set_rng_state(generator_state)
    assert torch.equal(target, ONE.clone().random_())
    taking_from = Call(lambda **options: options["from"], (), {"from": Slot(1)}, (2,))
    assert execute([taking_from], [ONE, TEN])[2] is TEN


def test_statistics_are_copied_for_an_operator_that_is_executed_again():
    mean, variance = torch.zeros(3), torch.ones(3)
    arguments = (Slot(0), None, None, Slot(1), Slot(2), True, 0.1, 1e-5)
    operation = Call(aten.native_batch_norm.default, arguments, {}, (3, None, None))
    values = execute([operation], [ONE, mean, variance], frozenset({1, 2}))
    assert torch.equal(mean, torch.zeros(3))
    assert torch.equal(variance, torch.ones(3))
    assert torch.equal(values[3], torch.native_batch_norm(ONE, None, None, mean, variance, True, 0.1, 1e-5)[0])
    assert not torch.equal(mean, torch.zeros(3))
