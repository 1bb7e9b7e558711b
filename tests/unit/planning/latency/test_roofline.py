"""Analytic latencies, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

# 10 TFLOP/s and 1 TB/s, 10 GB/s out and 20 GB/s in, 5 µs a transfer, 3 µs a launch
DEVICE = replace(
    RTX_A6000,
    flops_per_s=10e12,
    bytes_per_s=1e12,
    out_bytes_per_s=10e9,
    in_bytes_per_s=20e9,
    transfer_latency_us=5.0,
    launch_us=3.0,
)


def trace_of(*middle: Operator, batch_bytes: int = 2_000_000) -> Trace:
    """An iteration that loads a batch, executes `middle`, which may read it (tensor 0), and returns it."""
    batch = Access(0, Mode.CREATE)
    operators = [
        Operator("placeholder", Phase.FORWARD, (batch,)),
        *middle,
        Operator("output", Phase.OPTIMIZER, (Access(0, Mode.READ),)),
    ]
    return Trace.build(operators, [Tensor(batch_bytes, Kind.INPUT)])


def work(flops: int, traffic: int) -> Operator:
    return Operator("aten.mm.default", Phase.FORWARD, (Access(0, Mode.READ),), flops=flops, bytes=traffic)


def test_the_slower_of_arithmetic_and_traffic_counts():
    latency = roofline.estimate(trace_of(work(10**9, 10**6), work(10**6, 10**9)), DEVICE)
    assert latency[1] == pytest.approx(100 + 3)  # 10⁹ / 10¹³ s
    assert latency[2] == pytest.approx(1000 + 3)  # 10⁹ / 10¹² s


def test_placeholder_and_output_cross_the_link():
    latency = roofline.estimate(trace_of(), DEVICE)
    assert latency.tolist() == pytest.approx([5 + 100, 5 + 200])


def test_an_operator_without_flops_and_bytes_takes_a_launch():
    assert roofline.estimate(trace_of(work(0, 0)), DEVICE)[1] == 3.0


def test_no_operator_takes_no_time_even_where_launches_are_free():
    latency = roofline.estimate(trace_of(work(0, 0), work(1, 1)), replace(DEVICE, launch_us=0.0))
    assert (latency[1:-1] > 0).all()


def test_estimates_are_finite_for_the_largest_numbers_of_a_trace():
    latency = roofline.estimate(trace_of(work(1 << 60, 1 << 60), batch_bytes=1 << 60), DEVICE)
    assert np.isfinite(latency).all()
    assert latency.dtype == np.float64
    Trace.with_latencies(trace_of(work(1, 1), batch_bytes=10), roofline.estimate(trace_of(work(1, 1)), DEVICE))


def test_the_total_is_of_the_operators_alone():
    trace = trace_of(work(10**9, 0), work(0, 10**9))
    assert roofline.total_us(trace, DEVICE) == pytest.approx(100 + 1000)
    assert roofline.work_us(trace, DEVICE)[[0, -1]].tolist() == [0.0, 0.0]


def test_a_faster_device_is_never_slower():
    trace = trace_of(*(work(10**n, 10 ** (12 - n)) for n in range(12)))
    faster = replace(DEVICE, flops_per_s=20e12, bytes_per_s=2e12)
    assert (roofline.estimate(trace, faster) <= roofline.estimate(trace, DEVICE)).all()
