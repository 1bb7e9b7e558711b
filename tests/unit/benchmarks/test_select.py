"""The benchmark of predictions within SELECT: products of a model, fetched rows, turns, checks and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.server import fetched, products, select, table_rates
from benchmarks.server.predict import Pass
from benchmarks.synthetic_table import CARDINALITIES, FEATURES, NUMBERS
from pg_tensile.execution.data.preprocessing import ModelInputs
from pg_tensile.execution.models.mlp import MLPArchitecture
from pg_tensile.execution.models.tabular import TabularArchitecture
from tests.unit.measured import results_with

BINS = ((-1.0, 0.0, 1.0),) * 3
INPUTS = ModelInputs(numeric=6, cardinalities=(4, 5), arrays=(), bins=BINS)


def test_the_matrices_of_a_network_are_those_of_its_layers() -> None:
    module = MLPArchitecture(hidden=(8, 4), embedding=2).build(INPUTS, 1)
    layers = products.matrices(module)
    assert [tuple(layer.shape) for layer in layers.values()] == [(1, 10, 8), (1, 8, 4), (1, 4, 1)]
    assert products.operations(layers) == 2 * (80 + 32 + 4)
    assert products.rate(layers, 0.01) > 0


def test_members_of_an_ensemble_share_the_products_that_they_can() -> None:
    module: Any = TabularArchitecture(members=3, projection=8, hidden=4, layers=2, embedding=2).build(INPUTS, 1)
    project, first, second, last = products.matrices(module).values()
    assert [tuple(x.shape) for x in (project, first, second, last)] == [(1, 9, 8), (1, 8, 12), (3, 4, 4), (1, 12, 1)]
    x = torch.randn(5, 8)
    hidden = [block[0] for block in module.backbone.blocks]
    expected = hidden[0](x[:, None].expand(-1, 3, -1)) - hidden[0].bias
    assert torch.allclose((x @ first[0]).reshape(5, 3, 4), expected, atol=1e-5)


def test_others_are_not_measured_by_products() -> None:
    with pytest.raises(TypeError, match="Conv2d is not made of matrices alone"):
        products.matrices(torch.nn.Conv2d(1, 1, 3))


def test_fetched_rows_become_numbers_and_codes() -> None:
    columns: dict[str, Any] = {name: [0.5, None] for name in FEATURES[:NUMBERS]}
    columns |= {name: ["b", "never seen"] for name in FEATURES[NUMBERS:]}
    matrix = fetched.encoded(pa.table(columns), [pa.array(["a", "b"])] * len(CARDINALITIES))
    assert matrix[0].tolist() == [0.5] * NUMBERS + [1.0] * len(CARDINALITIES)
    assert np.isnan(matrix[1]).all()


def test_launched_workers_are_found_below_other_nodes() -> None:
    assert table_rates.launched({"Plans": [{"Workers Launched": 2, "Plans": [{}]}]}) == 2
    assert table_rates.launched({"Plans": [{}]}) == 0


def test_ways_take_turns_and_have_to_agree() -> None:
    order: list[str] = []

    def way(name: str, seconds: list[float], total: float) -> Any:
        def turn() -> Pass:
            order.append(name)
            return Pass(seconds.pop(), 2, total)

        return turn

    ways = {"a": way("a", [3.0, 1.0, 2.0], 1.0), "b": way("b", [4.0, 4.0, 9.0], 1.00001)}
    assert table_rates.take_turns(ways, 3, lambda: order.append("-")) == {"a": 2.0, "b": 4.0}
    assert order == ["a", "b", "-"] * 3
    ways = {"a": way("a", [1.0], 1.0), "b": way("b", [1.0], 1.01)}
    with pytest.raises(SystemExit, match="differ"):
        table_rates.take_turns(ways, 1)


def rates(model: str, **changes: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "rows": 10,
        "serial_per_s": 700_000,
        "parallel_per_s": 1_300_000,
        "predict_rows_per_s": 900_000,
    }
    numbers |= {"speedup": 1.86, "serial_times": 1.3, "parallel_times": 0.7}
    return {"table": "rates", "model": model, **numbers, **changes}


def test_goals_are_those_of_the_model(tmp_path: Path) -> None:
    of_products = {"products_per_s": 1_000_000, "gflops": 90.0, "of_products": 0.5}
    library = {"table": "libraries", "library": "LightGBM", "threads": "all", "trees": 100, "rows": 5}
    library |= {"fetching_s": 0.1, "encoding_s": 0.1, "predicting_s": 1.0, "per_s": 4, "times_as_fast": 1.5}
    results = results_with(tmp_path, rates("mlp", **of_products), rates("boosted", parallel_times=1.3), library)
    found = select.checks(results)
    assert [check.what for check in found if not check.holds] == [
        "mlp: of the rate of its matrix products",
        "boosted: times the time of predict_rows, with two parallel workers",
    ]
    assert len(found) == 4 + 2 + 1
    lines = select.tables(results)
    assert "| mlp | 10 | 700,000 | 1,300,000 | 900,000 | 1,000,000 | 90 | 50% |" in lines
    assert "| boosted | 10 | 700,000 | 1,300,000 | 900,000 |  |  |  |" in lines
    assert "| LightGBM | all | 100 | 5 | 0.10 | 0.10 | 1.00 | 4 | 1.50 |" in lines


def test_every_model_of_a_scenario_has_goals_and_every_table_columns() -> None:
    assert {name for name, _ in select.GOALS} <= select.TABLES.keys()
    assert {*table_rates.ARCHITECTURES, *table_rates.FOR_PREDICTOR} == {
        model for name, model in select.GOALS if name in ("rates", "predictor")
    }
