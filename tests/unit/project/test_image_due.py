"""Runs of continuous integration that build the image, by the history of a small repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

SCRIPT = Path("scripts/image_due.sh")
MAKEFILE = """
.PHONY: help \\
    test
all: pg_tensile.so
help:
	@echo help
test:
	@pytest tests
"""
AUTHOR = {f"GIT_{role}_{key}": "x@y" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}


class History:
    """A repository with the script and inputs of the image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet")
        self.write("Makefile", MAKEFILE)
        self.write("docker/Dockerfile", "FROM debian\n")
        (folder / SCRIPT).parent.mkdir()
        shutil.copy(REPOSITORY / SCRIPT, folder / SCRIPT)
        self.commit()

    def git(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | AUTHOR
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, check=True, stdout=subprocess.PIPE
        ).stdout.decode()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)

    def commit(self, commits: int = 1) -> None:
        """Commit what was written, and then nothing until there are so many commits more."""
        self.git("add", "--all")
        for _ in range(commits):
            self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def due(self, *arguments: str, folder: Path | None = None) -> bool:
        done = subprocess.run([str((folder or self.folder) / SCRIPT), *arguments], capture_output=True, text=True)
        assert done.returncode in (0, 1) and done.stdout.startswith("image-due: ") and not done.stderr, done
        return done.returncode == 0


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "repository")


def test_one_of_four_commits_when_nothing_changes(history):
    history.commit(16)
    dues = []
    for _ in range(8):  # commits 18 to 25
        history.commit()
        dues.append(history.due())
    assert dues == [False, False, True, False] * 2
    assert history.due() is dues[-1]


def test_a_changed_input_for_sixteen_commits_or_since_the_tested_revision(history):
    history.commit(16)
    history.write("docker/Dockerfile", "FROM debian:bookworm\n")
    history.commit()
    assert history.due() and history.due("HEAD~1")
    assert not history.due("HEAD")
    history.commit(15)  # 33 commits in all
    assert history.due() and not history.due("HEAD~1")
    history.commit()
    assert not history.due()


def test_an_input_that_is_not_committed(history):
    history.commit(16)
    assert not history.due()
    history.write("docker/Dockerfile", "FROM debian:bookworm\n")
    assert history.due()


@pytest.mark.parametrize(
    ("old", "new", "due"),
    [
        ("all: pg_tensile.so", "all: pg_tensile.so sql", True),
        ("    test", "    test lint", False),
        ("pytest tests", "pytest -n 2 tests", False),
    ],
    ids=["building", "names", "testing"],
)
def test_of_the_makefile_the_rules_that_build(history, old, new, due):
    history.commit(16)
    history.write("Makefile", MAKEFILE.replace(old, new))
    history.commit()
    assert history.due() is due


def test_every_commit_where_git_cannot_tell(history, tmp_path):
    history.commit(2)
    assert history.due()  # less than sixteen commits
    assert not history.due("HEAD~2")
    assert history.due("0123456")
    history.commit(18)
    history.git("clone", "--quiet", "--depth=18", f"file://{history.folder}", str(tmp_path / "shallow"))
    assert not history.due()
    assert history.due(folder=tmp_path / "shallow")


def test_inputs_exist_and_cover_what_the_dockerfiles_copy():
    inputs = (REPOSITORY / SCRIPT).read_text().partition("inputs=(")[2].partition(")")[0].split()
    assert all((REPOSITORY / name).exists() for name in inputs)
    dockerfiles = (REPOSITORY / "docker").glob("*Dockerfile")
    lines = [line for path in dockerfiles for line in path.read_text().splitlines()]
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from=" not in line]
    copied = {name for names in copies for name in names}
    covered = {name for name in copied if any(Path(name).is_relative_to(given) for given in inputs)}
    assert copied - covered == {
        "Makefile",
        "LICENSE",
        "sql",
        "pg_tensile",
        "pyworker",
    }  # its rules; what other tests compile and run
