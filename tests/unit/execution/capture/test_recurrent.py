"""Stacked recurrent layers split into one-layer calls: the same function, with dropout that a capture can record."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.capture.recurrent import split, stacks_split
from tests.unit.interpreter import Interpreter

LAYERS, HIDDEN, ROWS, LENGTH, WIDTH = 3, 5, 4, 6, 7
BUILD: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
CASES = [
    (name, bidirectional, batch_first, bias, projection)
    for name, bidirectional, batch_first, bias in itertools.product(BUILD, *[(False, True)] * 3)
    for projection in ((0, 2) if name == "lstm" else (0,))
]
SPEC = StepSpec(nn.functional.mse_loss, OptimizerSpec("sgd", 0.1))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.5, layers: int = LAYERS) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, HIDDEN, layers, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, HIDDEN)


def arguments(name: str, bidirectional: bool, batch_first: bool, bias: bool, projection: int, dropout: float) -> Any:
    """Return the arguments of a function of torch._VF, whose tensors all require gradients, and these tensors."""
    torch.manual_seed(0)
    options = {"proj_size": projection} if projection else {}
    module = BUILD[name](WIDTH, HIDDEN, LAYERS, bias=bias, bidirectional=bidirectional, **options)
    x = torch.randn(*((ROWS, LENGTH) if batch_first else (LENGTH, ROWS)), WIDTH, requires_grad=True)
    shape = LAYERS * (2 if bidirectional else 1), ROWS
    states = [torch.randn(*shape, size, requires_grad=True) for size in (projection or HIDDEN, HIDDEN)]
    start: Any = states if name == "lstm" else states[0]
    tensors = [x, *(states if name == "lstm" else states[:1]), *module._flat_weights]
    return (x, start, module._flat_weights, bias, LAYERS, dropout, True, bidirectional, batch_first), tensors


def results(function: Any, args: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return the results of a call and the gradients of all that it is given, dropout drawn from a seed."""
    torch.manual_seed(1)
    returned = function(*args)
    weighted = sum((item * torch.randn_like(item)).sum() for item in returned)
    return [*returned, *torch.autograd.grad(weighted, tensors)]


# ---- the function ----


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(("name", "bidirectional", "batch_first", "bias", "projection"), CASES)
def test_computes_what_the_whole_call_computes(name, bidirectional, batch_first, bias, projection, dropout):
    """Dropout included: on the CPU, PyTorch draws that inside a stack from its generator, in the same order."""
    args, tensors = arguments(name, bidirectional, batch_first, bias, projection, dropout)
    function = getattr(torch._VF, name)
    expected = results(function, args, tensors)
    found = results(lambda *args: split(function, *args), args, tensors)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_computes_packed_sequences(name, bidirectional):
    (x, start, *rest, _), tensors = arguments(name, bidirectional, True, True, 0, 0.4)
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 3, 1]), batch_first=True)
    args, function = (packed.data, packed.batch_sizes, start, *rest), getattr(torch._VF, name)
    expected = results(function, args, tensors[1:])
    found = results(lambda *args: split(function, *args), args, tensors[1:])
    torch.testing.assert_close(found, expected)


# ---- the modules ----


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The calls of PyTorch's LSTM, each with its number of layers and its dropout."""
    calls: list[tuple[int, float]] = []
    run = torch._VF.lstm

    def counting(*args: Any) -> Any:
        calls.append(args[4:6] if isinstance(args[3], bool) else args[5:7])
        return run(*args)

    monkeypatch.setattr(torch._VF, "lstm", counting, raising=False)
    return calls


def test_modules_are_split_where_they_drop_out(called):
    x, _ = batch()
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 3, 1]), batch_first=True)
    with stacks_split():
        Stack()(x)
        Stack().recurrent(packed)
    assert called == [(1, 0.0)] * LAYERS * 2
    called.clear()
    Stack()(x)
    assert called == [(LAYERS, 0.5)]


def test_modules_without_dropout_stay_whole(called):
    x, _ = batch()
    with stacks_split():
        Stack(dropout=0.0)(x)
        Stack(layers=1, dropout=0.0)(x)
        Stack().eval()(x)
    assert called == [(LAYERS, 0.0), (1, 0.0), (LAYERS, 0.5)]


def test_other_threads_run_their_stacks_whole(called):
    x, _ = batch()
    with stacks_split():
        thread = threading.Thread(target=Stack(), args=(x,))
        thread.start()
        thread.join()
    assert called == [(LAYERS, 0.5)]


# ---- capture ----


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM that draws the seed for the dropout inside a stack as cuDNN's code does."""
    run = torch._VF.lstm

    def drawing(*args: Any) -> Any:
        if args[4] > 1 and args[5] and args[6]:
            torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator)
        return run(*args)

    monkeypatch.setattr(torch._VF, "lstm", drawing, raising=False)


def test_dropout_of_cudnns_own_is_refused(cudnn):
    x, y = batch()
    with pytest.raises(CaptureError, match="dropout inside a recurrent network on CUDA cannot be captured") as caught:
        capture(Stack(), [x], [y], SPEC)
    assert str(caught.value.source).startswith("test_recurrent.py:")


def test_a_split_stack_is_captured_as_it_trains(cudnn):
    x, y = batch()
    torch.manual_seed(0)
    model, twin = Stack(), Stack()
    twin.load_state_dict(model.state_dict())
    with stacks_split():
        captured = capture(model, [x], [y], SPEC)
    random = [operator for operator in captured.trace.operators if operator.random]
    assert len(random) == LAYERS - 1
    assert all(operator.module == "recurrent" for operator in random)
    assert all(operator.source.startswith("test_recurrent.py:") for operator in random)
    interpreter, eager = Interpreter(captured, model), EagerStep(twin, SPEC)
    torch.manual_seed(1)
    losses = [interpreter.step([x], [y]) for _ in range(3)]
    torch.manual_seed(1)
    with stacks_split():
        assert losses == [eager.step([x], [y]).loss for _ in range(3)]
    for name, weight in interpreter.state().items():
        assert torch.equal(weight, twin.get_parameter(name)), name
