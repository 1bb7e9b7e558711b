"""The executor and the model it holds: its state, lending it, giving it back."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from pg_tensile.errors import CheckpointError, ExecutorError, OutOfDeviceMemoryError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.state import TrainingState, training_state
from pg_tensile.planning.plan.memory import footprint
from tests.unit.executing import (
    FAST,
    SPEC,
    batch,
    captured_net,
    eager,
    net,
    opened,
    plan_of,
    run,
    same,
)
from tests.unit.zoo import NAMED

# ---- state ----


def test_a_job_goes_on_from_its_state_here_and_in_eager(start, policy):
    reference, losses = eager(4)
    executor = start(policy)
    first = run(executor, 2)
    random_state = torch.get_rng_state()
    state = executor.state_dict()

    resumed = start("swap_all", model=net(seed=9))
    resumed.load_state_dict(state)
    continued = EagerStep(net(seed=8), SPEC)
    continued.model.load_state_dict(state.model)
    names = [name for name, _ in continued.model.named_parameters()]
    states = {number: state.optimizer[name] for number, name in enumerate(names) if name in state.optimizer}
    continued.optimizer.load_state_dict(continued.optimizer.state_dict() | {"state": states})
    for job in (executor.step, resumed.step, continued.step):
        torch.set_rng_state(random_state)
        later = [job(*batch(number)).loss.clone() for number in (2, 3)]
        assert all(map(torch.equal, [*first, *later], losses))
    assert same(executor.state_dict().model, reference.model.state_dict())
    assert same(resumed.state_dict().model, reference.model.state_dict())


def test_an_eager_job_goes_on_under_a_plan(start):
    losses = eager(4)[1]
    reference = eager(2)[0]
    random_state = torch.get_rng_state()
    executor = start("recompute_all", model=net(seed=5))
    executor.load_state_dict(training_state(reference.model, reference.optimizer))
    torch.set_rng_state(random_state)
    assert all(map(torch.equal, [executor.step(*batch(number)).loss for number in (2, 3)], losses[2:]))


def test_state_is_the_callers_own(start):
    executor = start("swap_all")
    state = executor.state_dict()
    kept = copy.deepcopy(state)
    run(executor, 2)
    assert same(state.model, kept.model)
    for tensor in state.model.values():
        tensor.zero_()
    assert not executor.state_dict().model["conv.weight"].eq(0).all()


def test_a_state_that_does_not_fit_changes_nothing(start):
    executor = start("swap_all")
    run(executor, 1)
    good = executor.state_dict()
    lacking = {name: value for name, value in good.model.items() if name != "conv.bias"}
    reshaped = {**good.model, "conv.bias": torch.zeros(3)}
    for state, message in (
        (TrainingState(lacking, good.optimizer), "conv.bias"),
        (TrainingState(reshaped, good.optimizer), "conv.bias"),
        (TrainingState(good.model, {"conv.bias": {"momentum": torch.zeros(6)}}), 'keeps no "momentum"'),
        (TrainingState(good.model, {"conv.bias": {"exp_avg": torch.zeros(6)}}), 'lacks "exp_avg_sq" of "conv.bias"'),
        (TrainingState(good.model, {"conv.bias": {"exp_avg": torch.zeros(2)}}), r"has shape \[2\], not \[6\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            executor.load_state_dict(state)
        now = executor.state_dict()
        assert same(now.model, good.model)
        assert all(same(now.optimizer[name], good.optimizer[name]) for name in good.optimizer)


# ---- whose model it is ----


def test_a_held_model_cannot_be_used_by_accident(start, policy):
    model = net()
    executor = start(policy, model=model)
    run(executor, 1)
    weight = model.get_parameter("conv.weight")
    for use in (
        lambda: model(*batch()[0]),
        model.state_dict,
        lambda: copy.deepcopy(model),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight[0],
        lambda: weight.detach().numpy(),
        lambda: repr(weight),
        lambda: torch.ops.aten.neg.default(weight),
        lambda: model.double(),
        lambda: model.load_state_dict(net().state_dict()),
        lambda: Executor(captured_net(), model, HostDevice(FAST)),
    ):
        with pytest.raises(ExecutorError, match=r"another executor holds|held by an executor"):
            use()
    assert (weight.shape, weight.dtype, weight.device.type) == ((6, 3, 3, 3), torch.float32, "cpu")
    assert isinstance(weight, nn.Parameter)
    assert len(list(model.parameters())) == 7
    assert same(executor.state_dict().model, eager(1)[0].model.state_dict())


def test_a_model_is_lent_for_validation(start, policy):
    model = net()
    executor = start(policy, model=model)
    reference = EagerStep(net(), SPEC)
    for step in range(3):
        torch.manual_seed(step)
        expected = reference.step(*batch(step)).loss
        torch.manual_seed(step)
        assert torch.equal(executor.step(*batch(step)).loss, expected)
        with executor.resident(), torch.no_grad():
            seen = model.eval()(*batch(9)[0])
            with pytest.raises(ExecutorError, match="lent out"):
                executor.step(*batch(0))
        assert torch.equal(seen, reference.model.eval()(*batch(9)[0]))
        model.train(), reference.model.train()
        with pytest.raises(ExecutorError):
            model(*batch()[0])


def test_what_is_changed_in_a_lent_model_counts(start, policy):
    model = net()
    executor = start(policy, model=model)
    reference = EagerStep(net(), SPEC)
    run(executor, 1)
    torch.manual_seed(1)
    reference.step(*batch(0))
    for changed, lent in ((reference.model, False), (model, True)):
        with executor.resident() if lent else torch.no_grad(), torch.no_grad():
            changed.get_parameter("conv.weight").mul_(2)
            changed.get_parameter("head.bias").data = torch.ones(10)
            changed.get_buffer("norm.running_mean").zero_()
    torch.manual_seed(2)
    expected = reference.step(*batch(1)).loss
    torch.manual_seed(2)
    assert torch.equal(executor.step(*batch(1)).loss, expected)
    assert same(executor.state_dict().model, reference.model.state_dict())


def test_a_model_that_does_not_fit_is_not_lent():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    spec = StepSpec(lambda output: output.square().sum(), OptimizerSpec("sgd", 0.1))
    x, model = torch.randn(1, 64), make()
    captured, reference = capture(make(), [x], [], spec), EagerStep(make(), spec)
    plan = plan_of("swap_all", captured.trace)
    budget = footprint(captured.trace, plan).device_peak_bytes
    assert budget < sum(parameter.nbytes for parameter in model.parameters())
    with opened(budget) as device, Executor(captured, model, device, plan) as executor:
        for _ in range(3):
            assert torch.equal(executor.step([x]).loss, reference.step([x], []).loss)
            with pytest.raises(OutOfDeviceMemoryError, match="resident"), executor.resident():
                pytest.fail("the model was lent")
            with pytest.raises(ExecutorError, match="held by an executor"):
                model(x)
    assert same(model.state_dict(), reference.model.state_dict())


def test_a_closed_executor_leaves_an_ordinary_model(policy):
    model, captured = net(), captured_net()
    device = HostDevice(FAST)
    executor = Executor(captured, model, device, plan_of(policy, captured.trace))
    run(executor, 2)
    executor.close()
    executor.close()
    device.close()
    reference = eager(2)[0]
    assert same(model.state_dict(), reference.model.state_dict())
    assert [type(tensor) for tensor in model.parameters()] == [nn.Parameter] * 7
    assert [type(tensor) for tensor in model.buffers()] == [Tensor] * 3
    follow = EagerStep(model, SPEC)
    assert follow.step(*batch(3)).loss.isfinite()
    copy.deepcopy(model)
    for use in (lambda: executor.step(*batch()), executor.state_dict, lambda: executor.resident().__enter__()):
        with pytest.raises(ExecutorError, match="closed"):
            use()


def test_a_forgotten_executor_gives_its_model_back():
    model, captured = net(), captured_net()
    executor = Executor(captured, model, HostDevice(FAST), plan_of("swap_all", captured.trace))
    run(executor, 1)
    del executor
    gc.collect()
    assert same(model.state_dict(), eager(1)[0].model.state_dict())


@pytest.mark.long
def test_the_interpreter_ends_with_an_open_executor():
    program = """
from tests.unit.execution.runtime.test_executor import FAST, HostDevice, Executor, batch, captured_net, net, plan_of
captured = captured_net()
executor = Executor(captured, net(), HostDevice(FAST), plan_of("swap_all", captured.trace))
print(executor.step(*batch()).loss.isfinite().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_defaults_of_the_caller_do_not_count(start):
    executor = start("swap_all")
    expected = eager(2)[1]
    data = [batch(step) for step in range(2)]
    torch.manual_seed(1)
    with torch.device("meta"):
        losses = [executor.step(*tensor).loss for tensor in data]
        state = executor.state_dict()
        executor.load_state_dict(state)
    assert all(map(torch.equal, losses, expected))
    assert {value.device.type for value in state.model.values()} == {"cpu"}


def test_tied_parameters_are_one_tensor_and_stay_tied():
    model, inputs, targets, spec = NAMED["shared"].make()
    captured = capture(model, inputs, targets, spec)
    of = model.get_parameter
    with opened() as device:
        executor = Executor(captured, model, device, plan_of("swap_all", captured.trace))
        executor.step(inputs, targets)
        with executor.resident():
            assert of("again.weight") is of("first.weight")
        executor.close()
    assert of("again.weight") is of("first.weight")
    assert not of("frozen.weight").requires_grad
    assert of("first.weight").requires_grad


def test_another_model_is_refused():
    captured = captured_net()
    with opened() as device:
        with pytest.raises(ExecutorError, match=r'the model has no parameter "conv\.weight"'):
            Executor(captured, nn.Linear(3, 3), device)
        wider = net()
        wider.conv = nn.Conv2d(3, 6, 5)
        with pytest.raises(ExecutorError, match=r'"conv\.weight" is torch.float32 \[6, 3, 5, 5\], but was captured as'):
            Executor(captured, wider, device)
        wider(torch.randn(2, 3, 10, 10))
