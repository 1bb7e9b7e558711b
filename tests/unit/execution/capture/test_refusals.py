"""Models that would silently be wrong as static graphs are refused, with their line and something to do."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import CaptureError, DeviceError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from tests.unit.interpreter import Interpreter

SQUARE = StepSpec(lambda output: output.float().pow(2).mean())
ROWS = (4, 8)
OUTSIDE = nn.Parameter(torch.ones(8))


class Model(nn.Module):
    """A linear layer and whatever `call(self, x)` makes of it; `parts` are attributes."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.call = call
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter) and name == "buffer":
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def refusal(model: Any, inputs: Any = None, spec: StepSpec = SQUARE, targets: Any = ()) -> CaptureError:
    """Return the error that capturing raises."""
    with pytest.raises(CaptureError) as caught:
        capture(model, [torch.full(ROWS, 0.5)] if inputs is None else inputs, targets, spec)
    error = caught.value
    assert error.message[0].islower() or error.message.startswith('"'), error.message
    assert error.hint is None or error.hint[0].isupper()
    return error


# ---- the data decides: refused with the line ----


def reads_item(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * x.sum().item()


def branches(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return self.inner(x)
    return x


def selects(self: Any, x: Tensor) -> Tensor:
    return self.inner(x)[x > 0]


def converts(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * x.tolist()[0][0]


def leaves_pytorch(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * torch.from_numpy(x.numpy())


def is_sparse(self: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), self.inner(x).t())


def is_nested(self: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([self.inner(x)[0]]).to_padded_tensor(0.0)


def is_quantized(self: Any, x: Tensor) -> Tensor:
    return self.inner(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())


def is_mkldnn(self: Any, x: Tensor) -> Tensor:
    return self.inner(x.to_mkldnn().to_dense())


def fails(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) / (1 // 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (reads_item, "reads the value of a tensor"),
        (branches, "reads the value of a tensor"),
        (selects, "shape of a tensor depends on the data"),
        (converts, "reads the value of a tensor"),
        (leaves_pytorch, "failed while it was captured"),
        (is_sparse, "cannot trace"),
        (is_nested, "cannot trace"),
        (is_quantized, "cannot trace"),
        (is_mkldnn, "cannot trace"),
        (fails, "ZeroDivisionError"),
    ],
)
def test_names_the_line_of_what_cannot_be_static(call, message):
    error = refusal(Model(call))
    line = call.__code__.co_firstlineno + 1
    assert message in error.message
    assert error.source == f"{Path(__file__).name}:{line}"
    assert error.message.endswith(f"({error.source})")
    assert error.hint is not None and "policy none" in error.hint


# ---- randomness that PyTorch's generator does not know ----


def draws_rarely(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if random.random() < 0.999999 else x


def draws_with_numpy(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + torch.from_numpy(np.random.rand(8).astype(np.float32))


def draws_from_its_own(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) if self.generator.random() < 2 else x


def draws_from_another(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) + torch.rand(8, generator=self.generator)


def seeds(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(self.inner(x))


def seeds_aside(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn(ROWS)
    return self.inner(x) + noise


class Recomputed(torch.autograd.Function):
    """A checkpoint of somebody's own, with dropout inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            return torch.autograd.grad(F.dropout(again, 0.5), again, gradient)[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(draws_rarely), "with Python or NumPy"),
        (Model(draws_with_numpy), "with Python or NumPy"),
        (Model(draws_from_its_own, generator=random.Random(1)), "generator of its own"),
        (Model(draws_from_its_own, generator=np.random.default_rng(1)), "generator of its own"),
        (Model(draws_from_another, generator=torch.Generator()), "generator of its own"),
        (Model(seeds), "seeds PyTorch's generator"),
        (Model(seeds_aside), "seeds PyTorch's generator"),
        (Model(lambda self, x: Recomputed.apply(self.inner(x))), "repeats random operators"),
        (Model(lambda self, x: self.inner(x) * time.perf_counter()), "something different each time"),
    ],
)
def test_refuses_random_numbers_that_would_be_frozen(model, message):
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert message in refusal(model).message
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_a_generator_of_the_model_is_put_back():
    generator = random.Random(1)
    before = generator.getstate()
    refusal(Model(draws_from_its_own, generator=generator))
    assert generator.getstate() == before


# ---- state that a call leaves for the next ----


def counts(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.inner(x) * self.count


def starts_differently(self: Any, x: Tensor) -> Tensor:
    if not self.started:
        self.started = True
        return self.inner(x)
    return self.inner(x).tanh()


def remembers(self: Any, x: Tensor) -> Tensor:
    self.hidden = torch.tanh(self.inner(x) + self.hidden).detach()
    return self.inner(x) + self.hidden


def collects(self: Any, x: Tensor) -> Tensor:
    self.memory.append(self.inner(x).detach())
    return self.inner(x) + sum(self.memory)


def caches(self: Any, x: Tensor) -> Tensor:
    if self.cache is None:
        self.cache = torch.arange(8.0)
    return self.inner(x) + self.cache


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(counts, count=0), "something different each time"),
        (Model(starts_differently, started=False), "something different each time"),
        (Model(remembers, hidden=torch.zeros(ROWS)), "left behind"),
        (Model(collects, memory=[]), "left behind"),
        (Model(caches, cache=None), "left behind"),
    ],
)
def test_refuses_attributes_that_steer_the_next_call(model, message):
    assert message in refusal(model).message


def replaces_parameter(self: Any, x: Tensor) -> Tensor:
    self.inner.weight = nn.Parameter(self.inner.weight * 0.9)
    return self.inner(x)


def replaces_data(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.data = self.inner.weight.data * 0.9
    return self.inner(x)


def grows(self: Any, x: Tensor) -> Tensor:
    self.buffer = torch.cat([self.buffer, x.mean(0)])
    return self.inner(x)


def keeps_its_graph(self: Any, x: Tensor) -> Tensor:
    self.buffer = self.inner(x).mean(0)
    return self.inner(x)


def forgets(self: Any, x: Tensor) -> Tensor:
    self.buffer = None
    return self.inner(x)


def turns(self: Any, x: Tensor) -> Tensor:
    self.buffer = self.buffer.t()
    return self.inner(x)


def swaps_data(self: Any, x: Tensor) -> Tensor:
    self.buffer.data = self.buffer.data + 1
    return self.inner(x)


def takes_another(self: Any, x: Tensor) -> Tensor:
    self.buffer = self.inner.bias.detach()
    return self.inner(x)


@pytest.mark.parametrize("call", [replaces_parameter, replaces_data])
def test_refuses_parameters_that_are_replaced(call):
    model = Model(call)
    weight = model.inner.weight
    assert 'replaces its parameter "inner.weight"' in refusal(model).message
    assert model.inner.weight is weight


@pytest.mark.parametrize("call", [grows, keeps_its_graph, forgets, turns, swaps_data, takes_another])
def test_refuses_buffers_that_are_assigned_something_else(call):
    buffer = torch.zeros(8, 8) if call is turns else torch.zeros(8)
    model = Model(call, buffer=buffer)
    assert 'assigns its buffer "buffer"' in refusal(model).message
    assert model.buffer is buffer and model.buffer.shape == buffer.shape and not model.buffer.any()


def changes_plain_tensor(self: Any, x: Tensor) -> Tensor:
    self.plain += 1
    return self.inner(x) * self.plain


def averages(self: Any, x: Tensor) -> Tensor:
    self.buffer = 0.9 * self.buffer + x.mean(0)
    return self.inner(x) + self.buffer


def test_refuses_to_change_what_no_checkpoint_would_have():
    model = Model(changes_plain_tensor, plain=torch.zeros(8))
    error = refusal(model)
    assert "registered buffers" in error.message
    assert error.source is not None and Path(__file__).name in error.source
    assert torch.equal(vars(model)["plain"], torch.zeros(8))


def test_a_buffer_assigned_anew_is_followed():
    torch.manual_seed(0)
    model, twin = (Model(averages, buffer=torch.ones(8)) for _ in range(2))
    x = torch.randn(ROWS)
    twin.load_state_dict(model.state_dict())
    interpreter = Interpreter(capture(model, [x], [], SQUARE), model)
    eager = EagerStep(twin, SQUARE)
    for _ in range(4):
        assert torch.equal(interpreter.step([x], []), eager.step([x], []).loss)
    assert torch.equal(model.get_buffer("buffer"), torch.ones(8)) and not torch.equal(
        twin.get_buffer("buffer"), torch.ones(8)
    )


# ---- parameters that are not where they should be ----


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(lambda self, x: self.inner(x) * OUTSIDE), "not one of its registered parameters"),
        (Model(lambda self, x: self.inner(x) * self.all[0], all=[OUTSIDE]), "not one of its registered parameters"),
        (nn.ReLU(), "no parameters to train"),
        (nn.Linear(8, 8).requires_grad_(False), "no parameters to train"),
        (nn.LazyLinear(8), "has no size yet"),
        (nn.Linear(8, 8, device="meta"), "on the device meta"),
        (Model(lambda self, x: x, other=nn.Parameter(torch.empty(1, device="meta"))), "on the device meta|is on meta"),
        (Model(lambda self, x: x, other=nn.Parameter(torch.ones(8, dtype=torch.complex64))), "complex64"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), "momentum=None"),
        (torch.nn.DataParallel(nn.Linear(8, 8)), "DataParallel"),
        (lambda x: x, "not a module"),
        (nn.Linear(8, 8).half().float().to_empty(device="cpu").requires_grad_(False), "no parameters to train"),
    ],
)
def test_refuses_models_that_cannot_be_trained_this_way(model, message):
    import re

    assert re.search(message, refusal(model).message)


def test_refuses_views_of_parameters_made_before():
    model = Model(lambda self, x: self.inner(x) + self.view)
    model.view = model.inner.weight.detach()[0]
    assert '"inner.weight" is used in another way' in refusal(model).message
    model = Model(lambda self, x: x @ self.pair[0])
    vars(model)["pair"] = (model.inner.weight,)
    assert '"inner.weight" is used in another way' in refusal(model).message
    model = Model(lambda self, x: self.inner(x))
    model.part = nn.Parameter(model.inner.weight.data[:2])
    assert "share memory" in refusal(model).message


def test_refuses_what_pytorch_has_compiled():
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(nn.Linear(8, 8))
    assert "TorchScript" in refusal(scripted).message
    module = nn.Linear(8, 8)
    module._compiled_call_impl = module.forward  # as module.compile() does, which needs a C++ compiler to be called
    assert "is compiled" in refusal(module).message


def test_refuses_hooks_after_the_gradient():
    model = nn.Linear(8, 8)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "has hooks" in refusal(model).message


def test_refuses_sparse_gradients():
    tokens = torch.randint(0, 10, (4,))
    assert "sparse" in refusal(nn.Embedding(10, 8, sparse=True), [tokens]).message


# ---- inputs, losses, options ----


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "at least one input"),
        ([3], "input 0 is of type int"),
        ([np.zeros(ROWS)], "input 0 is of type ndarray"),
        ([torch.zeros(ROWS).to_sparse()], "input 0 is of layout sparse_coo"),
        ([torch.zeros(ROWS, dtype=torch.complex64).conj()], "conjugate"),
        ([torch.zeros(4, 9)], "failed while it was captured"),
    ],
)
def test_refuses_inputs_that_do_not_fit(inputs, message):
    assert message in refusal(nn.Linear(8, 8), inputs).message


def test_refuses_batches_that_the_model_refuses():
    message = refusal(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), [torch.zeros(1, 8)]).message
    assert "Expected more than 1 value per channel" in message


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, "not one element"),
        (lambda output: 1.0, "of type float"),
        (lambda output: output.argmax(), "not a real number"),
        (lambda output: output.detach().sum(), "does not depend on any parameter"),
        (lambda output: OUTSIDE.sum(), "not one of its registered parameters"),
    ],
)
def test_refuses_losses_that_cannot_be_trained(loss, message):
    assert message in refusal(nn.Linear(8, 8), spec=StepSpec(loss)).message


def test_refuses_a_loss_that_no_parameter_contributes_to():
    spec = StepSpec(lambda output: torch.ones((), requires_grad=True) * 2)
    assert "no parameter has a gradient" in refusal(nn.Linear(8, 8), spec=spec).message


def test_refuses_outputs_that_are_not_there():
    model = Model(lambda self, x: {"y": self.inner(x)})
    assert "have no 'z'" in refusal(model, spec=StepSpec(lambda y: y.sum(), output_key="z")).message
    pair = Model(lambda self, x: (self.inner(x), x))
    spec = StepSpec(lambda both: both[0].sum(), returns_outputs=True)
    assert "of type tuple, not a tensor" in refusal(pair, spec=spec).message


def test_refuses_batches_that_cannot_be_cut():
    spec = StepSpec(lambda output: output.sum(), accumulation=3)
    assert "cannot be cut into 3 equal parts" in refusal(nn.Linear(8, 8), spec=spec).message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": OptimizerSpec("sgd", momentum=0.9, dampening=0.1)}, "first step differs"),
        ({"optimizer": OptimizerSpec("sgd", nesterov=True)}, "needs a momentum"),
        ({"optimizer": OptimizerSpec("lion")}, "unknown optimizer"),
        ({"autocast": "fp16"}, "cannot be captured"),
        ({"clip": 0.0}, "above 0"),
        ({"clip": float("nan")}, "above 0"),
        ({"accumulation": 0}, "at least 1"),
    ],
)
def test_refuses_steps_that_would_be_trained_wrong(options, message):
    with pytest.raises(CaptureError, match=message):
        StepSpec(lambda output: output.sum(), **options)


def test_refuses_devices_that_are_not_there():
    with pytest.raises(DeviceError, match="is not there"):
        capture(nn.Linear(8, 8), [torch.zeros(ROWS)], [], SQUARE, device="cuda:99")


# ---- what looks odd but is fine ----


def test_prints_hooks_and_counters_do_no_harm(capsys):
    def call(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        print("called with", tuple(x.shape))
        return self.inner(x)

    model = Model(call, calls=0)
    seen: list[Any] = []
    handle = model.inner.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    assert capture(model, [torch.randn(ROWS)], [], SQUARE).trace.operator_count > 5
    assert model.calls == 0
    assert "called with (4, 8)" in capsys.readouterr().out
    assert all(reference() is None for reference in seen)
    handle.remove()


def test_an_interrupted_capture_leaves_nothing_behind():
    def interrupted(self: Any, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        raise KeyboardInterrupt

    model = Model(interrupted)
    weight = model.inner.weight
    with pytest.raises(KeyboardInterrupt):
        capture(model, [torch.randn(ROWS)], [], SQUARE)
    assert model.inner.weight is weight and not hasattr(model, "kept")
    model.call = lambda self, x: self.inner(x)
    assert capture(model, [torch.randn(ROWS)], [], SQUARE).trace.operator_count > 5
