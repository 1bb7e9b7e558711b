"""Generator of docs/images/top.svg, the picture of the README: `pg-tensile top` while two jobs share a device.

    python -m scripts.top_picture

Trains on a temporary server. The jobs are given less device memory together than they take without plans, so that the
scheduler has something to do.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from pg_tensile.client.connection import connect
from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.reader import Reader
from pg_tensile.tools.top.state import ViewState
from pg_tensile.tools.top.view import view
from scripts.cluster import REPOSITORY, temporary_cluster

PICTURE = REPOSITORY / "docs" / "images" / "top.svg"
SETTINGS = {"pg_tensile.device": "cpu", "pg_tensile.device_memory": "155MB", "pg_tensile.threads": 1}
WIDTH, HEIGHT = 110, 18
INTERVAL_S = 1.0
COURSE = 60  # refreshes with two jobs under plans, for the course of their losses
LIMIT_S = 600
IMAGES = """
    CREATE TABLE images AS
    SELECT i % 10 AS label, array_agg((((i % 10) * p) % 17 + 40 * random())::float4 ORDER BY p) AS pixels
    FROM generate_series(0, 1999) i, generate_series(1, 784) p GROUP BY i
"""
MODEL = {"type": "cnn", "shape": [1, 28, 28], "channels": [32, 64, 64]}
JOBS = ("digit", "letter", "sign")


def picture(folder: Path) -> str:
    """Return the view as SVG. Raises TimeoutError if the jobs do not reach that state."""
    with temporary_cluster(folder, SETTINGS) as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(IMAGES)
        for name in JOBS:
            conn.execute("SELECT register_model(%s, %s)", (name, json.dumps(MODEL)))
            conn.execute(
                "SELECT train_model(%s, 'SELECT label, pixels FROM images', 'label', epochs => 60, batch_size => 256,"
                """ options => '{"task": "classification", "keep": "last"}')""",
                (name,),
            )
        reader, history = Reader(connect(cluster.dsn())), History()
        deadline, course = time.monotonic() + LIMIT_S, 0
        while course < COURSE:
            if time.monotonic() > deadline:
                raise TimeoutError(cluster.log())
            time.sleep(INTERVAL_S)
            snapshot = reader.observe(history)
            shown = ViewState(snapshot, history, "mydb as ada on localhost:5432", selected=1)
            course += len(shown.queue) == 1 and sum(bool(job.bytes_swapped) for job in shown.running) == 2
        reader.close()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in view(shown, WIDTH, HEIGHT):
        console.print(line)
    svg = console.export_svg(title="pg-tensile top", theme=MONOKAI, unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # the reader's machine has fonts


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pgt-picture-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        PICTURE.write_text(picture(folder / "cluster"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
