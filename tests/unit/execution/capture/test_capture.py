"""Captured steps compute what PyTorch computes, and their traces say what really happens."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.capture.fakes import CPU_KERNELS, KERNELS, LAYOUTS, REDUCED_IN_PLACE, fake_call
from pg_tensile.planning.trace.trace import Kind, Mode, Phase
from tests.unit.interpreter import Interpreter
from tests.unit.zoo import NAMED, Case, names
from tests.unit.zoo_habits import HABITS
from tests.unit.zoo_layers import LAYERS

ZOO = {**NAMED, **LAYERS, **HABITS}
ITERATIONS = 3
SQUARE = StepSpec(lambda output, *targets: output.float().pow(2).mean())


def same(tensor: Tensor, expected: Tensor) -> bool:
    """Equal to the last bit, except that not all zeros and not all NaN need look the same."""
    return tensor.dtype == expected.dtype and torch.allclose(tensor, expected, rtol=0, atol=0, equal_nan=True)


def registered(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def captured_linear(**options: Any) -> Captured:
    torch.manual_seed(0)
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return capture(nn.Linear(8, 3), [x], [y], StepSpec(F.cross_entropy, **options))


# ---- the same bits as PyTorch ----


@pytest.mark.parametrize("name", names(ZOO))
def test_replays_as_pytorch_trains(name):
    """Long for deep networks."""
    case: Case = ZOO[name]
    twin = case.make()[0]
    model, inputs, targets, spec = case.make()
    interpreter = Interpreter(capture(model, inputs, targets, spec), model)
    torch.manual_seed(1)
    losses = []
    for _ in range(ITERATIONS):
        losses.append(interpreter.step(inputs, targets))
        interpreter.watch = False  # once is enough
    torch.manual_seed(1)
    eager = EagerStep(twin, spec)
    expected = [eager.step(inputs, targets).loss for _ in range(ITERATIONS)]
    assert all(map(same, losses, expected))
    state, before = interpreter.state(), registered(model)
    for key, value in registered(eager.model).items():
        assert same(state.get(key, before[key]), value), key
    assert name == "no_rows" or any(not same(before[key], value) for key, value in state.items())


def test_follows_a_schedule_of_the_learning_rate():
    case = ZOO["adam"]
    twin = case.make()[0]
    model, inputs, targets, spec = case.make()
    interpreter, eager = Interpreter(capture(model, inputs, targets, spec), model), EagerStep(twin, spec)
    for rate in (0.1, 0.037, 1e-9):
        assert same(interpreter.step(inputs, targets, rate), eager.step(inputs, targets, rate).loss)
    assert all(same(value, registered(twin)[key]) for key, value in interpreter.state().items())


def test_computes_with_not_a_number_as_pytorch_does():
    case = ZOO["batch_norm"]
    twin = case.make()[0]
    model, (x,), targets, spec = case.make()
    x[0, 0, 0, 0] = math.nan
    interpreter, eager = Interpreter(capture(model, (x,), targets, spec), model), EagerStep(twin, spec)
    assert math.isnan(interpreter.step((x,), targets)) and math.isnan(eager.step((x,), targets).loss)
    assert all(same(value, registered(twin)[key]) for key, value in interpreter.state().items())


def test_takes_fake_inputs():
    with FakeTensorMode():
        x, y = torch.empty(4, 8), torch.empty(4, dtype=torch.long)
    fake = capture(nn.Linear(8, 3), [x], [y], StepSpec(F.cross_entropy))
    assert fake.trace.fingerprint == captured_linear().trace.fingerprint


def test_returns_the_outputs_of_every_micro_batch():
    case = ZOO["accumulated"]
    captured = capture(*case.make())
    assert len(captured.outputs) == 3
    assert {captured.values[slot].shape for slot in captured.outputs} == {(2, 10)}


# ---- what the trace says ----


def test_names_every_tensor_and_operator():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    trace = capture(model, [x], [y], StepSpec(F.cross_entropy, OptimizerSpec("adam"))).trace
    rows = list(trace.tensors)
    named = {kind: {row.name for row in rows if row.kind == kind} for kind in Kind}
    parameters = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert named[Kind.PARAMETER] == parameters
    assert named[Kind.BUFFER] == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    states = ("exp_avg", "exp_avg_sq", "step")
    assert named[Kind.OPTIMIZER_STATE] == {f"{name}.{key}" for name in parameters for key in states}
    assert named[Kind.GRADIENT] == {f"{name}.grad" for name in parameters}
    assert named[Kind.INPUT] == {"input0", "target0", "learning_rate"}
    operators = {operator.target: operator for operator in trace.operators}
    dropout = operators["aten.bernoulli_.float"]
    assert (dropout.random, dropout.module, dropout.signature, dropout.bytes) == (True, "2", "f32[4,8], 0.9", 256)
    assert operators["aten.native_batch_norm_backward.default"].module == "1"
    assert sum(operator.random for operator in trace.operators) == 1
    assert operators["aten.mm.default"].flops == 2 * 8 * 4 * 8


def test_orders_the_phases():
    trace = captured_linear(clip=1.0).trace
    phases = [operator.phase for operator in trace.operators]
    assert phases == sorted(phases)
    assert set(phases) == set(Phase)
    first = phases.index(Phase.OPTIMIZER)
    assert trace.operators[first].target == "aten.linalg_vector_norm.default"


def test_knows_statistics_from_other_writes():
    model, inputs, targets, spec = ZOO["batch_norm"].make()
    trace = capture(model, inputs, targets, spec).trace
    modes: dict[str, set[Mode]] = {}
    for operator in trace.operators:
        for tensor, mode in operator.accesses:
            if mode in (Mode.STATS, Mode.WRITE) and trace.tensor_kind[tensor] == Kind.BUFFER:
                modes.setdefault(trace.tensor_name[tensor], set()).add(mode)
    assert modes["net.1.running_mean"] == modes["net.4.running_var"] == {Mode.STATS}
    assert modes["net.1.num_batches_tracked"] == {Mode.WRITE}
    assert modes["net.5.running_mean"] == {Mode.WRITE}  # an instance norm averages over the batch afterwards


def test_frozen_statistics_are_only_read():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.inner(x), self.norm.running_mean, self.norm.running_var, training=False)

    trace = capture(Frozen(), [torch.randn(4, 8)], [], SQUARE).trace
    (mean,) = (number for number, row in enumerate(trace.tensors) if row.name == "norm.running_mean")
    assert trace.tensor_writes[mean] == 0


def test_counts_the_saved_and_the_passing():
    """Linear, ReLU, linear: the ReLU's result is needed again, the second product is not."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    trace = capture(model, [torch.randn(4, 8)], [torch.randint(0, 3, (4,))], StepSpec(F.cross_entropy)).trace
    created = {operator.target: operator.accesses[-1].tensor for operator in trace.operators}
    assert trace.tensors[created["aten.relu.default"]].kind == Kind.ACTIVATION
    assert trace.tensors[created["aten.threshold_backward.default"]].kind == Kind.TEMPORARY


def test_a_tensor_is_a_storage_and_views_cost_nothing():
    model, inputs, targets, spec = ZOO["views"].make()
    captured = capture(model, inputs, targets, spec)
    targets_seen = {operator.target for operator in captured.trace.operators}
    assert not targets_seen & {"aten.t.default", "aten.view.default", "aten.split.Tensor", "aten.detach.default"}
    views = [view for operator in captured.operators for view in operator.views]
    assert {"aten.t.default", "aten.split.Tensor"} <= {str(view.target) for view in views}
    for index, operator in enumerate(captured.operators):
        created = {tensor for tensor, mode in captured.trace.operators[index].accesses if mode == Mode.CREATE}
        for view in operator.views:
            assert {captured.values[slot].tensor for slot in view.results if slot is not None} <= created


def test_a_tied_weight_is_one_tensor():
    model, inputs, targets, spec = ZOO["gpt2"].make()
    trace = capture(model, inputs, targets, spec).trace
    names = [row.name for row in trace.tensors if row.kind == Kind.PARAMETER]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


def test_a_constant_of_one_element_may_lack_a_stride():
    """Those of numpy and of `as_strided` may; PyTorch views no such tensor as bytes."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.scale = torch.tensor([2.0]).as_strided((1,), (0,))

        def forward(self, x):
            return self.linear(x) * self.scale

    spec = StepSpec(F.mse_loss, OptimizerSpec("sgd", 0.1))
    captured = capture(Scaled(), [torch.ones(4, 3)], [torch.ones(4, 1)], spec)
    assert [kept.constant for kept in captured.persistents if kept.kind == Kind.CONSTANT] == [torch.tensor([2.0])]


def test_leaves_out_what_is_not_used():
    model, inputs, targets, spec = ZOO["shared"].make()
    trace = capture(model, inputs, targets, spec).trace
    names = {row.name for row in trace.tensors}
    assert "unused.weight" not in names and "again.weight" not in names
    assert "frozen.weight" in names and "frozen.weight.exp_avg" not in names
    assert len(trace.tensors) == len(set(range(trace.tensor_count)) & set(trace.access_tensor.tolist()))


def test_drops_dead_code_but_nothing_random():
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            torch.cos(x)
            F.dropout(x, 0.5)
            return self.inner(x)

    seen = [operator.target for operator in capture(Wasteful(), [torch.randn(4, 8)], [], SQUARE).trace.operators]
    assert "aten.cos.default" not in seen
    assert seen.count("aten.bernoulli_.float") == 1


def test_gradients_add_up_in_place():
    """As autograd does it outside of a capture: no third tensor for a sum."""
    model, inputs, targets, spec = ZOO["deep_residual"].make()
    trace = capture(model, inputs, targets, spec).trace
    backward = [operator.target for operator in trace.operators if operator.phase == Phase.BACKWARD]
    assert "aten.add.Tensor" not in backward
    assert backward.count("aten.add_.Tensor") >= 29


def test_says_where_an_operator_comes_from():
    class Here(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return torch.cos(x)

    trace = capture(Here(), [torch.randn(4, 8)], [], SQUARE).trace
    line = Here.forward.__code__.co_firstlineno
    lines = {operator.target: operator.source for operator in trace.operators}
    assert lines["aten.addmm.default"] == f"test_capture.py:{line + 1}"
    assert lines["aten.cos.default"] == lines["aten.sin.default"] == f"test_capture.py:{line + 2}"
    assert lines["aten._fused_adamw_.tensor_lr"] == ""


def test_equal_steps_have_equal_fingerprints():
    assert captured_linear().trace.fingerprint == captured_linear().trace.fingerprint
    assert captured_linear().trace.fingerprint != captured_linear(clip=1.0).trace.fingerprint


def test_checkpoints_are_captured_without_their_recomputation():
    model, inputs, targets, spec = ZOO["checkpointed"].make()
    trace = capture(model, inputs, targets, spec).trace
    assert [operator.target for operator in trace.operators].count("aten.tanh.default") == 1
    assert sum(operator.random for operator in trace.operators) == 2


def test_takes_no_memory():
    """ResNet-26, batch 64, 224²: 2 GB of activations if they were real."""
    import resource

    from pytorchcv.models.resnet import resnetbc26b

    model = resnetbc26b()
    with torch.device("meta"):
        x, y = torch.empty(64, 3, 224, 224), torch.empty(64, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = capture(model, [x], [y], StepSpec(F.cross_entropy)).trace
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
    assert trace.tensor_bytes.sum() > 2 << 30


# ---- nothing is left behind ----


class Restless(nn.Module):
    """Changes attributes, lists, objects and modes whenever it is called."""

    class Notes:
        def __init__(self) -> None:
            self.last: Any = None

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls, self.by_name, self.notes = 0, {"x": 1}, self.Notes()
        self.seen: list[Tensor] = []
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.by_name["y"] = self.notes.last = self.output = self.inner(x)
        self.inner.eval()
        self.inner.register_forward_hook(lambda *args: None)
        if self.fails:
            raise ValueError("no")
        return self.output


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_the_model_as_it_was(fails):
    model = Restless(fails).eval()
    weight, before = model.inner.weight, model.inner.weight.clone()
    try:
        capture(model, [torch.randn(4, 8)], [], SQUARE)
        assert not fails
    except Exception:
        assert fails
    assert model.inner.weight is weight and torch.equal(weight, before) and weight.grad is None
    assert (model.calls, model.seen, model.by_name, model.notes.last) == (0, [], {"x": 1}, None)
    assert not hasattr(model, "output") and not model.training and not model.inner._forward_hooks
    assert not any(isinstance(value, FakeTensor) for module in model.modules() for value in vars(module).values())


def test_leaves_generators_and_settings_as_they_were():
    def states() -> list[Any]:
        torch_state = torch.get_rng_state().tolist()
        return [random.getstate(), str(np.random.get_state()), torch_state, torch.is_grad_enabled()]

    model, inputs, targets, spec = ZOO["gcn"].make()
    before = states()
    capture(model, inputs, targets, spec)
    assert states() == before
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        within = capture(model, inputs, targets, spec)
        assert not torch.is_grad_enabled()
    assert states() == before
    assert within.trace.fingerprint == capture(model, inputs, targets, spec).trace.fingerprint


# ---- fake results are like real ones ----


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Tensors of a shape in several layouts, on fresh memory."""
    plain = torch.rand(shape)
    cases = [plain]
    if len(shape) >= 2:
        cases.append(plain.transpose(-1, -2).contiguous().transpose(-1, -2))
        cases.append(plain.transpose(0, 1).contiguous().transpose(0, 1))
    if len(shape) == 4:
        cases.append(plain.contiguous(memory_format=torch.channels_last))
    return cases


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Every operator whose fake results we correct, on tensors of several layouts."""
    aten, one = torch.ops.aten, torch.tensor(1.0)
    cases: list[tuple[Any, tuple[Any, ...]]] = []
    for shape in ((3, 4), (3, 4, 5), (2, 4, 3, 5), (2, 4, 1, 1)):
        channels = torch.rand(4)
        for x in layouts(shape):
            for weights in (channels, None):
                norm = (weights, weights, channels.clone(), channels.clone())
                cases += [(aten.native_batch_norm.default, (x, *norm, train, 0.1, 1e-5)) for train in (True, False)]
            half = x.bfloat16()
            cases.append((aten.native_batch_norm.default, (half, channels, channels, None, None, True, 0.1, 1e-5)))
            cases.append((aten.native_layer_norm.default, (half, [shape[-1]], *([torch.rand(shape[-1])] * 2), 1e-5)))
            cases.append((aten.log_sigmoid_forward.default, (x,)))
            cases.append((aten.pow.Scalar, (2.0, x)))
            for gradient in layouts(shape):
                backward = (channels, channels, channels, channels, channels)
                for wanted in ([True, True, True], [False, True, False]):
                    cases.append(
                        (aten.native_batch_norm_backward.default, (gradient, x, *backward, True, 1e-5, wanted))
                    )
                cases.append((aten._log_softmax_backward_data.default, (gradient, x, 1, torch.float32)))
                cases.append((aten.native_dropout_backward.default, (gradient, x > 0.5, 2.0)))
                cases += [(loss, (gradient, x)) for loss in REDUCED_IN_PLACE]
                cases += [(loss, (gradient, x, None, 0)) for loss in REDUCED_IN_PLACE[-1:]]
                for loss in (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward):
                    extra = () if loss is aten.mse_loss_backward else (1.0,)
                    cases.append((loss.default, (one, gradient, x, 1, *extra)))
    for x in layouts((2, 4, 4, 4))[::3]:  # a group norm's input is always dense
        half, statistics, weight = x.bfloat16(), torch.rand(2, 2), torch.rand(4)
        cases.append((aten.native_group_norm.default, (half, weight, weight, 2, 4, 16, 2, 1e-5)))
        given = (half, half, statistics, statistics, weight, 2, 4, 16, 2, [True, True, True])
        cases.append((aten.native_group_norm_backward.default, given))
        cases.append((aten.channel_shuffle.default, (x, 2)))
        pooled, places = aten.max_pool2d_with_indices(x, [2, 2])
        cases.append((aten.max_unpool2d.default, (pooled, places, [4, 4])))
        padded = aten.replication_pad2d(x, [1, 1, 1, 1])
        cases.append((aten.replication_pad2d_backward.default, (padded, x, [1, 1, 1, 1])))
    for x in layouts((3, 4)):
        half, mean, weight = x.bfloat16(), torch.rand(3, 1), torch.rand(4)
        for one_type in (half, x):
            layer = (one_type, one_type, [4], mean, mean, weight, weight, [True, True, True])
            cases.append((aten.native_layer_norm_backward.default, layer))
        cases.append((aten.multi_margin_loss_backward.default, (one, x, torch.tensor([0, 3, 1]), 1, 1.0)))
        classes = torch.tensor([[0, -1, 0, 0], [1, 2, -1, 0], [3, -1, 0, 0]])
        _, is_target = aten.multilabel_margin_loss_forward(x, classes, 1)
        cases.append((aten.multilabel_margin_loss_backward.default, (one, x, classes, 1, is_target)))
    rows, weight, bias = torch.rand(2, 3, 4), torch.rand(12, 4), torch.rand(12)
    for needed in (True, False):
        attention = (rows, rows, rows, 4, 2, weight, bias, weight[:4], bias[:4], None, needed)
        cases.append((aten._native_multi_head_attention.default, attention))
    layers, state = (torch.rand(20, 4), torch.rand(20, 5), torch.rand(20), torch.rand(20)), torch.rand(1, 2, 5)
    lstm: tuple[Any, ...] = (rows.transpose(0, 1), *layers, state, state, False, [], 2, 5, 1, True, False, False, False)
    cases.append((aten.mkldnn_rnn_layer.default, lstm))
    return cases


def look(returned: Any) -> list[Any]:
    items = returned if isinstance(returned, tuple) else (returned,)
    return [
        None
        if item is None or item.numel() == 0
        else (item.dtype, item.shape, item.stride(), item.untyped_storage().nbytes())
        for item in items
    ]


@torch.no_grad()
def test_corrected_fake_results_look_like_real_ones():
    tried = set()
    for func, args in calls():
        real = look(func(*args))
        mode = FakeTensorMode(allow_fallback_kernels=False)
        with mode:
            fake = fake_call(func, tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args), {})
        assert look(fake) == real, (func, [(a.shape, a.stride(), a.dtype) for a in args if isinstance(a, Tensor)])
        tried.add(func)
    updates = {func for func in KERNELS if "_fused_" in str(func)}
    assert tried == {*KERNELS, *CPU_KERNELS, *LAYOUTS, *REDUCED_IN_PLACE} - updates


def test_the_question_whether_recurrent_weights_are_one_piece_of_memory_is_answered_with_no(monkeypatch):
    run, answers = torch._VF.lstm, []

    def asking(*arguments: Any) -> Any:
        weight = arguments[2][0]
        answer = weight.new_empty(0).set_(weight.untyped_storage()).numel()
        answers.extend([answer] if isinstance(weight, FakeTensor) else [])
        return run(*arguments)

    monkeypatch.setattr(torch._VF, "lstm", asking, raising=False)
    captured = capture(*ZOO["lstm"].make())
    assert answers and not any(answers)
    assert not any("aten.set_" in str(operator) for operator in captured.operators)


def test_sizes_that_only_show_in_execution_can_be_filled_in():
    captured = capture(*ZOO["lstm"].make())
    assert captured.unknown_sizes
    sizes = dict.fromkeys(captured.unknown_sizes, 4096)
    filled = captured.with_tensor_bytes(sizes)
    assert filled.trace.tensor_bytes.sum() == captured.trace.tensor_bytes.sum() + 4096 * len(sizes)
