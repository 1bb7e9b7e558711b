"""Captured evaluations compute what PyTorch computes in eval mode without gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import StepSpec, capture, capture_evaluation, capture_inference
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.planning.trace.trace import Kind, Phase
from tests.unit.executing import SPEC, batch, net, opened
from tests.unit.zoo import NAMED, names
from tests.unit.zoo_habits import HABITS
from tests.unit.zoo_layers import LAYERS

ZOO = {**NAMED, **LAYERS, **HABITS}


def same(tensor: Tensor, expected: Tensor) -> bool:
    return tensor.dtype == expected.dtype and torch.allclose(tensor, expected, rtol=0, atol=0, equal_nan=True)


def eager(model: nn.Module, inputs, targets, spec: StepSpec) -> tuple[Tensor, list[Tensor]]:
    """The loss and the tensors in the picked output, as anybody would compute them."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=spec.autocast == "bf16"):
        picked = spec.pick(model.eval()(*inputs))
        loss = spec.loss(picked, *targets)
    return loss, [leaf for leaf in tree_leaves(picked) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", names(name for name in ZOO if name != "penalised"))  # which needs gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_evaluates_as_pytorch_does(name):
    """Long for deep networks, which have no operators of their own."""
    model, inputs, targets, spec = ZOO[name].make()
    twin = ZOO[name].make()[0]
    captured = capture_evaluation(model, inputs, targets, spec, with_loss=True)
    assert model.training
    with opened() as device, Executor(captured, model, device) as executor:
        torch.manual_seed(1)
        seen = [executor.evaluate(inputs, targets) for _ in range(2)]
    torch.manual_seed(1)
    for result in seen:
        loss, outputs = eager(twin, inputs, targets, spec)
        assert result.loss is not None and same(result.loss, loss)
        assert len(result.outputs) == len(outputs) and all(map(same, result.outputs, outputs))


def test_the_trace_is_forward_only_and_changes_nothing():
    captured = capture_evaluation(net(), *batch(), SPEC)
    trace = captured.trace
    assert not captured.trains and captured.loss is not None and len(captured.outputs) == 1
    assert set(trace.phase.tolist()) == {Phase.FORWARD}
    assert {Kind(kind) for kind in trace.tensor_kind} == {Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.TEMPORARY}
    assert not trace.tensor_writes[trace.persistent].any()
    assert not trace.random.any(), "dropout is off"
    assert [trace.tensor_name[access.tensor] for access in trace.operators[0].accesses] == ["input0", "target0"]
    names = {persistent.name for persistent in captured.persistents}
    assert names == {
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    } | {
        "head.weight",
        "head.bias",
    }


def test_without_targets_there_is_no_loss():
    captured = capture_evaluation(net(), batch()[0], (), SPEC)
    assert captured.loss is None and captured.given == captured.inputs and captured.returned == captured.outputs
    model = net()
    with opened() as device, Executor(captured, model, device) as executor:
        result = executor.evaluate(batch()[0])
    assert result.loss is None
    with torch.no_grad():
        assert torch.equal(result.outputs[0], model.eval()(*batch()[0]))


@pytest.mark.parametrize("training", [True, None])
def test_the_mode_may_be_another(training):
    model = net()
    model.norm.eval()
    captured = capture_evaluation(model, *batch(), SPEC, training=training)
    assert captured.trace.random.any(), "dropout is on"
    statistics = {captured.persistents[t].name for t in range(captured.trace.tensor_count)
                  if captured.trace.persistent[t] and captured.trace.tensor_writes[t]}  # fmt: skip
    assert bool(statistics) == bool(training), "batch norm keeps its statistics if it is in training mode"
    twin = net()
    with opened() as device, Executor(captured, model, device) as executor:
        torch.manual_seed(3)
        result = executor.evaluate(*batch())
        state = executor.state_dict()
    twin.norm.train(training is True)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = twin(*batch()[0])
    assert torch.equal(result.outputs[0], expected)
    # Nobody reads the number of batches, so it counts in a training step only if the model counts it.
    assert all(torch.equal(state.model[name], value) for name, value in twin.state_dict().items())


def test_the_whole_batch_is_evaluated_whatever_the_accumulation():
    spec = replace(SPEC, accumulation=2)
    captured = capture_evaluation(net(), *batch(), spec)
    model = net()
    with opened() as device, Executor(captured, model, device) as executor:
        result = executor.evaluate(*batch())
    loss, outputs = eager(model, *batch(), spec)
    assert result.loss is not None
    assert torch.equal(result.loss, loss) and torch.equal(result.outputs[0], outputs[0])


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"logits": self.linear(x), "states": (x, self.linear.bias), "name": "several"}


def test_all_tensors_of_an_output_are_returned():
    model, x = Several(), torch.randn(2, 4)
    captured = capture_evaluation(model, [x], (), StepSpec(F.mse_loss))
    bias, logits = model.linear.bias.detach().clone(), model.linear(x).detach()
    with opened() as device, Executor(captured, model, device) as executor:
        outputs = executor.evaluate([x]).outputs
    assert all(map(torch.equal, outputs, (logits, x, bias)))
    assert outputs[2].data_ptr() != model.linear.bias.data_ptr(), "the caller's own"
    picked = capture_evaluation(model, [x], [x], StepSpec(F.mse_loss, output_key="logits"))
    assert len(picked.outputs) == 1 and picked.loss is not None


def test_a_frozen_model_is_evaluated_but_not_trained():
    model = net().requires_grad_(False)
    assert capture_evaluation(model, *batch(), SPEC).loss is not None
    with pytest.raises(CaptureError, match="no parameters to train"):
        capture(model, *batch(), SPEC)


def test_a_model_of_buffers_alone_is_evaluated() -> None:
    model, x = nn.BatchNorm1d(4, affine=False).eval(), torch.randn(2, 4)
    captured, expected = capture_inference(model, [x]), model(x)
    with opened() as device, Executor(captured, model, device) as executor:
        assert torch.equal(executor.evaluate([x]).outputs[0], expected)


def test_what_cannot_be_evaluated_is_refused():
    class Name(nn.Linear):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            return "nothing"

    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    x = torch.randn(2, 4)
    with pytest.raises(CaptureError, match="type str and has no tensor in it"):
        capture_evaluation(Name(4, 4), [x], (), SPEC)
    with pytest.raises(CaptureError, match="reads the value of a tensor"):
        capture_evaluation(Branch(4, 4), [x], (), SPEC)
    with pytest.raises(CaptureError, match="not one element"):
        capture_evaluation(nn.Linear(4, 4), [x], [x], StepSpec(lambda output, target: output - target))
    with pytest.raises(CaptureError, match="at least one input"):
        capture_evaluation(nn.Linear(4, 4), [], (), SPEC)
    with pytest.raises(CaptureError, match="no parameters"):
        capture_evaluation(nn.ReLU(), [x], (), SPEC)
