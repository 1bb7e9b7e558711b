"""`make first-gpu-run`: each part ends by itself or by its limit, and the page has what came out."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import first_gpu_run
from scripts.first_gpu_run import Outcome, Part, page, parts, run, server_parts
from tests.repository import REPOSITORY


def test_a_part_that_fails_or_takes_too_long_is_a_row_of_the_page(tmp_path: Path) -> None:
    good = run(Part("good", ("platform",), 60, {}), tmp_path)
    failed = run(Part("failed", ("a_module_that_is_not_there",), 60, {}), tmp_path)
    endless = run(Part("endless", ("http.server", "0"), 1, {}), tmp_path)
    assert good.status == 0 and good.last
    assert failed.status == 1 and "a_module_that_is_not_there" in failed.last
    assert endless.status is None
    row = {"label": "joint", "budget": "60%", "error": None, "bit_identical": True, "device_peak_bytes": 3 << 20}
    lines = [row | {"step_ms_median": 1.5}, row | {"error": "no plan"}]
    (tmp_path / "good.json").write_text("\n".join(map(json.dumps, lines)))
    text = page({"gpu": "none"}, [good, failed, endless], tmp_path)
    assert "- gpu: none" in text and "| endless | time limit |" in text
    assert "| joint | 60% | 3 MiB | 1.50 ms | identical |" in text and "| joint | 60% | no plan |" in text


def test_the_parts_name_tests_and_networks_that_there_are(tmp_path: Path) -> None:
    for device in ("cuda", "emulated"):
        made = parts(device, tmp_path)
        assert device != "cuda" or sum(part.limit_s for part in made) <= 15 * 60
        made += server_parts(device)[:1]  # the demo's needs no name of a device
        for part in made:
            assert part.environment["PG_TENSILE_ACCELERATOR"] == device
            for argument in part.arguments:
                assert not argument.startswith("tests/") or (REPOSITORY / argument).exists()
                assert not argument.startswith(first_gpu_run.TINY) or hasattr(
                    __import__(first_gpu_run.TINY, fromlist=["*"]), argument.partition(":")[2]
                )
    assert isinstance(Outcome(made[0], None, 1.0, ""), Outcome)
