"""The demo's server: a cluster in DEMO_DIR that later runs use again, unless another version made it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from scripts.cluster import REPOSITORY, Cluster
from scripts.demo.screen import console, show

DATABASE = "demo"
ROLE = "demo"


def demo_folder() -> Path:
    return Path(os.environ.get("DEMO_DIR") or f"/var/tmp/pg_tensile-demo-{os.geteuid()}").absolute()


def open_cluster(folder: Path) -> Cluster:
    """Return the cluster of an earlier run (its port is in its configuration), or a new object on a free port."""
    port_file = folder / "port"
    return Cluster(folder, tcp=True, port=int(port_file.read_text()) if port_file.exists() else None)


def made_from(cluster: Cluster) -> str:
    """Return a digest of what a cluster depends on: the extension's catalogue and the server's major version."""
    scripts = sorted((REPOSITORY / "sql").rglob("*.sql"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in scripts) + cluster.version().encode()).hexdigest()


def start_cluster() -> Cluster:
    """Return a running cluster with database, role and extension.

    It is created if there is none, or if another version made it.
    """
    cluster = open_cluster(demo_folder())
    stamp = cluster.folder / "made-from"
    if stamp.exists() and stamp.read_text() == made_from(cluster):
        console.print(f"Using the server of the last run in {cluster.folder}, with all that is in it.")
        if cluster.running():
            cluster.stop()  # it may have an older build loaded
        cluster.start()
        return cluster
    if cluster.exists():
        console.print(f"Removing {cluster.folder}: an unfinished run or another version made it.")
        cluster.remove()
        cluster = open_cluster(cluster.folder)
    console.print(f"Creating a server in {cluster.folder}, as user {cluster.os_user}, port {cluster.port}.")
    cluster.create({"pg_tensile.database": DATABASE, "max_wal_size": "2GB"})
    (cluster.folder / "port").write_text(str(cluster.port))
    cluster.start()
    with cluster.connect() as conn:
        conn.execute(f"CREATE ROLE {ROLE} LOGIN")
        conn.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
    with cluster.connect(DATABASE) as conn:
        show(conn, "CREATE EXTENSION pg_tensile CASCADE;")
        show(conn, f"GRANT tensile_user TO {ROLE};")
    stamp.write_text(made_from(cluster))
    return cluster
