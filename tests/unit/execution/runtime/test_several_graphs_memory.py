"""Several graphs within one budget: what a graph does not use makes room for it."""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture, capture_evaluation
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.measure import StorageObserver
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from tests.unit.executing import (
    EagerJob,
    batch,
    captured_net,
    net,
    opened,
    peak_of,
    plan_of,
    recorded,
    same,
    validation_net,
)


@cache
def large_validation() -> tuple[Captured, int]:
    """An evaluation that needs more memory than training, and how many bytes of what it does not use are there."""
    captured = validation_net(200)
    persistent = captured_net().trace.persistent
    resident = int(captured_net().trace.tensor_bytes[persistent].sum())
    used = int(captured.trace.tensor_bytes[captured.trace.persistent].sum())
    return captured, resident - used


def test_what_a_graph_does_not_use_makes_room(start):
    captured, unused = large_validation()
    needed = peak_of(captured, NO_EVENTS)
    assert needed > peak_of(captured_net(), NO_EVENTS) and unused > 0
    reference = EagerJob()
    for spare, goes in ((unused, 0), (unused - 1, 1), (0, unused)):
        executor = start("none", budget=needed + spare)
        executor.add(captured)
        executor.recording = True
        torch.manual_seed(1)
        executor.step(*batch(0))
        executor.evaluate(*batch(0, 200))
        record = recorded(executor)
        assert record.bytes_out >= goes and (goes or not record.bytes_out)
        assert {transfer.tensor for transfer in record.transfers} <= {-1}
        assert record.device_peak_bytes <= needed + spare
        executor.step(*batch(1))
        assert recorded(executor).bytes_in == record.bytes_out, "what went comes back, and nothing else"
        assert executor.inspect().copies == {}
    torch.manual_seed(1)
    reference.step(*batch(0)), reference.step(*batch(1))
    assert same(executor.state_dict().model, reference.state())


def test_one_byte_less_than_the_peak_is_refused_and_nothing_has_happened(start):
    captured, _ = large_validation()
    expected = footprint(captured.trace)
    executor = start("none", budget=expected.device_peak_bytes - 1)
    executor.add(captured)
    torch.manual_seed(1)
    executor.step(*batch(0))
    with pytest.raises(OutOfDeviceMemoryError) as info:
        executor.evaluate(*batch(0, 200))
    error = info.value
    assert error.operator == captured.trace.operator_label(int(expected.steps[expected.peak_step]))
    assert (error.in_use + error.requested, error.budget) == (
        expected.device_peak_bytes,
        error.in_use + error.requested - 1,
    )
    executor.step(*batch(1))
    reference = EagerJob()
    torch.manual_seed(1)
    reference.step(*batch(0)), reference.step(*batch(1))
    assert same(executor.state_dict().model, reference.state())


def test_an_evaluation_fits_where_the_model_does_not():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    spec, x, model = (
        StepSpec(lambda output: output.square().sum(), OptimizerSpec("sgd", 0.1)),
        torch.randn(1, 64),
        make(),
    )
    captured = capture(model, [x], [], spec)
    plan, reference = plan_of("swap_all", captured.trace), EagerStep(make(), spec)
    budget = peak_of(captured, plan)
    assert budget < sum(parameter.nbytes for parameter in model.parameters()) // 2
    with opened(budget) as device, Executor(captured, model, device, plan) as executor:
        executor.add(capture_evaluation(make(), [x], (), spec))
        for _ in range(3):
            assert torch.equal(executor.step([x]).loss, reference.step([x], []).loss)
            result = executor.evaluate([x])
            with torch.no_grad():
                assert torch.equal(result.outputs[0], reference.model(x))
        assert executor.counters.peak_bytes <= budget
    assert same(model.state_dict(), reference.model.state_dict())


def test_an_observer_sees_the_same_memory(start):
    captured, unused = large_validation()
    executor = start("none", budget=peak_of(captured, NO_EVENTS))
    executor.add(captured)
    executor.recording = True
    inputs, targets = batch(0, 200)
    executor.step(*batch(0))
    executor.evaluate(inputs, targets)
    assert recorded(executor).bytes_out == unused
    watched = [*executor.inspect().persistents.values()]
    copies = [copy.memory for copy in executor.inspect().copies.values()]
    with StorageObserver(watch=watched, ignore=[*inputs, *targets, *copies]) as observer:
        result = executor.evaluate(inputs, targets)
    assert not recorded(executor).transfers
    seen = {observed.target: observed.bytes for observed in observer.seen}
    for operator, registered in enumerate(recorded(executor).footprint.tolist()):
        target = captured.trace.target[operator]
        assert seen.get(target, registered) == registered, target
    del result
    assert observer.live_bytes() == executor.device_bytes


def test_all_memory_goes_with_the_executor():
    model = net()
    with opened() as device:
        executor = Executor(captured_net(), model, device, plan_of("swap_all", captured_net().trace))
        executor.add(captured_net(3)), executor.add(validation_net())
        executor.step(*batch(0)), executor.evaluate(*batch(0, 5)), executor.step(*batch(0, 3))
        inside = executor.inspect()
        tensors = [*inside.persistents.values(), *inside.host_memory]
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]
        count = len(inside.persistents)
        del tensors, inside
        executor.close()
        gc.collect()
        assert len(refs) > count and all(ref.expired() for ref in refs)
        assert executor.device_bytes == 0
    assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter] * 7
