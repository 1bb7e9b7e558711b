"""A trainer that stores what it is fed instead of training, for test_packing.py and test_feed.py.

The worker, the feed and the frames are the real ones.

Run as `recorder.py FOLDER` in the trainer's place (`pg_tensile.python` points to a script that does so). It receives
frames until ROWS_END, stores them in FOLDER/<job>.pickle, and ends its job with an error that says "recorded".
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from pyworker import child
from pyworker.connection import Connection
from pyworker.wire import FrameType


class Recorded(Exception):
    """The error that ends a job whose frames are stored."""

    hint = None


def record(connection: Connection, hello: dict[str, Any]) -> None:
    frames = []
    while True:
        frame = connection.recv()
        assert frame is not None
        frames.append((int(frame.type), frame.header, [bytes(buffer) for buffer in frame.buffers]))
        if frame.type == FrameType.ROWS_END:
            break
    partial = Path(sys.argv[1]) / f"{frame.job}.part"
    partial.write_bytes(pickle.dumps(frames))
    partial.rename(partial.with_suffix(".pickle"))
    raise Recorded("recorded")


if __name__ == "__main__":
    child.main(record)
