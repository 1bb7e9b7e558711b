"""The eager reference is ordinary PyTorch: what a plain training loop computes, it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec
from pg_tensile.execution.capture.eager import EagerStep, make_optimizer


def batch() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return model, torch.randn(6, 8), torch.randint(0, 3, (6,))


def by_hand(spec: OptimizerSpec, parameters: Any) -> Optimizer:
    """The optimizer as one would write it, all parameters in one group, not fused."""
    rate = spec.learning_rate
    if spec.name == "sgd":
        return SGD(parameters, rate, spec.momentum, weight_decay=spec.weight_decay or 0, nesterov=spec.nesterov)
    kind = Adam if spec.name == "adam" else AdamW
    return kind(parameters, rate, spec.betas, spec.eps, 0.01 if spec.name == "adamw" else 0, spec.amsgrad)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec("sgd", 0.1),
        OptimizerSpec("sgd", 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        OptimizerSpec("adam", 0.01, betas=(0.8, 0.9)),
        OptimizerSpec("adamw", 0.01, amsgrad=True),
    ],
    ids=lambda optimizer: f"{optimizer.name}-{optimizer.momentum}",
)
def test_trains_like_a_loop_written_by_hand(optimizer):
    model, x, y = batch()
    twin = copy.deepcopy(model)
    eager = EagerStep(model, StepSpec(F.cross_entropy, optimizer, clip=0.5))
    torch.manual_seed(3)
    losses = [eager.step([x], [y]).loss.item() for _ in range(5)]
    other = by_hand(optimizer, twin.parameters())
    torch.manual_seed(3)
    for loss in losses:
        other.zero_grad()
        value = F.cross_entropy(twin(x), y)
        value.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        other.step()
        assert loss == pytest.approx(value.item(), rel=1e-6)
    for trained, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-7)


def test_has_a_fused_group_for_each_parameter_that_is_trained():
    model, _, _ = batch()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerSpec())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert all(group["fused"] and group["weight_decay"] == 0.01 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_averages_the_parameters_of_all_steps_the_later_ones_more(name):
    model, x, y = batch()
    eager = EagerStep(model, StepSpec(F.cross_entropy, OptimizerSpec(name, 0.1, averaging=3)), one_group=True)
    expected = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(1, 7):
        eager.step([x], [y])
        weight = 4 / (3 + step)
        for average, parameter in zip(expected, model.parameters(), strict=True):
            average.mul_(1 - weight).add_(parameter.detach(), alpha=weight)
        if step == 1:
            assert all(map(torch.equal, expected, model.parameters()))
    for parameter, average in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(eager.optimizer.state[parameter]["average"], average)


def test_averages_parameters_of_any_type():
    model, x, y = batch()
    spec = StepSpec(F.cross_entropy, OptimizerSpec(averaging=7))
    eager = EagerStep(model.double(), spec)
    eager.step([x.double()], [y])
    averages = [eager.optimizer.state[parameter]["average"] for parameter in model.parameters()]
    assert all(map(torch.equal, averages, model.parameters()))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_one_group_gives_the_same_bits(name):
    model, x, y = batch()
    model[2] = nn.Identity()
    twin = copy.deepcopy(model)
    spec = StepSpec(F.cross_entropy, OptimizerSpec(name, 0.1, momentum=0.9 if name == "sgd" else 0.0))
    steps = EagerStep(model, spec), EagerStep(twin, spec, one_group=True)
    assert len(steps[1].optimizer.param_groups) == 1
    for _ in range(3):
        assert torch.equal(*(step.step([x], [y]).loss for step in steps))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_accumulates_the_mean_of_equal_parts():
    model, x, y = batch()
    model[2] = nn.Identity()
    twin = copy.deepcopy(model)
    whole = EagerStep(model, StepSpec(F.cross_entropy, OptimizerSpec("sgd", 0.1)))
    parts = EagerStep(twin, StepSpec(F.cross_entropy, OptimizerSpec("sgd", 0.1), accumulation=3, returns_outputs=True))
    loss, result = whole.step([x], [y]).loss, parts.step([x], [y])
    assert loss.item() == pytest.approx(result.loss.item(), rel=1e-6)
    assert [output.shape for output in result.outputs] == [(2, 3)] * 3
    for trained, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)


def test_autocast_computes_in_bfloat16_and_updates_in_float32():
    model, x, y = batch()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    result = EagerStep(model, StepSpec(F.cross_entropy, autocast="bf16")).step([x], [y])
    assert seen == [torch.bfloat16]
    assert result.loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_equal_seeds_give_equal_bits():
    results = []
    for _ in range(2):
        model, x, y = batch()
        eager = EagerStep(model, StepSpec(F.cross_entropy))
        torch.manual_seed(7)
        results.append([eager.step([x], [y], 0.1 / (1 + step)).loss.item() for step in range(4)])
    assert results[0] == results[1]


def test_a_parameter_without_a_gradient_is_left_alone():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Half()
    before = copy.deepcopy(model.state_dict())
    EagerStep(model, StepSpec(F.cross_entropy)).step([torch.randn(2, 8)], [torch.tensor([0, 1])])
    assert torch.equal(model.unused.weight, before["unused.weight"])
    assert not torch.equal(model.used.weight, before["used.weight"])


def test_refuses_a_loss_that_is_none():
    model, x, y = batch()
    with pytest.raises(CaptureError, match="not one element"):
        EagerStep(model, StepSpec(lambda output, target: output)).step([x], [y])
