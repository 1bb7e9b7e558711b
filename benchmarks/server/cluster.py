"""A server of its own for a benchmark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.cluster import Cluster, temporary_cluster


@contextmanager
def fresh_cluster(
    settings: Mapping[str, object] | None = None, bin: Path | None = None, launcher: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Yield a started cluster that trains on the CPU, in a temporary folder, which is removed at the end.

    `bin`: the folder of another server's programs (installation.py). `launcher`: see Cluster."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-bench-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        settings = {"pg_tensile.device": "cpu", **(settings or {})}
        with temporary_cluster(folder / "cluster", settings, bin, launcher) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
