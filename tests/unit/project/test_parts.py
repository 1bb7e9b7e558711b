"""Parts of the long tests, and what a run tells of its failures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import failures
from tests.parts import deal
from tests.repository import REPOSITORY

FILES = st.dictionaries(st.text("abc", min_size=1), st.integers(0, 100), max_size=12)


@given(FILES, st.integers(1, 5))
def test_each_file_is_in_one_part_and_no_part_has_much_more_than_its_share(files, parts):
    part_of = deal(files, parts)
    assert part_of.keys() == files.keys()
    sums = [sum(files[file] for file in files if part_of[file] == part) for part in range(parts)]
    assert max(sums) <= sum(files.values()) / parts + max(files.values(), default=0)


def run_pytest(folder, *arguments):
    """Run pytest with the plugin on tests in a folder; return its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.parts", "-p", "no:cacheprovider", "-c", "/dev/null"]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    return subprocess.run([*command, "--rootdir", ".", *arguments], cwd=folder, env=environment, check=False).returncode


@pytest.fixture
def tests(tmp_path):
    """Folder with a short and a long test in each of three files; the long one in the second fails."""
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(
            "import pytest\ndef test_short(): pass\n"
            f"@pytest.mark.filterwarnings('ignore')\n@pytest.mark.long\ndef test_long(): assert {number} != 1\n"
        )
    return tmp_path


def test_parts_have_each_long_test_once_and_the_short_ones_each_time(tests):
    summaries = []
    for part in range(2):
        run_pytest(tests, "--long-part", f"{part}/2", "--summary", "summary.json", ".")
        summaries.append(json.loads((tests / "summary.json").read_text()))
    assert sum(summary["passed"] for summary in summaries) == 3 + 3 + 2
    assert [summary["failed"] for summary in summaries].count([["test_1.py::test_long", True]]) == 1


def test_a_run_that_could_not_begin_has_no_summary(tests):
    (tests / "test_3.py").write_text("import nothing_of_this_name\n")
    assert run_pytest(tests, "--summary", "summary.json", ".") == pytest.ExitCode.INTERRUPTED
    assert not (tests / "summary.json").exists()


@pytest.mark.parametrize("part", ["4/4", "-1/4", "1", "a/b"])
def test_a_part_that_is_none_is_refused(tests, part):
    assert run_pytest(tests, f"--long-part={part}", ".") == pytest.ExitCode.USAGE_ERROR


def test_failures_of_a_run(tmp_path, monkeypatch, capsys):
    """Without a summary, and with a short test among the failed ones, the change has failed; nothing runs again."""

    def status(summary):
        path = tmp_path / "summary.json"
        path.unlink(missing_ok=True)
        if summary is not None:
            path.write_text(json.dumps(summary))
        monkeypatch.setattr(sys, "argv", ["failures", str(path)])
        return failures.main()

    assert status(None) == 1
    assert status({"failed": [["test_a.py::test_a", False], ["test_a.py::test_b", True]]}) == 1
    assert status({"failed": []}) == 1  # make failed, not the tests
    assert "parent" not in capsys.readouterr().out


def test_a_long_test_that_failed_before_is_told_from_one_that_passed():
    lines = failures.verdict(["a::a", "b::b", "c::c"], {"a::a", "b::b"}, "- `b::b`: since the last release")
    assert lines == [
        "failed before this change, to be named in docs/verification.md: a::a",
        "failed before this change, named in docs/verification.md: b::b",
        "failed by this change: c::c",
    ]
