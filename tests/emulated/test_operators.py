"""Operators on the emulated device: training gives the bits of the CPU, because the CPU's kernels run.

Recurrent layers are the exception: the CPU takes oneDNN's, the device cells that are composed, as CUDA's fused cells.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Build = Callable[[], nn.Module]


class Images(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm == "batch" else nn.GroupNorm(1, 8),
            nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * 4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(6, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.embedding(words) + self.position, src_key_padding_mask=words == 0)
        return self.head(encoded.mean(1))


class Table(nn.Module):
    """Categories and numbers, joined; index, gather and where besides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(
            nn.Linear(14, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(),
            nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4),
        )  # fmt: skip

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        numbers = torch.where(words > 9, words / 3, 0.5)
        joined = torch.cat([self.embedding(words[:, 0]), numbers], 1)
        order = numbers.argsort(1)
        return self.layers(joined) + numbers.gather(1, order)[:, :4] * joined[:, [1, 0, 3, 2]].softmax(1)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(5, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(series)[0][:, -1])


def images() -> torch.Tensor:
    return torch.randn(6, 3, 16, 16)


def words() -> torch.Tensor:
    words = torch.randint(1, 20, (6, 6))
    words[0, 4:] = 0
    return words


MODELS: dict[str, tuple[Build, Callable[[], torch.Tensor]]] = {
    "images, batch norm": (lambda: Images("batch"), images),
    "images, group norm": (lambda: Images("group"), images),
    "words": (Words, words),
    "table": (Table, words),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "sgd, fused": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, fused=True),
}


def train(model: nn.Module, x: torch.Tensor, optimizer: str, device: str) -> tuple[list[float], nn.Module]:
    """Return the losses of three steps, and the trained copy of the model."""
    model, x = copy.deepcopy(model).to(device), x.to(device)
    targets = (torch.arange(len(x)) % 4).to(device)
    stepper, losses = OPTIMIZERS[optimizer](model.parameters()), []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), targets, label_smoothing=0.1)
            stepper.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            stepper.step()
            losses.append(loss.detach())
    return [loss.item() for loss in losses], model


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_gives_the_bits_of_the_cpu(control, name):
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), batch()
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(model.to("emulated")(x.to("emulated")).cpu(), expected)
    assert control.races() == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_bits_of_the_cpu(control, name, optimizer):
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), batch()
    expected, trained = train(model, x, optimizer, "cpu")
    control.schedule("random", 1)
    losses, ours = train(model, x, optimizer, "emulated")
    assert losses == expected
    for key, value in trained.state_dict().items():
        assert torch.equal(ours.state_dict()[key].cpu(), value), key
    assert control.waiting_operators() <= {"aten::_local_scalar_dense"}
    assert control.races() == []


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_train_as_on_the_cpu(kind):
    torch.manual_seed(0)
    model, x = Recurrent(kind), torch.randn(6, 7, 5)
    expected, trained = train(model, x, "sgd", "cpu")
    losses, ours = train(model, x, "sgd", "emulated")
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in trained.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key].cpu(), value, rtol=1e-4, atol=1e-6)


def test_mixed_precision_follows_cudas_lists():
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4).to("emulated"), torch.randn(3, 8, device="emulated")
    with torch.autocast("emulated", torch.bfloat16):
        product = layer(x)
        total = product.softmax(1)
    assert product.dtype == torch.bfloat16 and total.dtype == torch.float32
    expected = nn.functional.linear(x.cpu().bfloat16(), layer.weight.cpu().bfloat16(), layer.bias.cpu().bfloat16())
    assert torch.equal(product.cpu(), expected)


# ---- random numbers --------------------------------------------------------------------------------------------------


def draws() -> list[torch.Tensor]:
    ones = torch.ones(4096, device="emulated")
    return [
        torch.dropout(ones, 0.3, True), ones.bernoulli(0.5), torch.randn(4096, device="emulated"),
        torch.rand(4096, device="emulated"), torch.randint(0, 100, (4096,), device="emulated"),
        torch.randperm(4096, device="emulated"), torch.multinomial(ones, 10),
    ]  # fmt: skip


def test_a_state_of_the_generator_replays_every_random_operator(control):
    module = torch.get_device_module("emulated")
    torch.manual_seed(5)
    state = module.get_rng_state()
    first, second = draws(), draws()
    control.schedule("random", 4)
    module.set_rng_state(state)
    assert all(torch.equal(one, again) for one, again in zip(first, draws(), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.manual_seed(5)
    assert torch.equal(module.get_rng_state(), state)
    assert 0.25 < (first[0] == 0).float().mean().item() < 0.35
    assert first[5].sort()[0].tolist() == list(range(4096))


def test_generators_of_ones_own_and_the_cpus_are_separate():
    own = torch.Generator("emulated").manual_seed(3)
    numbers = torch.rand(10, device="emulated", generator=own)
    torch.manual_seed(1)
    cpu = torch.rand(3)
    torch.manual_seed(1)
    draws()
    torch.accelerator.synchronize()
    assert torch.equal(torch.rand(3), cpu)
    assert torch.equal(torch.rand(10, device="emulated", generator=own.manual_seed(3)), numbers)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="emulated", generator=torch.Generator())


# ---- memory of tensors -----------------------------------------------------------------------------------------------


def test_views_share_memory():
    tensor = torch.arange(24, dtype=torch.float32, device="emulated").view(2, 3, 4)
    views = [tensor[1], tensor.transpose(0, 2), tensor.reshape(-1)[5:9], tensor.unfold(2, 2, 1), tensor.detach()]
    views.append(tensor.view(torch.uint8))
    tensor.zero_()
    assert all(view.count_nonzero().item() == 0 for view in views)
    assert all(view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for view in views)
    other = torch.empty(0, device="emulated").set_(tensor.untyped_storage(), 4, (2, 2), (4, 1))
    other.fill_(1)
    assert tensor.sum().item() == 4


def test_out_arguments_are_resized():
    out = torch.empty(0, device="emulated")
    one = torch.ones(3, 4, device="emulated")
    torch.add(one, one, out=out)
    assert out.shape == (3, 4) and out.sum().item() == 24
    torch.sum(one, 0, out=out.resize_(4))
    assert out.tolist() == [3.0] * 4


def test_results_that_only_the_kernel_knows_make_the_host_wait(control):
    tensor = torch.tensor([0, 3, 0, 5], device="emulated")
    control.waiting_operators()
    assert tensor.nonzero().tolist() == [[1], [3]]
    assert tensor[tensor > 0].tolist() == [3, 5]
    assert torch.equal(tensor, tensor.clone())
    assert tensor.unique().tolist() == [0, 3, 5]
    assert control.waiting_operators() >= {"aten::nonzero", "aten::equal"}


def test_copies_of_models_and_tensors():
    model = nn.Linear(3, 2).to("emulated")
    other = copy.deepcopy(model)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.data_ptr() != model.weight.data_ptr()
    assert "device='emulated:0'" in repr(model.weight)


def test_tied_weights_stay_tied_and_checkpoints_draw_the_same_numbers_again():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    for device in ("emulated", "cpu"):
        assert model.to(device)[2].weight is model[0].weight and model[0].weight.device.type == device
    dropout, x = nn.Dropout(), torch.ones(64, device="emulated", requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(lambda x: dropout(x).sin(), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient.cpu() != 0, output.cpu() != 0)


def test_tensors_of_inference_mode_are_written_by_copies_that_convert():
    numbers = torch.arange(6).view(2, 3)
    with torch.inference_mode():
        converted = numbers.to("emulated").to(torch.float32)
        transposed = torch.empty(3, 2, device="emulated")
        transposed.t().copy_(converted)
    assert torch.equal(converted.cpu(), numbers.float()) and torch.equal(transposed.cpu(), numbers.float().t())
