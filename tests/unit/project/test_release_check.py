"""Parts of the check of a release, with cheap commands in a small repository."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.release_check import PARTS
from tests.repository import REPOSITORY
from tests.unit.project.test_image_due import AUTHOR

MAIN = """
import json, sys
from pathlib import Path
from scripts.release_check import main
sys.exit(main(sys.argv[3:], json.loads(sys.argv[1]), Path(sys.argv[2])))
"""
COUNT = "echo run >>build/runs-{0}; echo {0} has run"


class Checkout:
    """A repository with a document, and commands as its parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "docs").mkdir(parents=True)
        (folder / "docs" / "verification.md").write_text("not run\n")
        (folder / ".gitignore").write_text("build/\n")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | AUTHOR
        return subprocess.check_output(["git", *arguments], cwd=self.folder, env=environment, text=True).strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def start(self, parts: Mapping[str, str], *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, json.dumps(parts), str(self.folder), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment
        )

    def check(self, parts: Mapping[str, str], *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(parts, *arguments, **environment)
        output, errors = process.communicate()
        return process.returncode, output + errors

    def runs(self, part: str) -> int:
        """Return how often a part with the command COUNT has run."""
        path = self.folder / "build" / f"runs-{part}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def files(self, part: str) -> list[Path]:
        return [*self.folder.glob(f"build/release-check/*/{part}.json")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def test_a_part_that_passed_is_kept_and_one_that_failed_runs_again(checkout: Checkout) -> None:
    parts = {"a": COUNT.format("a"), "b": COUNT.format("b") + "; (exit 3)", "c": COUNT.format("c")}
    for number in (1, 2):
        status, output = checkout.check(parts)
        assert status == 1 and "failed: b" in output and "2 of all 3 parts have passed" in output
        assert "    b has run" in output  # the last lines of its log
        assert [checkout.runs(part) for part in parts] == [1, number, 1]
    (path,) = checkout.files("b")
    result = json.loads(path.read_text())
    assert (result["status"], result["last"], result["command"]) == (3, ["b has run"], parts["b"])
    assert path.with_suffix(".log").read_text() == "b has run\n"
    status, output = checkout.check(parts | {"b": "true"})
    assert status == 0 and "3 of all 3 parts have passed" in output


def test_a_part_with_another_command_runs_again(checkout: Checkout) -> None:
    checkout.check({"a": COUNT.format("a")})
    checkout.check({"a": "true; " + COUNT.format("a")})
    assert checkout.runs("a") == 2


def test_another_revision_runs_all_again_but_not_the_note_of_the_long_tests(checkout: Checkout) -> None:
    parts = {"a": COUNT.format("a")}
    checkout.check(parts)
    (checkout.folder / "docs" / "verification.md").write_text("passed\n")
    checkout.check(parts)
    checkout.commit()
    checkout.check(parts)
    assert checkout.runs("a") == 1
    (checkout.folder / "file").write_text("new\n")
    for number in (2, 3):  # with changes nothing is kept
        assert checkout.check(parts)[0] == 0
        assert checkout.runs("a") == number
    checkout.commit()
    checkout.check(parts)
    checkout.check(parts)
    assert checkout.runs("a") == 4


def test_chosen_parts_and_the_list(checkout: Checkout) -> None:
    parts = {"a": COUNT.format("a"), "b": "false", "c": COUNT.format("c")}
    assert checkout.check(parts, "--parts", "a")[0] == 0
    assert checkout.check(parts, "--parts", "b")[0] == 1
    assert [checkout.runs(part) for part in ("a", "c")] == [1, 0]
    status, output = checkout.check(parts, "--list")
    assert status == 0
    assert [line.split()[1] for line in output.splitlines()[::2]] == ["passed,", "failed", "to"]
    status, output = checkout.check(parts, "--parts", "a,d")
    assert status == 2 and "no such part: d" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_goes_on_with_its_part(checkout: Checkout, number: signal.Signals) -> None:
    """Whatever the part has started ends as well."""
    fifo = checkout.folder / "build" / "fifo"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    waits = f"[ -e build/once ] && exit; echo >build/once; sleep 600 & echo $! >{fifo}; wait"
    parts = {"a": COUNT.format("a"), "b": COUNT.format("b") + "; " + waits, "c": COUNT.format("c")}
    process = checkout.start(parts)
    sleeper = os.pidfd_open(int(fifo.read_text()))
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "a: passed" in output and "goes on with this part" in errors
    select.select([sleeper], [], [])  # it has ended
    os.close(sleeper)
    assert not checkout.files("b") and not checkout.files("c")
    status, output = checkout.check(parts)
    assert status == 0 and "3 of all 3 parts have passed" in output
    assert [checkout.runs(part) for part in parts] == [1, 2, 1]


def test_a_run_is_alone_in_its_checkout(checkout: Checkout) -> None:
    fifo = checkout.folder / "build" / "fifo"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    first = checkout.start({"a": f"echo >{fifo}; cat {fifo}"})
    fifo.read_text()
    status, output = checkout.check({"a": "true"})
    assert status == 1 and "another one runs" in output
    fifo.write_text("go on\n")
    assert first.wait() == 0
    first.communicate()


def test_a_part_in_which_the_checkout_changes_is_not_kept(checkout: Checkout) -> None:
    parts = {"a": "echo new >file", "b": COUNT.format("b")}
    status, output = checkout.check(parts)
    assert status == 1 and "the checkout has changed while a ran" in output
    assert not checkout.files("a") and checkout.runs("b") == 0


def test_parts_do_not_have_the_variables_of_the_make_that_started_them(checkout: Checkout) -> None:
    """`make release-check PARTS=long` would choose parts of the long tests, too."""
    (checkout.folder / "Makefile").write_text("all:\n\t@echo 'parts: $(PARTS)'\n")
    checkout.commit()
    checkout.check({"a": "make --no-print-directory"}, PARTS="a", MAKEFLAGS="k -- PARTS=a", MAKELEVEL="1")
    (path,) = checkout.files("a")
    assert json.loads(path.read_text())["last"] == ["parts:"]


# ---- the parts of this project --------------------------------------------------------------------------------------


def test_parts_call_targets_and_tests_that_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][\w -]*):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    for command in PARTS.values():
        called = set(re.findall(r"\bmake (?:-s )?([a-z0-9-]+)", command))
        tests = re.findall(r"\btests/\S+", command)
        assert called and called <= targets, command
        assert all((REPOSITORY / test).exists() for test in tests), command
