"""`python -m tests.mutants`: does `make test` see each mutant of the table?

The checkout, with what is not committed, is copied into a scratch folder, and the tests of the table run there: first
without a mutant, then with each in turn until a test fails. Long tests are left out.

A mutant whose tests start servers is compiled and installed into this machine's PostgreSQL. At the end, also after an
error or Ctrl-C, the extension of the checkout is installed again; after SIGKILL `make deploy` does that. No server
with the extension should run meanwhile.

The exit status is 1 if a mutant is not seen. Hypothesis draws the same examples each time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS
from tests.repository import REPOSITORY

LIMIT_S = 900.0  # for the tests of one mutant: many times what they take without it
GRACE_S = 60.0  # for pytest to end its servers after an interrupt
TESTS_FAILED = 1  # exit status of pytest
FAILURE = re.compile(r"^(FAILED|ERROR) (tests/[^\s\[]+)(.*)$", re.MULTILINE)  # in the summary at the end
# of `make mutants`, or changes what is imported or tested
NOT_INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ADDOPTS", "PYTHONPATH")


class InvalidMutant(Exception):
    """The tests can say nothing about the mutant: it does not compile, or they do not run."""


class Run(NamedTuple):
    """A command that has ended, with its output; status None: it was stopped after LIMIT_S."""

    status: int | None
    output: str


class Scratch:
    """A copy of the checkout in `folder`, with one mutant at most."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {name: text for name, text in os.environ.items() if name not in NOT_INHERITED}
        self._has_installed = False

    def fill(self) -> None:
        """Copy the files that git tracks or would track; the virtual environment is the same."""
        self.folder.chmod(0o755)  # for the user of servers
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        for name in listed.split("\0"):
            if (REPOSITORY / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, self.folder / name)
        (self.folder / ".venv").symlink_to((REPOSITORY / ".venv").resolve())

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant inside. Raises LookupError if its text is not there."""
        path = self.folder / mutant.file
        source, text = path.read_text(), mutant.mutated(self.folder)
        try:
            path.write_text(text)
            yield
        finally:
            path.write_text(source)

    def install(self) -> None:
        """Compile what has changed, and install all. Raises InvalidMutant."""
        self._has_installed = True
        for command in (["make", "-s", "all"], ["scripts/as_installer.sh", "make", "-s", "install"]):
            done = self._run(command)
            if done.status != 0:
                raise InvalidMutant(f"{' '.join(command)} fails:\n{done.output}")

    def restore(self) -> None:
        """Install the checkout's extension, if another one was installed."""
        if self._has_installed:
            self.install()

    def test(self, *arguments: str) -> Run:
        """Run pytest."""
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # examples that an earlier mutant has failed
        options = ("-q", "-m", "not long", "--hypothesis-seed", "0", "-p", "no:cacheprovider")
        return self._run([sys.executable, "-m", "pytest", *options, *arguments])

    def _run(self, command: Sequence[str]) -> Run:
        with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open as long as a server that was left
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                status = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
            output.seek(0)
            return Run(status, output.read())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process if it still runs, so that it ends its servers; kill it if it does not end."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def attempt(scratch: Scratch, mutant: Mutant) -> str | None:
    """Return what sees the mutant, None if nothing does. Raises InvalidMutant."""
    with scratch.mutated(mutant):
        if mutant.is_installed:
            scratch.install()
        run = scratch.test("-x", *mutant.selected(scratch.folder))
    if run.status == 0:
        return None
    if run.status is None:
        return f"the limit of {LIMIT_S:.0f} s"
    failures = sorted(FAILURE.findall(run.output), reverse=True)  # a test before its set-up and tear-down
    if run.status != TESTS_FAILED or not failures:
        raise InvalidMutant(f"pytest ends with status {run.status}:\n{run.output}")
    kind, test, message = failures[0]
    around = ", before or after it" if kind == "ERROR" else ""
    return f"{test}{around}{' (its time limit)' if 'Timeout' in message else ''}"


def main() -> int:
    """Try the mutants and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n")[0])
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help="try only these")
    parser.add_argument("--seed", type=int, help="try them in another order, that of this seed")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests, and try none")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if mutant.name in options.only]
    if options.seed is not None:
        random.Random(options.seed).shuffle(chosen)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.file}; {mutant.tests}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # restores what is installed, as Ctrl-C does
    with tempfile.TemporaryDirectory(prefix="pg_tensile-mutants-", dir="/tmp") as folder:
        scratch = Scratch(Path(folder))
        scratch.fill()
        try:
            return try_all(scratch, chosen)
        finally:
            scratch.restore()


def try_all(scratch: Scratch, mutants: Sequence[Mutant]) -> int:
    """Try the mutants, after their tests without one, and return the exit status."""
    if any(mutant.is_installed for mutant in mutants):
        scratch.install()
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.selected(scratch.folder))
    started = time.monotonic()
    run = scratch.test("-n", "2", "--dist", "loadfile", *tests)
    if run.status != 0:
        print(f"{run.output}\nThe tests fail without a mutant.")
        return 2
    print(f"without a mutant: {len(tests)} tests pass ({time.monotonic() - started:.0f} s)", flush=True)
    seen = 0
    for mutant in mutants:
        started = time.monotonic()
        try:
            by = attempt(scratch, mutant)
            seen += by is not None
            result = "NOT SEEN" if by is None else f"seen by {by}"
        except InvalidMutant as reason:
            result = f"INVALID: {reason}"
        print(f"{mutant.name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{seen} of {len(mutants)} mutants are seen")
    return 0 if seen == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
