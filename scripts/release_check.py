"""All that a release is checked with, in parts: `make release-check`.

`PARTS=lint,dist` runs these parts only, `ARGS=--list` shows all of them and how they ended. A part has a file
`build/release-check/REVISION/PART.json` with its status, seconds and last lines, and a log beside it. A part that has
passed is not run again at this revision, one that failed or was interrupted is. A part that fails does not stop the
others; the exit status is 1 then. With uncommitted changes nothing is kept (scripts/kept.py).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scripts.first_gpu_run.steps import started
from scripts.kept import REPOSITORY, State, state_of

LAST_LINES = 20
# Variables of a make that may have started this: those of the parts have them, too
OF_A_MAKE = {"PARTS", "ARGS", "TESTS", "MAJOR", "MAJORS", "BENCH", "MFLAGS"}
PYTEST = "make -s deploy && .venv/bin/python -m pytest -q"
# Sections whose goals are no times in which a machine that does other things counts
BENCHMARKS = ("server --section feed", "answers --section digits")
# Cheap ones first. Each is a command for bash.
PARTS = {
    "lint": "make lint",
    "numbers": f"{PYTEST} tests/unit/project/test_docs_numbers.py tests/unit/project/test_docs.py",
    "dist": "make dist",
    "headers": "make test-headers",
    "installcheck": "make -s deploy && make installcheck",
    "upgrade": f"{PYTEST} tests/server/test_upgrade.py tests/server/test_update.py",
    "dump": f"{PYTEST} tests/server/test_dump_restore.py tests/server/test_release.py",
    "benchmarks": " && ".join(f"make bench BENCH='{sections} --quick'" for sections in BENCHMARKS),
    "test": "make test",
    "wheel": "make wheel",
    "packages": "make packages MAJORS='15 17 18 19'",
    "install": "make packages && make test-install",
    "image": "make test-docker",
    "postgresql-17": "make test-majors MAJORS=17",
    "postgresql-18": "make test-majors MAJORS=18",
    "postgresql-19": "make test-majors MAJORS=19",
    "sanitized": "make test-sanitized",
    "long": "make test-long-parts",
}


class Result(NamedTuple):
    """The end of a part. `revision` ends with + for uncommitted changes, `began` is UTC, `last`: lines of the log."""

    part: str
    command: str
    revision: str
    began: str
    seconds: int
    status: int
    last: list[str]

    @property
    def verdict(self) -> str:
        return f"{'passed' if self.status == 0 else f'failed ({self.status})'}, {self.seconds} s, {self.began}"


def file_of(state: State, part: str) -> Path:
    return state.folder("release-check") / f"{part}.json"


def kept(state: State, parts: Mapping[str, str], part: str) -> Result | None:
    """Return the end of a part at this revision if it has come to one with the command that it has now."""
    path = file_of(state, part)
    if not state.keeps(path):
        return None
    result = Result(**json.loads(path.read_text()))
    return result if result.command == parts[part] else None


def environment() -> dict[str, str]:
    """Return the environment without what a make hands down, which the makes of the parts would take for theirs."""
    return {name: value for name, value in os.environ.items() if name not in OF_A_MAKE and "MAKE" not in name}


def run(state: State, part: str, command: str) -> Result:
    """Run a part to its end and write its file. An interrupt ends what the part has started, and leaves no file."""
    path = file_of(state, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    print(f"{part}: {command} (log: {log.relative_to(state.repository)})", flush=True)
    began, start = time.strftime("%Y-%m-%d %H:%M", time.gmtime()), time.monotonic()
    shell = ["bash", "-e", "-o", "pipefail", "-c", command]
    with log.open("wb") as output, started(shell, state.repository, environment(), output, whole=True) as process:
        status = process.wait()
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    revision = f"{state.revision}{'+' if state.changed else ''}"
    result = Result(part, command, revision, began, round(time.monotonic() - start), status, lines[-LAST_LINES:])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result._asdict(), indent=1) + "\n")
    partial.replace(path)
    return result


def report(result: Result) -> None:
    print(f"{result.part}: {result.verdict}", flush=True)
    if result.status != 0:
        print(*(f"    {line}" for line in result.last), sep="\n", flush=True)


def run_all(state: State, parts: Mapping[str, str], chosen: list[str]) -> int:
    """Run the chosen parts that have not passed; return 1 if one has failed, or if the checkout changes meanwhile."""
    failed = []
    for part in chosen:
        result = kept(state, parts, part)
        if result is None or result.status != 0:
            result = run(state, part, parts[part])
            if state_of(state.repository) != state:
                file_of(state, part).unlink()
                print(f"release-check: the checkout has changed while {part} ran, which is not kept", file=sys.stderr)
                return 1
        report(result)
        if result.status != 0:
            failed.append(part)
    ends = [kept(state, parts, part) for part in parts]
    passed = sum(end is not None and end.status == 0 for end in ends)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(chosen)} of {len(chosen)} parts passed")
    if not state.changed:
        print(f"revision {state.revision}: {passed} of all {len(parts)} parts have passed")
    return int(bool(failed))


def interrupt(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt(number)


def main(arguments: list[str], parts: Mapping[str, str] = PARTS, repository: Path = REPOSITORY) -> int:
    parser = argparse.ArgumentParser(prog="release_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(parts), help="names of parts, with commas between them")
    parser.add_argument("--list", action="store_true", help="show all parts and how they ended at this revision")
    options = parser.parse_args(arguments)
    chosen = options.parts.split(",")
    if unknown := [part for part in chosen if part not in parts]:
        parser.error(f"no such part: {', '.join(unknown)} (--list names them)")
    state = state_of(repository)
    if options.list:
        for part, command in parts.items():
            result = kept(state, parts, part)
            print(f"{part:14} {result.verdict if result else 'to be run'}\n{'':14} {command}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, interrupt)
    folder = state.folder("release-check").parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("release-check: another one runs in this checkout", file=sys.stderr)
            return 1
        try:
            return run_all(state, parts, chosen)
        except KeyboardInterrupt as interrupted:
            print("release-check: interrupted; the next run goes on with this part", file=sys.stderr)
            return 128 + interrupted.args[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
