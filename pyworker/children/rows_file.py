"""The rows of a tuning, in a file that its first trial writes and the others read in place of a query.

It has the frames COLUMNS, ROWS … ROWS_END as they came. It gets its name when it is complete, so that it is whole or
not there, and nothing is left behind by a process that dies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pg_tensile.errors import SpoolError
from pyworker.wire import Decoder, Frame, FrameType, ProtocolError, encode


class RowsWriter:
    """Writes frames to a file without a name; `finish` names it, unless another process has been faster.

    A tuning works without the file, so that a full disk ends the writing and nothing else."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(Path(path).parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def add(self, frame: Frame) -> None:
        if self._fd < 0:
            return
        try:
            for part in encode(frame.type, frame.job, frame.rank, frame.header, frame.buffers):
                rest = memoryview(part).cast("B")
                while rest.nbytes:
                    rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self.close()

    def finish(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:  # Python follows the link to the file only with a folder's descriptor
                    os.link(str(self._fd), self._path, src_dir_fd=descriptors, follow_symlinks=True)
                finally:
                    os.close(descriptors)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_frames(path: str) -> Iterator[Frame]:
    """Yield the frames of a file, up to ROWS_END. Raises SpoolError if the file is gone or damaged."""
    decoder = Decoder()
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(decoder.space()):
                decoder.received(count)
                for frame in decoder:
                    yield frame
                    if frame.type == FrameType.ROWS_END:
                        return
    except (OSError, ProtocolError) as error:
        raise SpoolError(f"the rows of the tuning cannot be read: {error}") from error
    raise SpoolError("the rows of the tuning end early", "Tune the model once more.")
