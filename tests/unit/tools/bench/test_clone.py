"""Requests for parts that only a clone has, where only the library is installed."""

from __future__ import annotations

import re

import pytest

from pg_tensile.errors import OptionError
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.tools.bench import clone
from pg_tensile.tools.cli.main import main
from tests.repository import REPOSITORY
from tests.unit.graphs import chain

NET = ("--model", "torch.nn:Linear", "--kwargs", '{"in_features": 4, "out_features": 2}', "--input", "float32:4")


def test_only_one_module_of_the_library_names_modules_of_the_clone():
    naming = [
        path.name
        for path in (REPOSITORY / "pg_tensile").rglob("*.py")
        if re.search(r"(?<!-m )\bbenchmarks[.}/](?!results|md)\w", path.read_text())
    ]
    assert naming == []


@pytest.mark.parametrize("asked", [["table1"], ["savings", "--quick"]])
def test_experiments_outside_a_clone_are_refused_with_a_hint(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clone, "ROOT", tmp_path)
    assert main(["bench", *asked]) == 2
    printed = capsys.readouterr().err
    assert "not installed with pg_tensile" in printed and "hint: Run it in a clone" in printed


def test_the_optimum_outside_a_clone_is_a_row_with_its_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clone, "ROOT", tmp_path)
    assert main(["bench", *NET, "--device", "sim:RTX_A6000", "--policies", "optimum:budget=90%"]) == 1
    assert "not installed with pg_tensile" in capsys.readouterr().out


def test_the_optimum_of_several_jobs_is_refused():
    with pytest.raises(OptionError, match="one job only"):
        clone.optimum({0: chain(), 1: chain()}, RTX_A6000, 100)
