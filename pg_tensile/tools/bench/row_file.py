"""The file of a benchmark's rows: one JSON object a line and policy."""

from __future__ import annotations

from collections.abc import Sequence

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.row import Row


def check_writable(path: str) -> None:
    """Check before the run that its results can be written. Raises OptionError."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise OptionError(
            f'--json: cannot write "{path}": {error.strerror}', "Name a file in a folder that exists."
        ) from None


def write_rows(path: str, rows: Sequence[Row]) -> None:
    """Write the rows. Raises OptionError if that fails, for example on a full disk; the rows are lost then."""
    try:
        with open(path, "w") as file:
            file.writelines(row.to_json() + "\n" for row in rows)
    except OSError as error:
        raise OptionError(f'--json: cannot write "{path}": {error.strerror}') from None
