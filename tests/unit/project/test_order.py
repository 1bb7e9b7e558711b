"""The order of the test files: the longest of the last run that was measured start first."""

import json

from scripts.test_seconds import SECONDS, SHORTEST, read_seconds
from tests.repository import REPOSITORY


def test_seconds_are_summed_by_file_and_those_of_short_files_are_left_out(tmp_path):
    rows = [("collection", 9.0), ("tests/a.py::test_one", 1.5), ("tests/b.py::test_two", SHORTEST / 2), ("end", 3.0)]
    for worker in ("gw0", "gw1"):
        lines = [json.dumps({"test": test, "wall": wall}) for test, wall in rows[: 4 if worker == "gw0" else 2]]
        (tmp_path / f"{worker}.jsonl").write_text("\n".join(lines) + "\n")
    assert read_seconds(tmp_path) == {"tests/a.py": 3.0}


def test_the_files_that_are_ordered_exist():
    seconds = json.loads(SECONDS.read_text())
    assert seconds.keys() == {"short", "long"}
    files = {*seconds["short"], *seconds["long"]}
    assert files and not [file for file in files if not (REPOSITORY / file).is_file()]
