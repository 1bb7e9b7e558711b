"""A tuning as the Python client, `pg-tensile top` and reports show it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pg_tensile.client import ArgumentError, Client, JobTimeout, ServerError, TuningFailed, connect
from pg_tensile.tools.cli.main import main
from tests.server.shared import SharedServer
from tests.server.support import FOREVER, ROWS, Wait
from tests.server.tuning import SPACE


@pytest.fixture(scope="module")
def client(shared_server: SharedServer) -> Iterator[Client]:
    with connect(shared_server.dsn()) as client:
        client.register("m", {"type": "mlp", "hidden": [4]})
        yield client


def test_a_tuning_is_waited_for_and_has_its_trials(client: Client) -> None:
    tuning = client.tune("m", ROWS, "y", SPACE, trials=3, metric="accuracy", epochs=2, batch_size=64, seed=1)
    assert tuning.wait() == tuning.state == "finished"
    trials = tuning.trials()
    assert list(trials.index) == [0, 1, 2] and set(trials["state"]) == {"finished"}
    best = tuning.best
    assert best is not None and best["value"] == trials["value"].max()
    assert best["params"] == trials["params"][best["trial"]] and set(best["params"]) == set(SPACE)
    assert client.tuning(tuning.number).model == "m" and repr(tuning) == f"<tuning {tuning.number} of model 'm'>"
    assert tuning.cancel() is False
    report = client.job(int(trials["job"][0])).report()
    assert f"trial 0 of tuning {tuning.number}" in report.html


def test_an_open_tuning_is_shown_and_can_be_stopped(
    shared_server: SharedServer, client: Client, wait_until: Wait, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = client.tune("m", ROWS, "y", SPACE, trials=3, epochs=FOREVER, options={"keep": "last"})
    wait_until(lambda: "running" in set(tuning.trials()["state"]))
    with pytest.raises(JobTimeout, match="has not ended in time: it is running"):
        tuning.wait(timeout=0.01)
    assert main(["top", "-d", shared_server.dsn(), "--once", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["tunings"]
    assert (shown["tuning"], shown["model"], shown["trials"], shown["ended"]) == (tuning.number, "m", 3, 0)
    assert main(["top", "-d", shared_server.dsn(), "--once"]) == 0
    assert f"tuning {tuning.number} m: 0 of 3 trials" in capsys.readouterr().out
    assert tuning.best is None and tuning.cancel() is True
    assert tuning.wait(timeout=60) == "cancelled"


def test_errors(client: Client) -> None:
    with pytest.raises(ServerError, match='unknown key "lerning_rate" in the space'):
        client.tune("m", ROWS, "y", {"lerning_rate": [1]})
    with pytest.raises(ArgumentError, match='tune has no argument "epoch"'):
        client.tune("m", ROWS, "y", epoch=1)
    with pytest.raises(ArgumentError, match="argument trials is not a whole number"):
        client.tune("m", ROWS, "y", trials="many")  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="tuning 99999 does not exist"):
        client.tuning(99999)
    failing = client.tune("m", "SELECT i AS x, 1 / (i - 3) AS y FROM generate_series(1, 9) i", "y", trials=2)
    with pytest.raises(TuningFailed, match="division by zero"):
        failing.wait()
