"""The file of a benchmark's rows: one JSON object a line and policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.row import Row


class RowFile:
    """File of the rows, which has complete ones at any time: it is written anew and takes the place of the former.

    Raises OptionError if it cannot be written. What is not a regular file, a pipe for example, only gets the last rows.
    """

    def __init__(self, path: str) -> None:
        self.has_rounds = False  # whether rows of at least one round were written
        self._path = path
        check_writable(path)
        self._is_regular = os.path.isfile(path)

    def keep(self, rows: Sequence[Row]) -> None:
        """Write the rows of the rounds so far."""
        if self._is_regular:
            self.write(rows)
            self.has_rounds = any(row.rounds_taken for row in rows)

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows. Raises OptionError if that fails, for example on a full disk."""
        target = os.path.realpath(self._path)  # a link stays one
        written = f"{target}.part" if self._is_regular else target
        try:
            with open(written, "w") as file:
                file.writelines(row.to_json() + "\n" for row in rows)
            if self._is_regular:
                os.replace(written, target)
        except OSError as error:
            if self._is_regular:
                Path(written).unlink(missing_ok=True)
            raise OptionError(f'--json: cannot write "{self._path}": {error.strerror}') from None


def check_writable(path: str) -> None:
    """Check before the run that its results can be written. Raises OptionError."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise OptionError(
            f'--json: cannot write "{path}": {error.strerror}', "Name a file in a folder that exists."
        ) from None
