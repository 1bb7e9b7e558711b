"""Predictions within a memory budget: the bits of the model in one piece, and never more memory than the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import CaptureError, ModelRefusedError
from pg_tensile.execution.capture import capture_inference
from pg_tensile.execution.training.prediction import Served, plan_within
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.streaming import streamed
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.policies import POLICIES
from tests.unit.executing import FAST, opened


class Convolutions(nn.Module):
    """A residual network with batch norm whose weights are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.again = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x)), inplace=True), 2)
        x = x + self.again(x)
        return self.head(x.mean((2, 3)))


def perceptron() -> nn.Module:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(128, 128), nn.GELU())), nn.Linear(128, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (3, 16, 16)),
    "perceptron": (perceptron, (128,)),
}


def model_and_rows(name: str) -> tuple[nn.Module, Tensor]:
    """The model in eval mode, with statistics that are not those of a new one, and 40 rows."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, rows = build(), torch.randn(40, *shape)
    with torch.no_grad():
        model(rows)
    return model.eval(), rows


@contextmanager
def serving(model: nn.Module, rows: Tensor, budget: int | None, most_rows: int = 1) -> Iterator[Served]:
    with opened(budget) as device, closing(Served(model, [rows], device, most_rows)) as served:
        yield served


def least_and_most(model: nn.Module, rows: Tensor, count: int = 1) -> tuple[int, int]:
    """The smallest budget for batches of so many rows, and what they take without one; workspaces included."""
    with serving(model, rows, None, count) as served:
        served.predict([rows[:count]])
        trace = served.trace(count)
    return JobPlanner(trace, FAST).least_bytes, footprint(trace).device_peak_bytes


@torch.no_grad()
def in_one_piece(model: nn.Module, rows: Tensor, *sizes: int) -> Tensor:
    """The outputs of batches of these sizes, one after the other, filled up with zeros."""
    missing = sum(sizes) - len(rows)
    filled = torch.cat([rows, rows.new_zeros(max(missing, 0), *rows.shape[1:])])
    return torch.cat([model(part) for part in filled.split(list(sizes))])[: len(rows)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 1.0])
def test_the_outputs_are_the_models_whatever_the_budget(name: str, part: float) -> None:
    model, rows = model_and_rows(name)
    expected = [in_one_piece(model, rows[i : i + 1], 1) for i in range(4)]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    least, most = least_and_most(model, rows)
    budget = int(least + part * (most - least))
    with serving(model, rows, budget) as served:
        assert served.device_bytes <= budget
        for i in range(4):
            assert torch.equal(served.predict([rows[i : i + 1]]), expected[i])
            assert served.device_bytes <= budget
        assert 0 < served.peak_bytes <= budget
        assert (served.host_bytes > 0) == (part < 1)
        if part == 0:
            assert served.host_bytes > 0.9 * parameters > budget  # nothing of the model stays
    assert torch.equal(in_one_piece(model, rows[:1], 1), expected[0])  # it was given back


@pytest.mark.parametrize("name", MODELS)
def test_batches_are_powers_of_two_within_the_budget(name: str) -> None:
    model, rows = model_and_rows(name)
    expected = {
        1: in_one_piece(model, rows[:1], 1),
        8: in_one_piece(model, rows[:8], 8),
        5: in_one_piece(model, rows[:5], 8),
        16: in_one_piece(model, rows[:16], 16),
        39: in_one_piece(model, rows[:39], 16, 16, 8),
        0: in_one_piece(model, rows[:1], 1)[:0],
    }
    least, most = least_and_most(model, rows, 16)
    with serving(model, rows, (least + most) // 2, most_rows=31) as served:
        for count, outputs in expected.items():
            result = served.predict([rows[:count]])
            assert result.shape == outputs.shape and torch.equal(result, outputs), count
            assert served.device_bytes <= (served.budget_bytes or 0)
            assert served.peak_bytes <= (served.budget_bytes or 0)
        assert list(served.candidates) == [1, 8, 16]


def test_no_batch_is_larger_than_fits() -> None:
    """The activations of 32 images take more than the budget, so the batches are smaller."""
    model, rows = model_and_rows("convolutions")
    least, _ = least_and_most(model, rows)
    with serving(model, rows, 2 * least, most_rows=4096) as served:
        outputs = served.predict([rows])
        (size,) = served.candidates.keys() - {1}
        assert 1 < size < 32
        sizes = [size] * -(-len(rows) // size)
        assert served.peak_bytes <= 2 * least
    assert torch.equal(outputs, in_one_piece(model, rows, *sizes))


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_is_not() -> None:
    model, rows = model_and_rows("convolutions")
    expected = in_one_piece(model, rows[:1], 1)
    least, _ = least_and_most(model, rows)
    for budget in (1000, least - 1):
        message = f"the model needs at least {least:,} bytes of device memory, but may have {budget:,}"
        with pytest.raises(ModelRefusedError, match=message) as caught, serving(model, rows, budget):
            pass
        assert caught.value.hint and "operator" in (caught.value.detail or "")
    with serving(model, rows, least) as served:
        assert torch.equal(served.predict([rows[:1]]), expected)


def test_without_a_budget_everything_stays() -> None:
    model, rows = model_and_rows("perceptron")
    expected = in_one_piece(model, rows[:2], 2)
    with serving(model, rows, None, most_rows=2) as served:
        assert torch.equal(served.predict([rows[:2]]), expected)
        assert served.host_bytes == 0
        assert all(len(candidate.plan) == 0 for candidate in served.candidates.values())


def test_models_that_cannot_be_served_say_why_and_stay_whole() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor):
            return super().forward(x), x

    class Data(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    for model in (Pair(3, 3), Data(3, 3)):
        with pytest.raises(CaptureError) as caught, serving(model, torch.ones(2, 3), 1 << 20):
            pass
        assert caught.value.hint
        assert model.weight.sum().isfinite()


@pytest.mark.parametrize("name", MODELS)
def test_streaming_keeps_the_budget_and_beats_swapping_on_demand(name: str) -> None:
    model, rows = model_and_rows(name)
    trace = JobPlanner(capture_inference(model, [rows[:1]]).trace, FAST).trace
    planner = JobPlanner(trace, FAST)
    for part in (0.0, 0.3, 0.7):
        budget = int(planner.least_bytes + part * (planner.vanilla.device_peak_bytes - planner.least_bytes))
        result = streamed(planner, budget)
        assert result is not None and result.device_peak_bytes <= budget and result.recomputes == 0
        demand = planner.candidate(POLICIES["lru"]({0: trace}, FAST, budget)[0])
        assert plan_within(trace, FAST, budget).us <= result.us <= demand.us
    assert streamed(planner, planner.least_bytes - 1) is None


@pytest.mark.long
def test_resnet_152_in_less_than_a_quarter_of_its_parameters() -> None:
    """Long: a network of real size."""
    from pytorchcv.models.resnet import resnet152

    torch.manual_seed(0)
    model = resnet152()
    model.features.final_pool = nn.AdaptiveAvgPool2d(1)
    model.eval()
    image = torch.randn(1, 3, 64, 64)
    expected = in_one_piece(model, image, 1)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    budget = parameters // 5
    with serving(model, image, budget) as served:
        for _ in range(2):
            assert torch.equal(served.predict([image]), expected)
        assert served.peak_bytes <= budget < 50_000_000 and parameters > 240_000_000
