"""Results of benchmarks: a file for each section, with tables of rows.

    {"runs": [{"revision": …, "date": …, "device": …, "cpu": …, …}, …],
     "tables": {"rows": {"same": {"run": 0, …}, "columns": ["scenario", …], "rows": [["ResNet-50", …], …]}}}

`same` has the columns that are equal in all rows of a table. Each row has the scenario that it was measured in, which
is measured as a whole or not at all, and the number of its run: revision, date, device and machine. A + after a
revision marks uncommitted changes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, Row
from pg_tensile.errors import DeviceError
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.tools.bench.report import machine, versions

FOLDER = ROOT / "benchmarks" / "results"
QUICK_FOLDER = ROOT / "build" / "benchmarks"
FAILURES = "failures"  # the table of scenarios that could not be measured
DIGITS = 6  # significant ones of a float


class Results:
    """The tables of a file, empty if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Row] = []
        self.tables: dict[str, list[Row]] = {}
        if path.exists():
            data = json.loads(path.read_text())
            self.runs = data["runs"]
            self.tables = {name: decoded(table) for name, table in data["tables"].items()}

    @property
    def is_quick(self) -> bool:
        return self.path.parent == QUICK_FOLDER

    @property
    def kind(self) -> str:
        return kind_of(self.runs[0]["device"]) if self.runs else "host"

    def rows(self, table: str = "rows") -> list[Row]:
        return self.tables.get(table, [])

    def titled(self, section: str) -> list[tuple[str, Row]]:
        """Return (title, row) of the rows of scenarios called `section: title`, which have a table of their own."""
        return [(row["scenario"].partition(": ")[2], row) for row in self.rows(section)]

    def measured(self) -> dict[str, list[Row]]:
        """Return the runs of each scenario that has not failed."""
        found: dict[str, list[Row]] = {}
        for name, rows in self.tables.items():
            for row in rows if name != FAILURES else ():
                found.setdefault(row["scenario"], []).append(self.runs[row["run"]])
        return found

    def replace(self, scenario: str, rows: Iterable[Row], run: Row) -> None:
        """Put rows in place of those of a scenario. A row names its table as `table`, if it is not `rows`."""
        for name, others in self.tables.items():
            self.tables[name] = [row for row in others if row["scenario"] != scenario]
        if run not in self.runs:
            self.runs.append(run)
        for row in rows:
            table = row.get("table", "rows")
            own = {key: rounded(value) for key, value in row.items() if key != "table"}
            self.tables.setdefault(table, []).append({"scenario": scenario, "run": self.runs.index(run)} | own)

    def write(self) -> None:
        """Write the file; runs without a row are left out."""
        used = sorted({row["run"] for rows in self.tables.values() for row in rows})
        tables = {
            name: encoded([row | {"run": used.index(row["run"])} for row in rows])
            for name, rows in self.tables.items()
            if rows
        }
        runs = ",\n".join(text(self.runs[number]) for number in used)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        shown = ",\n".join(f"{text(name)}: {table}" for name, table in tables.items())
        new.write_text(f'{{"runs": [\n{runs}],\n"tables": {{\n{shown}}}}}\n')
        new.replace(self.path)


def decoded(table: Mapping[str, Any]) -> list[Row]:
    return [table["same"] | dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]]


def encoded(rows: list[Row]) -> str:
    """Return a table as JSON, a line for each row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    same = {
        key: rows[0].get(key)
        for key in columns
        if len(rows) > 1 and len({text(row.get(key)) for row in rows}) == 1
    }  # fmt: skip
    columns = [key for key in columns if key not in same]
    lines = ",\n".join(text([row.get(key) for key in columns]) for row in rows)
    return f'{{"same": {text(same)},\n"columns": {text(columns)},\n"rows": [\n{lines}]}}'


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def rounded(value: Any) -> Any:
    """Return a value with floats of few digits, as JSON has it."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def this_run(device: str) -> Row:
    """Describe a run of this revision on this machine."""
    about, used = machine(torch_device(device)), versions()
    named = {key: about[key] for key in ("gpu", "cuda", "cpu", "cores", "memory_bytes") if about.get(key)}
    run = {"revision": used["revision"], "date": str(datetime.date.today()), "device": device}
    return run | named | {"torch": used["torch"], "python": used["python"]}


def is_alike(run: Row, other: Row) -> bool:
    """Return whether two runs are of the same revision, device and machine."""
    return {**run, "date": None} == {**other, "date": None}


def kind_of(device: str) -> str:
    """Return the device's kind: "model" for simulated ones."""
    kind = device.partition(":")[0]
    return {"sim": "model", "cpu": "host"}.get(kind, kind)


def torch_device(device: str) -> Any:
    try:
        return choose_device("cpu" if kind_of(device) in ("host", "model") else device)
    except DeviceError as error:
        raise SystemExit(f"{error.message}\nhint: {error.hint}") from None
