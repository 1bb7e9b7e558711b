"""Predictions on an accelerator, the emulated one: within a memory budget they run there, all others on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.server.emulated_device import install_emulator
from tests.server.refusals import refusal
from tests.server.support import Connection, Wait, finish, submit, value
from tests.server.test_accelerator import MEMORY, OVERHEAD, PROFILE

DEVICE = "emulated:0"
ROWS = """
    CREATE TABLE points AS SELECT i AS id, cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i * 0.7) AS y
    FROM generate_series(1, 200) i
"""
# Not what the predictor computes with numpy, whose digits differ from PyTorch's
NUMBERS = {"type": "mlp", "hidden": [256, 256, 256], "norm": "layer"}
BUDGETS = count(700_000)  # the weights take 0.5 MB; each is another model
LOOKUP = """
import torch
class Model(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table = torch.nn.Embedding(4, 8)
        self.last = torch.nn.Linear(8, outputs)
    def forward(self, x):
        return self.last(self.table((x[:, 0] > 2).long() * 100))
def build(n_inputs, n_outputs):
    return Model(n_outputs)
"""
ASK = "SELECT predict('numbers', ARRAY[0.1, 0.2], %s)"
LOADED = "SELECT device FROM tensile.loaded_models WHERE memory_budget IS NOT DISTINCT FROM %s"


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any], clusters_folder: Path) -> Iterator[Any]:
    """A cluster whose children know the emulated device and use it. It need not be measured."""
    settings = {
        "pg_tensile.python": str(install_emulator(clusters_folder / "emulator")),
        "pg_tensile.device": "emulated",
        "pg_tensile.device_memory": "1GB",
        "pg_tensile.predict_in_session": "off",
        "pg_tensile.predict_batching": "off",
    }
    cluster = new_cluster(settings)
    try:
        with cluster.connect() as conn:
            conn.execute(
                "INSERT INTO tensile_internal.device_profiles VALUES (%s, %s)", (DEVICE, json.dumps(asdict(PROFILE)))
            )
            conn.execute(ROWS)
            for name, model in (("numbers", NUMBERS), ("lookup", {"type": "python", "source": LOOKUP})):
                finish(conn, submit(conn, name, model, query="SELECT a, b, y FROM points", epochs=1))
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def budget(size: int) -> str:
    return f"{size}B"


def inference_bytes(conn: Connection) -> dict[str, int]:
    devices = "SELECT name, inference_bytes FROM tensile.devices WHERE inference_bytes > 0"
    return dict(conn.execute(devices).fetchall())


def test_predictions_within_a_budget_run_on_the_device(conn: Connection, wait_until: Wait) -> None:
    """With the CPU's digits, as the emulated device has its kernels; the ledger counts models and context."""
    size = next(BUDGETS)
    whole = value(conn, ASK, None)
    assert value(conn, ASK, budget(size)) == whole
    weights = value(conn, "SELECT weight_bytes FROM tensile.model_versions ORDER BY version_id LIMIT 1")
    wait_until(lambda: (value(conn, LOADED, None), value(conn, LOADED, size)) == ("cpu", DEVICE))
    booked = {"cpu": weights, DEVICE: OVERHEAD + size}
    wait_until(lambda: inference_bytes(conn) == booked, what=lambda: str(inference_bytes(conn)))
    rows = "SELECT * FROM predict_rows('numbers', 'SELECT a, b FROM points ORDER BY id LIMIT 64', %s)"
    expected = conn.execute(rows, (None,)).fetchall()
    assert conn.execute(rows, (budget(size),)).fetchall() == expected
    assert len({prediction for _, prediction, _, _ in expected}) > 1
    total = "SELECT total_bytes FROM tensile.devices WHERE name = %s"
    assert value(conn, total, DEVICE) == MEMORY


def test_a_budget_has_to_fit_the_device_beside_the_predictors_context(conn: Connection) -> None:
    room = 2**30 - OVERHEAD
    message = f'a memory_budget of {room + 1:,} bytes is more than the {room:,} of device "{DEVICE}"'
    assert refusal(conn, ASK, budget(room + 1))[:2] == ("22023", message)


def test_the_setting_is_that_of_the_next_model_loaded(server: Any, conn: Connection, wait_until: Wait) -> None:
    """A device that is not there is an error of predictions within a budget only."""

    def use(name: str) -> None:
        server.configure({"pg_tensile.device": name})
        server.reload()

    def error() -> str | None:
        try:
            conn.execute(ASK, (budget(next(BUDGETS)),))
        except Exception as raised:
            return getattr(raised, "sqlstate", None)
        return None

    def loaded_on() -> str:
        size = next(BUDGETS)
        assert value(conn, ASK, budget(size)) == whole
        wait_until(lambda: value(conn, LOADED, size) is not None)
        return str(value(conn, LOADED, size))

    kept, whole = next(BUDGETS), value(conn, ASK, None)
    assert value(conn, ASK, budget(kept)) == whole
    try:
        use("emulated:9")
        wait_until(lambda: error() == "55000")
        message = refusal(conn, ASK, budget(next(BUDGETS)))[1]
        assert message == 'the device "emulated:9" is not there: PyTorch sees 2 emulated devices'
        assert value(conn, ASK, None) == value(conn, ASK, budget(kept)) == whole
        use("cpu")
        wait_until(lambda: error() is None)
        assert loaded_on() == "cpu" and value(conn, LOADED, kept) == DEVICE
    finally:
        use("emulated")
    wait_until(lambda: loaded_on() == DEVICE)


def test_the_predictor_is_replaced_after_a_failure_of_the_device(server: Any, conn: Connection) -> None:
    """A model reads beyond a table: the request has the cause, and all predictions go on in another predictor."""
    server.expect(f"the device {DEVICE} has failed")
    lookup, size = "SELECT predict('lookup', ARRAY[%s, 0.0], %s)", next(BUDGETS)
    whole = value(conn, ASK, None)
    assert value(conn, lookup, 0.0, budget(size)) == value(conn, lookup, 0.0, None)
    processes = server.processes()
    (pid,) = [pid for pid, command in processes.items() if "-m pyworker predictor" in command]
    sqlstate, message, hint = refusal(conn, lookup, 3.0, budget(size))  # 4 deviations, 1.4 in training
    assert (sqlstate, message) == ("58000", f"the device {DEVICE} has failed") and hint
    assert value(conn, ASK, None) == whole == value(conn, ASK, budget(next(BUDGETS)))
    assert value(conn, lookup, 0.0, budget(size)) == value(conn, lookup, 0.0, None)
    assert pid not in server.processes()
