"""Measuring on the host: clocks, the allocator's record and the two independent witnesses of memory."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.runtime.measure import HostAllocator, HostClock, Measurements, StorageObserver, allocator_peak
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.handmade import network

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def spin(microseconds: float) -> None:
    end = time.perf_counter_ns() + microseconds * 1000
    while time.perf_counter_ns() < end:
        pass


def small_trace() -> Trace:
    """placeholder makes x (4 KiB); one operator makes y (8 KiB) and z (1 KiB), one writes y; output reads it."""
    tensors = [Tensor(4 * KIB, Kind.INPUT), Tensor(8 * KIB, Kind.ACTIVATION), Tensor(1 * KIB, Kind.TEMPORARY)]
    read, create, write = Mode.READ, Mode.CREATE, Mode.WRITE
    operators = [
        Operator("placeholder", Phase.FORWARD, (Access(0, create),)),
        Operator("aten.a.default", Phase.FORWARD, (Access(0, read), Access(1, create), Access(2, create))),
        Operator("aten.b.default", Phase.FORWARD, (Access(1, write), Access(2, read))),
        Operator("output", Phase.OPTIMIZER, (Access(1, read),)),
    ]
    return Trace.build(operators, tensors)


# ---- meters ----------------------------------------------------------------------------------------------------------


def test_host_clock_times_each_operator():
    with HostClock() as clock:
        for microseconds in (500, 3000):
            clock.start()
            spin(microseconds)
            clock.stop()
    short, long = clock.read()
    assert short >= 500 and long >= 3000


def test_host_allocator_sees_the_high_water_inside_each_operator():
    with HostAllocator() as allocator:
        allocator.start()
        workspace = kib(96)
        result = kib(32)
        del workspace
        allocator.stop()
        between = kib(500)
        del between
        allocator.start()
        result.zero_()
        allocator.stop()
        allocator.start()
        other = kib(8)
        allocator.stop()
    assert allocator.read().tolist() == [128 * KIB, 0, 8 * KIB]
    assert other.numel() + result.numel() == 40 * KIB


def test_host_allocator_sees_what_pytorch_allocates_inside_an_operator():
    values = torch.rand(16 * KIB)
    with HostAllocator() as allocator:
        allocator.start()
        ordered = torch.sort(values)
        allocator.stop()
    outputs = ordered.values.nbytes + ordered.indices.nbytes
    assert allocator.read()[0] > outputs


def test_host_allocator_ignores_what_was_there_before(capfd):
    before = kib(64)
    with HostAllocator() as allocator:
        allocator.start()
        before.untyped_storage().resize_(0)
        after = kib(16)
        allocator.stop()
        allocator.start()
        after.untyped_storage().resize_(0)
        after.untyped_storage().resize_(24 * KIB)
        allocator.stop()
    assert allocator.read().tolist() == [16 * KIB, 8 * KIB]
    assert "profiler_start" not in capfd.readouterr().err


def test_host_allocator_refuses_a_thread_that_is_being_profiled():
    with (
        torch.autograd.profiler.profile(use_kineto=True),
        pytest.raises(MeasurementError, match="profiled already"),
        HostAllocator(),
    ):
        pass
    with HostAllocator() as allocator:
        allocator.start()
        allocator.stop()
    assert allocator.read().tolist() == [0]


def test_a_meter_survives_an_operator_that_fails():
    """The executor stops nothing then; the profile must be left nevertheless, or the next one would be refused."""
    with pytest.raises(ZeroDivisionError), HostAllocator() as allocator:
        allocator.start()
        raise ZeroDivisionError
    with HostAllocator() as allocator:
        allocator.start()
        tensor = kib(4)
        allocator.stop()
    assert allocator.read().tolist() == [tensor.nbytes]


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_latencies_are_medians_of_the_last_seven_iterations():
    measurements = Measurements(small_trace())
    steps = np.arange(4)
    for disturbance in (500.0, 0, 0, 1, 2, 3, 4, 100):
        measurements.add_latencies(steps, np.array([1.0, 10.0, 20.0, 1.0]) + disturbance)
    result = measurements.result()
    assert result.samples == 7
    assert result.latency_us.tolist() == [3.0, 12.0, 22.0, 3.0]


def test_an_operator_executed_twice_has_the_mean_of_its_times():
    measurements = Measurements(small_trace())
    measurements.add_latencies(np.array([0, 1, 1, 2, 3]), np.array([1.0, 10.0, 30.0, 5.0, 1.0]))
    assert measurements.result().latency_us.tolist() == [1.0, 20.0, 5.0, 1.0]


def test_workspace_is_the_high_water_minus_the_outputs():
    measurements = Measurements(small_trace())
    steps = np.arange(4)
    measurements.add_workspaces(steps, np.array([4 * KIB, 9 * KIB + 700, 300, 0]))
    measurements.add_workspaces(steps, np.array([4 * KIB, 9 * KIB, 900, 0]))
    result = measurements.result()
    assert result.workspace_bytes.tolist() == [0, 700, 900, 0]
    assert (result.samples, result.latency_us.tolist()) == (0, [0.0] * 4)


def test_measurements_become_the_columns_of_a_trace():
    trace = small_trace()
    measurements = Measurements(trace)
    measurements.add_latencies(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
    measured = measurements.result().apply(trace)
    assert measured.latency_us.tolist() == [1.0, 2.0, 3.0, 4.0]
    measurements.add_workspaces(np.arange(4), np.array([4 * KIB, 10 * KIB, 0, 0]))
    assert measurements.result().apply(measured).workspace_bytes.tolist() == [0, KIB, 0, 0]
    assert measured.fingerprint == trace.fingerprint


def test_twins_in_a_trace_share_their_readings():
    trace = network(3)
    layers = np.flatnonzero(trace.target.codes == trace.target.values.index("layer"))
    measurements = Measurements(trace)
    for longest in layers:
        reading = np.full(trace.operator_count, 10.0)
        reading[longest] = 500.0
        measurements.add_latencies(np.arange(trace.operator_count), reading)
    reading = np.full(trace.operator_count, 10.0)
    reading[layers[0]] = 500.0
    measurements.add_latencies(np.arange(trace.operator_count), reading)
    result = measurements.result()
    assert result.latency_us[layers[0]] == 255.0
    assert result.apply(trace).latency_us.tolist() == [10.0] * trace.operator_count


def test_an_operator_without_a_reading_keeps_its_prediction():
    trace = small_trace().with_latencies(np.array([9.0, 8.0, 7.0, 6.0]))
    measurements = Measurements(trace)
    measurements.add_latencies(np.array([0, 1, 2]), np.array([1.0, 2.0, 3.0]))
    assert measurements.result().apply(trace).latency_us.tolist() == [1.0, 2.0, 3.0, 6.0]


def test_a_trace_keeps_what_was_not_measured():
    trace = small_trace().with_latencies(np.array([9.0, 8.0, 7.0, 6.0]), np.array([0, 5, 0, 0]))
    unchanged = Measurements(trace).result().apply(trace)
    assert unchanged.latency_us.tolist() == [9.0, 8.0, 7.0, 6.0]
    assert unchanged.workspace_bytes.tolist() == [0, 5, 0, 0]


def test_a_reading_of_another_iteration_is_refused():
    with pytest.raises(MeasurementError, match="3 operators were measured in an iteration of 4 steps"):
        Measurements(small_trace()).add_latencies(np.arange(4), np.ones(3))


# ---- witnesses -------------------------------------------------------------------------------------------------------


def test_allocator_peak_counts_from_before_prepare_and_the_second_step_only():
    before = kib(100)

    def prepare():
        state = kib(10)
        swapped = kib(30)
        first = [kib(1000)]

        def step():
            first.clear()
            swapped.untyped_storage().resize_(0)
            before.untyped_storage().resize_(0)
            temporary = kib(20)
            swapped.untyped_storage().resize_(30 * KIB)
            del temporary
            state.add_(1)

        return step

    assert allocator_peak(prepare) == (10 + 20 + 30) * KIB


def training_step(batch: int):
    """Operators without workspaces; returns what `allocator_peak` prepares."""

    def prepare():
        torch.manual_seed(0)
        weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

        def step():
            value = torch.ones(batch, 64)
            for weight in weights:
                value = torch.tanh(value * weight[0] + weight[1])
            value.sum().backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight.sub_(weight.grad)
                    weight.grad = None

        return step

    return prepare


def test_the_two_witnesses_agree():
    step = training_step(256)()
    step()
    with StorageObserver() as observer:
        step()
    seen = max(observed.bytes for observed in observer.seen)
    recorded = allocator_peak(training_step(256))
    # Autograd may drop an operand a moment before or after the operator has returned.
    assert seen == pytest.approx(recorded, rel=0.03)
    assert allocator_peak(training_step(512)) > 1.8 * recorded


def test_observer_counts_storages_once_and_leaves_out_views():
    with StorageObserver() as observer:
        base = torch.zeros(256)
        view = base.view(16, 16)
        row = view[3]
        row.add_(1)
        total = view.sum()
    assert [seen.bytes for seen in observer.seen] == [1024, 1024, 1028]
    assert observer.seen[1].target == "aten.add_.Tensor"
    assert observer.live_bytes() == base.nbytes + total.nbytes


def test_observer_forgets_storages_that_are_gone_or_emptied():
    with StorageObserver() as observer:
        first = torch.zeros(256)
        second = first + 1
        third = second + 1
        second.untyped_storage().resize_(0)
        del first
        fourth = third + 1
    assert observer.seen[-1].bytes == third.nbytes + fourth.nbytes
    assert observer.live_bytes() == third.nbytes + fourth.nbytes


def test_observer_does_not_keep_storages_alive():
    with HostAllocator() as allocator:
        observer = StorageObserver()
        with observer:
            tensor = torch.zeros(1024)
            del tensor
        allocator.start()
        after = torch.zeros(8)
        allocator.stop()
    assert observer.live_bytes() == 0
    assert allocator.read().tolist() == [after.nbytes]


def test_observer_watches_state_and_ignores_the_arena():
    state, arena = torch.zeros(512), torch.zeros(2048, dtype=torch.uint8)
    with StorageObserver(watch=[state], ignore=[arena]) as observer:
        arena[:1024].copy_(torch.ones(1024, dtype=torch.uint8))
    assert observer.seen[-1].bytes == state.nbytes + 1024
    assert observer.live_bytes() == state.nbytes
