"""Operators as kinds and numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.latency.features import (
    BYTES,
    FEATURES,
    FLOPS,
    LOAD,
    ROOFLINE,
    Operand,
    Sample,
    caches_of,
    describe,
    describe_samples,
    parse,
    roofline_us,
)
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.graphs import traces

CONVOLUTION = "f32[4,64,32,32], f32[64,64,3,3], None, [2,2], [1,1], [1,1], False, [0,0], 1"


def kind(target: str, signature: str) -> str:
    (name,) = describe_samples([Sample(target, signature, 0, 0, 0.0, 1.0)], RTX_A6000).kinds
    return name


def row(signature: str, target: str = "aten.f.default", flops: int = 0, traffic: int = 0, load: float = 0.0):
    sample = Sample(target, signature, flops, traffic, load, 1.0)
    return describe_samples([sample], RTX_A6000).features[0]


def trace_of(*calls: tuple[str, str]) -> Trace:
    read = (Access(0, Mode.READ),)
    operators = [
        Operator("placeholder", Phase.FORWARD, (Access(0, Mode.CREATE),)),
        *(Operator(target, Phase.FORWARD, read, signature=s, flops=10**6, bytes=10**5) for target, s in calls),
        Operator("output", Phase.OPTIMIZER, read),
    ]
    return Trace.build(operators, [Tensor(64, Kind.INPUT)])


# ---- signatures ----

operands = st.builds(
    Operand,
    st.sampled_from(["f32", "bf16", "i64", "bool", "f8_e4m3fn"]),
    st.lists(st.integers(0, 5000), max_size=6).map(tuple),
    st.just(()),
)
strided = operands.flatmap(
    lambda operand: st.tuples(*[st.integers(0, 10**9)] * len(operand.shape)).map(lambda s: operand._replace(strides=s))
)


def written(operand: Operand | None) -> str:
    """As capture writes it."""
    if operand is None:
        return "None"
    text = f"{operand.dtype}[{','.join(map(str, operand.shape))}]"
    return f"{text}@{','.join(map(str, operand.strides))}" if operand.strides else text


@given(st.lists(st.none() | operands | strided, max_size=5), st.lists(st.integers(-(10**9), 10**9) | st.booleans()))
def test_a_signature_is_read_as_capture_writes_it(tensors, numbers):
    arguments = parse(", ".join([*map(written, tensors), *map(str, numbers), f"[{','.join(map(str, numbers))}]"]))
    assert arguments.operands == tuple(tensors)
    assert arguments.numbers == tuple(map(float, [*numbers, *numbers]))
    assert arguments.words == ()


@given(st.lists(operands | strided, min_size=1, max_size=6))
def test_operands_in_a_list_are_read_one_by_one(tensors):
    assert parse(f"[{','.join(map(written, tensors))}], 1").operands == tuple(tensors)


def test_arguments_by_name_and_words_are_told_apart():
    arguments = parse("f32[], lr=f64[], eps=1e-08, amsgrad=False, approximate=tanh, dtype=torch.float32, -inf")
    assert [operand.dtype for operand in arguments.operands if operand] == ["f32", "f64"]
    assert arguments.numbers == (1e-8, 0.0, float("-inf"))
    assert arguments.words == ("tanh", "torch.float32")


@given(st.text() | st.text("0123456789[],.@-=fNone aeT"), st.text())
def test_any_text_has_finite_features(signature, target):
    assert np.isfinite(row(signature, target)).all()
    assert row(signature, target).shape == (FEATURES,)


def test_layouts():
    assert Operand("f32", (2, 8, 5, 5)).layout == "contiguous"
    assert Operand("f32", (2, 8, 5, 5), (200, 1, 40, 8)).layout == "channels_last"
    assert Operand("f32", (8, 5), (1, 8)).layout == "strided"


# ---- kinds ----


@pytest.mark.parametrize(
    ("signature", "ending"),
    [
        (CONVOLUTION, "kxk"),
        ("f32[4,64,32,32], f32[64,64,1,1], None, [1,1]", "1x1"),
        ("f32[4,64,32,32], f32[64,1,3,3], None, [1,1]", "depthwise"),
        ("f32[4,64,32,32], f32[64,16,3,3], None, [1,1]", "grouped"),
        ("f32[4,1,32,32], f32[64,1,3,3], None, [1,1]", "kxk"),
    ],
)
def test_convolutions_are_told_apart_by_algorithm(signature, ending):
    assert kind("aten.convolution.default", signature) == f"aten.convolution.default f32 {ending}"
    backward = kind("aten.convolution_backward.default", f"f32[4,64,16,16], {signature}")
    assert backward == f"aten.convolution_backward.default f32 {ending}"


def test_type_layout_and_words_make_kinds_and_sizes_do_not():
    names = {
        kind("aten.gelu.default", signature)
        for signature in ("f32[4]", "f32[8,9]", "bf16[4]", "f32[4,4]@1,4", "f32[4], approximate=tanh")
    }
    assert len(names) == 4


# ---- numbers ----


def test_twice_the_size_is_a_distance_of_one():
    small, large = row("f32[1023,511]"), row("f32[2047,511]")
    assert np.max(large - small) == pytest.approx(1.0, abs=0.01)


def test_work_and_load_stand_at_the_end():
    features = row("f32[4]", flops=1023, traffic=255, load=0.25)
    assert features[FLOPS] == 10.0
    assert features[BYTES] == 8.0
    assert 2 ** features[ROOFLINE] == pytest.approx(roofline_us(1023, 255, RTX_A6000))
    assert features[LOAD] == 0.25
    assert [row("f32[4]", load=load)[LOAD] for load in (7.0, -1.0, float("nan"))] == [1.0, 0.0, 0.0]


def test_an_operand_that_is_not_given_moves_no_other_number():
    with_bias, without = row(CONVOLUTION.replace("None", "f32[64]")), row(CONVOLUTION)
    scalars = slice(FLOPS - 16, FLOPS)
    assert (with_bias[scalars] == without[scalars]).all()


# ---- traces ----


@given(traces())
def test_every_operator_of_a_trace_is_described_as_by_itself(trace):
    described = describe(trace, RTX_A6000, 0.5)
    assert described.features.shape == (trace.operator_count, FEATURES)
    caches = np.asarray(caches_of(trace)).T.tolist()
    for index, operator in enumerate(trace.operators):
        sample = Sample(operator.target, operator.signature, operator.flops, operator.bytes, 0.5, 1.0, *caches[index])
        alone = describe_samples([sample], RTX_A6000)
        assert described.kinds[described.codes[index]] == alone.kinds[0]
        assert (described.features[index] == alone.features[0]).all()


def caches_one_by_one(trace: Trace) -> list[tuple[float, float]]:
    """`caches_of`, by going through two iterations."""
    operators = list(trace.operators)
    sizes = [sum(trace.tensors[access.tensor].bytes for access in operator.accesses) for operator in operators]
    accessed = 0
    seen: dict[int, tuple[int, int]] = {}  # tensor → iteration, bytes accessed until then
    indicators = []
    for iteration in range(2):
        for index, operator in enumerate(operators):
            distances = {}
            for access in operator.accesses:
                tensor = trace.tensors[access.tensor]
                if access.tensor in seen and (trace.persistent[access.tensor] or seen[access.tensor][0] == iteration):
                    distances[access.tensor] = (max(1, tensor.bytes), math.log2(1 + accessed - seen[access.tensor][1]))
                seen[access.tensor] = (iteration, accessed)
            weight = sum(size for size, _ in distances.values())
            reuse = sum(size * distance for size, distance in distances.values()) / max(1, weight)
            indicators.append((reuse, math.log2(1 + sizes[index - 1]) if index else 0.0))
            accessed += sizes[index]
    return indicators[len(operators) :]


@given(traces())
def test_what_caches_may_have_is_told_by_two_iterations(trace):
    expected = caches_one_by_one(trace)
    assert np.asarray(caches_of(trace)).T.tolist() == [pytest.approx(pair) for pair in expected]


def test_calls_that_repeat_keep_their_places():
    relu, convolution = ("aten.relu.default", "f32[8]"), ("aten.convolution.default", CONVOLUTION)
    described = describe(trace_of(relu, convolution, relu, relu, convolution), RTX_A6000, 0.0)
    names = [described.kinds[code].split()[0] for code in described.codes]
    assert names == ["placeholder", relu[0], convolution[0], relu[0], relu[0], convolution[0], "output"]


def test_the_roofline_of_an_operator_is_the_traces():
    trace = trace_of(("aten.f.default", "f32[8]"))
    alone = roofline_us(trace.flops, trace.operator_bytes, RTX_A6000)
    assert alone[1:-1] == pytest.approx(roofline.estimate(trace, RTX_A6000)[1:-1])
