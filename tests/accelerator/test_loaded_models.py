"""The predictor's models within memory budgets on an accelerator, beside each other and beside those on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution import models
from pg_tensile.planning.device.profile import A100_40GB
from pyworker.children.loaded_models import BudgetedModel, LoadedModel
from pyworker.children.model_cache import Key, ModelCache
from tests.accelerator.target import DEVICE, TYPE
from tests.unit.execution.training.test_steps import CNN, TRANSFORMER, images, texts
from tests.unit.pyworker.children.test_loaded_models import request
from tests.unit.pyworker.children.test_predictor import Version
from tests.unit.rows import Rows, every_type

WIDE = {"type": "mlp", "hidden": [256, 256, 256], "norm": "layer"}
CASES: dict[str, tuple[Callable[[int], Rows], dict[str, Any], int]] = {  # rows, architecture, a small budget
    "mlp": (every_type, WIDE, 320_000),
    "cnn": (images, CNN, 8_000),
    "transformer": (texts, TRANSFORMER, 18_000),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Version, int]:
    """A version, and a budget within which it predicts one row, less than its weights take of a large one."""
    rows, architecture, budget = CASES[request.param]
    return Version(rows(60), architecture), budget


def within(version: Version, budget: int) -> BudgetedModel:
    architecture = models.parse(version.architecture)
    module = models.build(architecture, version.preprocessing.model_inputs, version.preprocessing.outputs)
    module.load_state_dict(version.model.state_dict())
    size = len(version.weights)
    with torch.inference_mode():  # as the predictor's thread
        return BudgetedModel(version.preprocessing, module, budget, A100_40GB, size, DEVICE)


def answers(model: Any, version: Version, chosen: list[int]) -> list[np.ndarray]:
    with torch.inference_mode():
        return list(model.predict(request(version, chosen)).answers)


def check_equal(model: BudgetedModel, version: Version, chosen: list[int]) -> None:
    """Compare with the model in one piece on the CPU: the emulated device has its kernels, and so its bits."""
    expected = answers(LoadedModel(version.preprocessing, version.model, 1), version, chosen)
    got = answers(model, version, chosen)
    compare = np.testing.assert_array_equal if TYPE == "emulated" else assert_close
    for part, expected_part in zip(got, expected, strict=True):
        compare(part, expected_part)


def assert_close(value: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("share", ["little", "ample"])
def test_predictions_are_those_of_the_cpu_within_the_budget(case: tuple[Version, int], share: str) -> None:
    version, budget = case
    budget = budget if share == "little" else 100 * len(version.weights)
    model = within(version, budget)
    try:
        rows = [[5], [7], list(range(32)), [5]] if share == "ample" else [[5], [7], [5]]
        for chosen in rows:  # a batch of one size is the same on both devices
            check_equal(model, version, chosen)
            assert model._served.peak_bytes <= budget
        assert model.planned_bytes is not None and model.planned_bytes <= budget
        assert (model.device, model.nbytes, model.host_bytes) == (DEVICE, budget, len(version.weights))
    finally:
        model.close()


def test_models_share_the_device_and_give_all_of_it_back() -> None:
    versions = [Version(rows(60), architecture) for rows, architecture, _ in CASES.values()]
    budgets = [budget for _, _, budget in CASES.values()]
    torch.accelerator.synchronize(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    loaded = [within(version, budget) for version, budget in zip(versions, budgets, strict=True)]
    library_bytes = loaded[0]._device.library_bytes  # type: ignore[attr-defined]
    for _ in range(2):
        for model, version in zip(loaded, versions, strict=True):
            torch.accelerator.reset_peak_memory_stats(DEVICE)
            check_equal(model, version, [3])
            torch.accelerator.synchronize(DEVICE)
            rounded = 1.03 * sum(budgets) + 512 * 40  # the allocator rounds each tensor up
            assert torch.accelerator.max_memory_allocated(DEVICE) - before - library_bytes <= rounded
    loaded.pop(1).close()
    check_equal(loaded[1], versions[2], [3])
    for model in loaded:
        model.close()
    torch.accelerator.synchronize(DEVICE)
    assert torch.accelerator.memory_allocated(DEVICE) <= before + library_bytes
    if TYPE == "emulated":
        from tests.emulated.emulated import control

        assert control.registered_bytes() == 0


def test_each_device_drops_its_own_models() -> None:
    version = Version(every_type(60), WIDE)
    host = LoadedModel(version.preprocessing, version.model, 500)
    old, new = within(version, 400_000), within(version, 500_000)
    cache = ModelCache(2 * len(version.weights) + 500)
    for number, model in enumerate((host, old, new)):
        cache.add(Key(number), model)
    assert cache.device_bytes == {DEVICE: 900_000, "cpu": 500}  # budgets elsewhere are no host memory
    cache.shrink(DEVICE, 899_999)
    assert cache.device_bytes == {DEVICE: 500_000, "cpu": 500} and cache.get(Key(1)) is None
    cache.shrink("cpu", 0)
    assert [shown["device"] for shown in cache.shown()] == [DEVICE]
    check_equal(new, version, [5])
    cache.shrink(DEVICE, 0)
    assert cache.shown() == []


def test_weights_in_host_memory_count_for_the_cache() -> None:
    version = Version(every_type(60), WIDE)
    cache = ModelCache(len(version.weights) + 100)
    cache.add(Key(1, 400_000), within(version, 400_000))
    cache.add(Key(2), LoadedModel(version.preprocessing, version.model, 101))
    assert [shown["version"] for shown in cache.shown()] == [2]
    assert cache.device_bytes[DEVICE] == 0
