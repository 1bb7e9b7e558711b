"""Process that runs mutants, each in a fork of itself: PyTorch, the emulator and a captured job are there already.

A request is a line of JSON on standard input: the mutated source by module, {} for the runtime as it is. The answer is
a line on standard output: the text of the error that found the mutant, null if it survived. The first request has to be
the unmutated one: its results are what the others' are compared with.

Nothing may run on the device here, as no thread survives a fork; the emulator starts its threads at their first work.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TextIO

from pg_tensile.execution.backends import backend_of

ROOT = Path(__file__).parents[3]
RELOADED = ("pg_tensile.execution.backends", "pg_tensile.execution.runtime")
POLL_S = 0.1
STUCK_POLLS = 10  # without any thread having run
LAST_RESORT_S = 100


def main(requests: TextIO, answers: TextIO) -> None:
    sys.path.append(str(ROOT / "tests" / "emulated"))
    backend_of("emulated")
    from tests.accelerator.mutants.job import prepare
    from tests.emulated.emulated import control

    prepared = prepare()
    importlib.import_module("pg_tensile.execution.runtime.executor")  # and what it imports, most of which stays
    for name in [name for name in sys.modules if name.startswith(RELOADED)]:
        del sys.modules[name]
    assert not control.streams_used(), "work was given to the device before the fork"
    gc.collect()
    gc.freeze()
    expected = None
    for line in requests:
        outcome = fork(json.loads(line), prepared, expected)
        expected = expected or outcome.get("values")
        print(json.dumps(outcome["report"]), file=answers, flush=True)


def fork(sources: dict[str, str], prepared: Any, expected: Any) -> dict[str, Any]:
    """Run one mutant in a child and return `report`, and `values` if nothing was found."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        outcome = pickle.dumps(attempt(sources, prepared, expected))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(outcome)
        os._exit(0)  # nothing that the mutant has left is waited for
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        stuck = wait(child, pipe.fileno())
        if stuck is not None:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if stuck is not None:
        return {"report": stuck}
    return pickle.loads(data) if data else {"report": f"the process ended with status {status}"}


def attempt(sources: dict[str, str], prepared: Any, expected: Any) -> dict[str, Any]:
    try:
        load(sources)
        from tests.accelerator.mutants import scenarios

        return {"report": None, "values": scenarios.run(prepared, expected)}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        notes = [*getattr(error, "__notes__", ()), f"at {Path(where.filename).name}:{where.lineno}"]
        return {"report": f"{type(error).__name__}: {error} ({', '.join(notes)})"}


def load(sources: dict[str, str]) -> None:
    """Let modules be imported from other sources."""

    class Loader(SourceLoader):
        def __init__(self, path: str, source: str) -> None:
            self.path, self.source = path, source

        def get_filename(self, fullname: str) -> str:
            return self.path

        def get_data(self, path: str) -> bytes:
            return self.source.encode()

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path) if name in sources else None
            if spec is not None and spec.origin is not None:
                spec.loader = Loader(spec.origin, sources[name])
                spec.cached = None
            return spec

    sys.meta_path.insert(0, Finder())


# ---- a child that does not end ---------------------------------------------------------------------------------------


def wait(child: int, pipe: int) -> str | None:
    """Wait for the child's answer and return None, or why there will be none.

    A dead lock is told from a busy machine by the threads: all of them sleep, and none has run since the last look."""
    begun, before, unchanged = time.monotonic(), None, 0
    while not select.select([pipe], [], [], POLL_S)[0]:
        now = switches(child)
        unchanged = unchanged + 1 if now is not None and now == before else 0
        before = now
        if unchanged >= STUCK_POLLS:
            return "dead lock: every thread sleeps for good"
        if time.monotonic() - begun > LAST_RESORT_S:
            return "it does not end"
    return None


def switches(process: int) -> list[tuple[str, int]] | None:
    """Return each thread's count of context switches, None if one of them runs or may."""
    counts = []
    try:
        for task in sorted(Path(f"/proc/{process}/task").iterdir()):
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
            if status["State"].split()[0] != "S":
                return None
            counts.append(
                (task.name, sum(int(status[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary")))
            )
    except OSError:  # a thread that has just ended
        return None
    return counts


if __name__ == "__main__":
    main(sys.stdin, os.fdopen(os.dup(1), "w"))
