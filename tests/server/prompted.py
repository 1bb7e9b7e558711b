"""A trainer that trains nothing: it sends the frames that a test writes down.

Run as `prompted.py FOLDER` in the trainer's place (`pg_tensile.python` points to a script that does so). The header of
its JOB frame is in FOLDER/<job>.<attempt>.spec once it has all rows. Then it sends the frames in the files
FOLDER/<job>.<attempt>.1, .2, …, as they come, each JSON: [type, header, number of buffers, which are empty].
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from pyworker import child
from pyworker.connection import Connection
from pyworker.wire import FrameType

GIGABYTE = 1 << 30
PROFILE = {"name": "far away", "kind": "cuda", "memory_bytes": 64 * GIGABYTE, "out_bytes_per_s": 1e9}
PROFILE |= {"in_bytes_per_s": 1e9, "duplex_factor": 1.0, "flops_per_s": 1e12, "bytes_per_s": 1e11}
PROFILE |= {"transfer_latency_us": 1.0, "launch_us": 1.0, "handover_us": 0.0, "process_bytes": 0}
TRACE = {"profile": PROFILE, "revision": 1, "policy": "none", "overhead_bytes": 0, "graphs": [], "operator": None}
TRACE |= {"overhead_measured": False}
TRACE |= {"least_bytes": 32 * GIGABYTE, "vanilla_bytes": None, "fingerprint": None, "load": 0.0}

# The planner is the real one; there is no fork server.
SCRIPT = """#!/bin/sh
case "$3" in
    planner) exec "{python}" "$@" ;;
    trainer) exec "{python}" "{folder}/prompted.py" "{folder}" ;;
esac
exit 1
"""


class Prompter:
    """The test's side, in a cluster whose trainers are these."""

    def __init__(self, cluster: Any, wait_until: Any, python: str) -> None:
        self.cluster = cluster
        self._wait_until = wait_until
        self._folder = cluster.folder / "prompted"
        self._folder.mkdir()
        shutil.copy(__file__, self._folder)
        script = self._folder / "python"
        script.write_text(SCRIPT.format(python=python, folder=self._folder))
        script.chmod(0o755)
        shutil.chown(self._folder, cluster.os_user)
        cluster.configure({"pg_tensile.python": script})
        cluster.reload()
        self._sent: dict[str, int] = {}

    def spec(self, job: int, attempt: int = 1) -> dict[str, Any]:
        """Wait for the trainer of the attempt, and return the header of its JOB frame."""
        file = self._folder / f"{job}.{attempt}.spec"
        self._wait_until(file.exists, what=f"attempt {attempt} at job {job}")
        spec: dict[str, Any] = json.loads(file.read_text())
        return spec

    def send(self, job: int, type: FrameType, header: dict[str, Any], attempt: int = 1, buffers: int = 0) -> None:
        """Have the trainer of the attempt send a frame."""
        self.spec(job, attempt)
        prefix = f"{job}.{attempt}"
        self._sent[prefix] = self._sent.get(prefix, 0) + 1
        write(self._folder / f"{prefix}.{self._sent[prefix]}", json.dumps([type.name, header, buffers]))

    def trace(self, job: int, device: str, **changes: Any) -> None:
        self.send(job, FrameType.TRACE, TRACE | {"device": device} | changes)

    def progress(self, job: int, **header: Any) -> None:
        self.send(job, FrameType.PROGRESS, header)


def write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.rename(path)


def act(connection: Connection, hello: dict[str, Any]) -> None:
    frame = connection.recv()
    assert frame is not None
    spec, prefix = frame.header, f"{frame.job}.{frame.header['attempt']}"
    while frame.type != FrameType.ROWS_END:
        frame = connection.recv()
        assert frame is not None
    folder = Path(sys.argv[1])
    write(folder / f"{prefix}.spec", json.dumps(spec))
    for number in count(1):
        while not (folder / f"{prefix}.{number}").exists():
            time.sleep(0.02)
        type, header, buffers = json.loads((folder / f"{prefix}.{number}").read_text())
        connection.send(FrameType[type], frame.job, header=header, buffers=[b""] * buffers)


if __name__ == "__main__":
    child.main(act)
