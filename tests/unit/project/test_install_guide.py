"""docs/install.md as a script: its commands, and the reading of a run's trace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.install_guide import PAGE, WAYS, chosen, megabytes, result, script, times

TRACE = """+100.000001 apt-get update
+101.500001 runuser -u postgres -- psql -d mydb -c 'CREATE EXTENSION pg_tensile CASCADE'
+102.000001 runuser -u postgres -- psql -d mydb
+110.000001 apt-get purge -y pg-tensile-common
+111.000001 :
"""
OUTPUT = (
    "Need to get 61.2 MB of archives.\nNeed to get 1,250 kB/1,300 kB of archives.\n"
    "       miles       \n-------------------\n 27.27821501769314\n(1 row)\n"
)


@pytest.mark.parametrize("way", WAYS)
def test_the_page_is_a_script_for_each_version(way: str) -> None:
    commands = chosen(PAGE.read_text(), way)
    text = script(PAGE.read_text(), way, "15", "/usr/bin/python3.11")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "postgresql-17" not in text and "(17.8, 6, 123, 3.440)" in text
    assert text.count("--find-links /wheels --python /usr/bin/python3.11") == 1
    assert ("apt-get purge" in text, "make uninstall" in text) == (way == "packages", way == "source")
    assert len(commands) == text.count("\n") - 6 - sum(command.count("\n") for command in commands)


def test_a_first_prediction_takes_at_most_ten_commands() -> None:
    commands = chosen(PAGE.read_text(), "packages")
    assert next(number for number, command in enumerate(commands, 1) if "predict(" in command) <= 10


def test_a_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(TRACE)
    (tmp_path / "log").write_text(OUTPUT)
    assert [seconds for _, seconds in times(TRACE)] == [1.5, 0.5, 8.0, 1.0]
    assert megabytes(OUTPUT) == 62.5
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").write_bytes(bytes(400_000))
    (tmp_path / "torchmetrics-1.0-py3-none-any.whl").write_bytes(bytes(200_000))
    of_run = result(tmp_path, tmp_path)
    assert (of_run["commands"], of_run["seconds"]) == (3, 10.0)
    assert (of_run["debian_mb"], of_run["torch_mb"], of_run["other_wheels_mb"]) == (62.5, 0.4, 0.2)
    assert of_run["prediction"] == pytest.approx(27.278215)
    (tmp_path / "log").write_text("ERROR: no such model\n")
    with pytest.raises(ValueError, match="has no prediction"):
        result(tmp_path, tmp_path)
