"""Jobs whose memory flows: their plans, and the trainer's end of the socket on which they ask for memory.

`Player` is that end in the test, of a worker on a stage. Run as `memory_flow.py FOLDER`, this is a trainer itself, in
the place of the real one (`pg_tensile.python` points to a script that does so): it sends a trace, waits for its plan,
and asks for what the file FOLDER/<job> says. What it was granted stands in FOLDER/<job>.granted.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from pyworker import child
from pyworker.connection import Connection
from pyworker.wire import FrameType

WHOLE, REST, CONSTANT = -1, -2, -3
PROFILE = {"name": "host", "kind": "host", "memory_bytes": 1 << 30, "out_bytes_per_s": 1e9, "in_bytes_per_s": 1e9}
PROFILE |= {"duplex_factor": 1.0, "flops_per_s": 1e9, "bytes_per_s": 1e9, "transfer_latency_us": 1.0, "launch_us": 1.0}
PROFILE |= {"handover_us": 0.0, "process_bytes": 0}
TRACE = {"device": "cpu", "profile": PROFILE, "revision": 1, "policy": "none", "overhead_bytes": 0, "graphs": []}
TRACE |= {"overhead_measured": False}
TRACE |= {"operator": None, "least_bytes": 1, "vanilla_bytes": None, "fingerprint": None, "load": 0.0}


def group_rows(*most_and_rest: tuple[int, int]) -> bytes:
    """Return groups of one step each as rows (docs/internals.md, "Shared memory")."""
    rows = [struct.pack("<iiiiqq", n, n, n, n, most, rest) for n, (most, rest) in enumerate(most_and_rest)]
    return b"".join(rows)


def wave(least: int, *levels: int) -> list[tuple[int, int]]:
    """Return groups that take memory up to each level, the last one the peak, and give it back again."""
    falling = [*levels[-2::-1], least]
    return [*zip(levels, levels, strict=True), *zip(levels[::-1], falling, strict=True)]


def flow_call(job: int, groups: bytes, granted: int) -> str:
    return f"tensile_internal._publish_plan({job}, '', {granted}, {granted}, 1, '', '\\x{groups.hex()}')"


def request(generation: int, code: int, zero: int = 0) -> bytes:
    return struct.pack("<qii", generation, code, zero)


CONNECT = """
CREATE FUNCTION stage.connect(path text) RETURNS int LANGUAGE plpython3u AS $$
import socket
GD["end"] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
GD["end"].connect(path)
return GD["end"].fileno()
$$
"""


class Player:
    """The trainer of a job whose worker is on a stage; the device's memory flows between such jobs."""

    def __init__(self, stage: Any, wait_until: Any, job: int) -> None:
        self.stage, self.job = stage, job
        self._wait_until = wait_until
        self.generation = 0
        path = stage.cluster.folder / f"groups.{job}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            path.chmod(0o777)
            listener.listen()
            stage.order(job, f"SELECT tensile_worker._group_socket(stage.connect('{path}'))")
            self.end, _ = listener.accept()
        path.unlink()
        self.end.settimeout(10)

    def publish(self, groups: list[tuple[int, int]], granted: int | None = None) -> int | None:
        """Publish a plan with groups, or a constant grant, and fetch it; return the generation.

        Requests have the generation of the job's first plan until the test changes `generation`."""
        most = granted if granted is not None else max(size for size, _ in groups)
        generation = self.stage.order("scheduler", f"SELECT {flow_call(self.job, group_rows(*groups), most)} AS g")[0][
            "g"
        ]
        if generation is not None:
            self.stage.order(self.job, f"SELECT generation FROM tensile_worker._fetch_plan({generation - 1})")
            self.generation = self.generation or generation
        return None if generation is None else int(generation)

    def ask(self, code: int, generation: int | None = None) -> None:
        self.end.send(request(self.generation if generation is None else generation, code))

    def granted(self) -> None:
        """Wait for the answer to the last request."""
        assert self._wait_until(self.has_answer, 20, lambda: str(self.state()))
        assert struct.unpack("<q", self.end.recv(100)) == (self.generation,)

    def take(self, *codes: int) -> None:
        for code in codes:
            self.ask(code)
            self.granted()

    def state(self) -> dict[str, Any]:
        """Return whether the job waits, is late, and has a fault, when the worker has seen all requests."""
        state: dict[str, Any] = self.stage.order(self.job, "SELECT * FROM tensile_worker._flow_state()")[0]
        return state

    def waits(self) -> None:
        """Check that the last request has to wait."""
        self._wait_until(lambda: self.state()["waits"], 20, lambda: f"{self.state()} {self.has_answer()}")
        assert not self.has_answer()

    def asks(self, code: int) -> None:
        """Make a request, and wait until it is answered or known to wait."""
        self.ask(code)
        self._wait_until(lambda: self.has_answer() or self.state()["waits"], 20, lambda: str(self.state()))

    def has_answer(self) -> bool:
        return bool(select.select([self.end], [], [], 0)[0])

    def fault(self) -> str:
        return str(self._wait_until(lambda: self.state()["fault"], 60, "a fault"))


# -- a trainer ------------------------------------------------------------------------------------------------------


def await_frame(connection: Connection, type: FrameType) -> Any:
    while True:
        frame = connection.recv()
        assert frame is not None
        if frame.type == type:
            return frame


def act(connection: Connection, hello: dict[str, Any]) -> None:
    job = await_frame(connection, FrameType.ROWS_END).job
    connection.send(FrameType.TRACE, job, header=TRACE)
    plan = await_frame(connection, FrameType.PLAN)
    script = Path(sys.argv[1]) / str(job)
    while not script.exists():
        time.sleep(0.02)
    groups = child.group_socket()
    assert groups is not None and len(plan.buffers[2]) == 32 * 5
    for code in map(int, script.read_text().split()):
        groups.send(request(plan.header["generation"], code))
        assert struct.unpack("<q", groups.recv(100)) == (plan.header["generation"],)
        script.with_suffix(".granted").write_text(str(code))
    time.sleep(3600)  # holding what it was granted


if __name__ == "__main__":
    child.main(act)
