"""Execution of docs/example.py as a notebook, which is written with the output of its cells.

    python -m scripts.notebook [--server] [FILE]

FILE defaults to docs/example.ipynb. A private server is made for the run and removed; with --server it is the one that
PGHOST, PGPORT, PGUSER and PGDATABASE name. If a cell fails, the error is printed and no file is written.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scripts.cluster import REPOSITORY, child_python, temporary_cluster

SOURCE = REPOSITORY / "docs" / "example.py"
NOTEBOOK = SOURCE.with_suffix(".ipynb")
CELL_TIMEOUT_S = 240
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


class Cell(NamedTuple):
    kind: str  # markdown or code
    source: str


def cells(text: str) -> list[Cell]:
    """Return the cells of a file in the percent format.

    Text before the first cell is a comment for the file's readers.
    """
    parts = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            parts.append(Cell("markdown", "\n".join(lines)))
        else:
            parts.append(Cell("code", body.strip()))
    return parts


def build(parts: list[Cell]) -> Any:
    """Return a notebook that was not executed; its cells are numbered, so that another run produces the same ids."""
    from nbformat import v4

    make = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    built = [make[part.kind](part.source, id=f"cell-{number}") for number, part in enumerate(parts, start=1)]
    return v4.new_notebook(cells=built, metadata={"kernelspec": KERNEL})


def executed(server: Mapping[str, str]) -> str:
    """Return the executed notebook with its outputs, as JSON.

    `server`: the environment variables that locate the server. Raises CellExecutionError.
    """
    import matplotlib.font_manager  # noqa: F401  # builds its cache here, so that the notebook does not report it
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = build(cells(SOURCE.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(prefix="pgt-notebook-") as folder:
        ours = {"PYTHONPATH": str(REPOSITORY), "IPYTHONDIR": folder, "JUPYTER_COLUMNS": "120"}
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name=KERNEL["name"],
            record_timing=False,
            config=Config({"KernelManager": {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}}),
            resources={"metadata": {"path": folder}},
        )
        others = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        client.execute(env=others | dict(server) | ours)
    return without_paths(nbformat.writes(notebook), server.get("PGHOST"))


def without_paths(text: str, host: str | None) -> str:
    """Replace the paths of this machine, which do not belong in a published notebook."""
    environment = str(Path(child_python()).parents[1])
    for path, name in ((environment, ".venv"), (str(REPOSITORY), "."), (host, "server")):
        if path and path.startswith("/"):
            text = text.replace(path, name)
    return text


@contextmanager
def private_server() -> Iterator[dict[str, str]]:
    """Yield the variables that name a server which is removed with the context."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-notebook-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        with temporary_cluster(folder / "cluster", {"pg_tensile.device": "cpu"}) as cluster:
            with cluster.connect() as conn:
                conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            yield {
                "PGHOST": str(cluster.folder), "PGPORT": str(cluster.port), "PGUSER": "postgres",
                "PGDATABASE": "postgres",
            }  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="notebook", description="Executes docs/example.py as a notebook.")
    parser.add_argument("--server", action="store_true", help="use the server that PGHOST, … name, not a private one")
    parser.add_argument("file", nargs="?", type=Path, default=NOTEBOOK, metavar="FILE", help="what to write")
    options = parser.parse_args(arguments)
    from nbclient.exceptions import CellExecutionError

    try:
        if options.server:
            text = executed({name: value for name, value in os.environ.items() if name.startswith("PG")})
        else:
            with private_server() as server:
                text = executed(server)
    except CellExecutionError as error:
        print(f"notebook: a cell has failed\n{error}", file=sys.stderr)
        return 1
    options.file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    print(f"{options.file}: {options.file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
