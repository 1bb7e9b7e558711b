"""Files that commands write: completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pg_tensile.errors import OptionError


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as OptionError."""
    try:
        yield
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror}"
        raise OptionError(said, "Choose another place with -o.") from None


def is_device(path: Path) -> bool:
    """Return whether the path is a device or a pipe, such as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check(path: Path) -> None:
    """Raise OSError if no file can be written there, so that a command fails before its work and not after it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not is_device(path):
        tempfile.TemporaryFile(dir=path.resolve().parent).close()


@contextlib.contextmanager
def writing(name: str, binary: bool = False) -> Iterator[IO[Any]]:
    """Open the file of that name, or stdout for "-". If the block raises an error, a file stays as it was.

    Raises OptionError if the file cannot be written."""
    if name == "-":
        yield sys.stdout.buffer if binary else sys.stdout
        return
    path = Path(name)
    with contextlib.ExitStack() as stack:
        with refusing(path):
            check(path)
            if is_device(path):
                file: IO[Any] = stack.enter_context(_opened(path, binary))
            else:
                file = stack.enter_context(_replacement(path.resolve(), binary))  # resolved, so that links stay
        with refusing(path):  # for example, the disk is full
            yield file


@contextlib.contextmanager
def _replacement(path: Path, binary: bool) -> Iterator[IO[Any]]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _opened(descriptor, binary) as file:
            yield file
            with refusing(path):
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _opened(file: Path | int, binary: bool) -> IO[Any]:
    return open(file, "wb") if binary else open(file, "w", encoding="utf-8", newline="")


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
