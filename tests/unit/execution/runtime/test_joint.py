"""Plans that swap and recompute together, executed: the same bits as eager PyTorch, within the budget to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pg_tensile.execution.capture import capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.state import training_state
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import EventKind
from pg_tensile.planning.policies import POLICIES
from tests.unit.executing import FAST, recorded, same
from tests.unit.zoo import NAMED

# Slow enough beside the roofline's latencies that neither swapping nor recomputing alone is the best.
SLOW = replace(FAST, out_bytes_per_s=2e9, in_bytes_per_s=2e9)
STEPS = 4


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["inceptionv3", "resnet50", "densenet121", "vgg16", "bert", "gpt2", "lstm", "batch_norm", "in_place", "shared"],
)
def test_models_train_to_the_same_bits_within_a_budget(name):
    case = NAMED[name]
    model, inputs, targets, spec = case.make()
    trained = case.make()[0]
    captured = capture(trained, inputs, targets, spec, early_update=True)
    trace = captured.trace
    least, most = least_bytes(trace), footprint(trace).device_peak_bytes
    budget = least + (most - least) // 3
    plan = POLICIES["joint"]({0: trace}, SLOW, budget)[0]
    assert {event.kind for event in plan.events} >= {EventKind.SWAP_OUT, EventKind.SWAP_IN}

    reference = EagerStep(model, spec)
    torch.manual_seed(1)
    losses = [reference.step(inputs, targets).loss.clone() for _ in range(STEPS)]
    device = HostDevice(FAST, None if captured.unknown_sizes else budget)  # which the first iteration corrects
    with Executor(captured, trained, device, plan) as executor:
        torch.manual_seed(1)
        for number, loss in enumerate(losses):
            executor.recording = number > 0
            assert torch.equal(executor.step(inputs, targets).loss, loss), f"step {number}"
        assert recorded(executor).peak_bytes == footprint(executor.trace, plan).peak_bytes
        assert recorded(executor).device_peak_bytes <= budget or captured.unknown_sizes
        assert recorded(executor).passive_swap_ins == 0
        state = executor.state_dict()
    device.close()
    assert same(trained.state_dict(), model.state_dict()) and same(state.model, model.state_dict())
    kept = training_state(model, reference.optimizer).optimizer
    assert kept.keys() == state.optimizer.keys()
    assert all(same(kept[parameter], state.optimizer[parameter]) for parameter in kept)
