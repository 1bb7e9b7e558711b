"""Upgrade a cluster with models, jobs and a schedule by pg_upgrade, inside a folder with the new PostgreSQL.

    python -m tests.server.pg_upgrade BIN

BIN is the folder of the old server's programs, the new server is that of PG_CONFIG. Prints a line at the end; an
assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.cluster import Cluster
from tests.server.support import FOREVER, MLP, ROWS, Connection, finish, submit, value

SETTINGS = {"fsync": "off", "pg_tensile.checkpoint_interval": 0}
KEPT = {
    "models": "SELECT * FROM tensile.models ORDER BY model_id",
    "versions": "SELECT * FROM tensile.model_versions ORDER BY version_id",
    "ended jobs": "SELECT * FROM tensile.jobs WHERE ended_at IS NOT NULL ORDER BY job",
    "history": "SELECT * FROM tensile.job_history ORDER BY job",
    "metrics": "SELECT * FROM tensile.epoch_metrics WHERE job = 1 ORDER BY epoch, split",
    "schedules": "SELECT * FROM tensile.schedules ORDER BY 1",
    "grants": "SELECT * FROM tensile.model_grants ORDER BY 1, 2, 3",
    "predictions": "SELECT array_agg(p::text ORDER BY r.ctid) FROM rows r, predict_probabilities('kept', r) p",
    "functions": "SELECT probin, prosrc FROM pg_proc WHERE prosrc ~ '^tensile_' ORDER BY 1, 2",
}


def contents(conn: Connection) -> dict[str, Any]:
    return {name: conn.execute(query).fetchall() for name, query in KEPT.items()}


def wait(conn: Connection, query: str, seconds: float = 300) -> None:
    """Wait until the query's value is true."""
    deadline = time.monotonic() + seconds
    while not value(conn, query):
        assert time.monotonic() < deadline, query
        time.sleep(0.2)


def fill(conn: Connection, cluster: Cluster) -> int:
    """Train, schedule and grant; return a job that runs and has a checkpoint."""
    conn.execute("CREATE EXTENSION pg_tensile CASCADE; CREATE ROLE alice LOGIN IN ROLE tensile_user")
    conn.execute("GRANT CREATE ON SCHEMA public TO alice")
    with cluster.connect(user="alice") as alice:
        alice.execute(f"CREATE TABLE rows AS {ROWS}")
        finish(alice, submit(alice, "kept", MLP, query="TABLE rows", epochs=3, options=None), "300 s")
        alice.execute("SELECT grant_model('kept', 'public')")
        alice.execute("SELECT schedule_training('kept', 'TABLE rows', 'y', epochs => 2, every => '1 year')")
        wait(alice, "SELECT count(*) = 0 FROM tensile.jobs WHERE ended_at IS NULL")
        job = submit(alice, "endless", MLP, query="TABLE rows", epochs=FOREVER, options=None)
    wait(conn, f"SELECT count(*) > 0 FROM tensile_internal.checkpoints WHERE job = {job}")
    return job


def create(cluster: Cluster) -> None:
    """Make a cluster with checksums, as initdb does from 18 on: pg_upgrade wants both clusters to be alike."""
    cluster.create(SETTINGS)
    if int(major(cluster)) < 18:
        run(cluster, "pg_checksums", "--enable", "--pgdata", str(cluster.data))


def run(cluster: Cluster, program: str, *arguments: str) -> None:
    """Run a program of the cluster's as the server's user."""
    command = ["runuser", "-u", cluster.os_user, "--", str(cluster.bin / program), *arguments]
    done = subprocess.run(command, cwd=cluster.folder, capture_output=True, text=True)
    logs = "".join(path.read_text()[-2000:] for path in cluster.data.rglob("pg_upgrade_output.d/**/*_dump_*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs


def upgrade(old: Cluster, new: Cluster, folder: Path) -> None:
    folders = ("--old-bindir", old.bin, "--new-bindir", new.bin, "--old-datadir", old.data, "--new-datadir", new.data)
    run(new, "pg_upgrade", *map(str, folders), "--username", "postgres", "--socketdir", str(folder))


def major(cluster: Cluster) -> str:
    return (cluster.data / "PG_VERSION").read_text().strip()


def main(bin: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="pgt-", dir="/tmp"))
    folder.chmod(0o777)
    old, new = Cluster(folder / "old", bin=bin), Cluster(folder / "new")
    create(old)
    old.start()
    with old.connect() as conn:
        job = fill(conn, old)
        before = contents(conn)
    old.stop()
    create(new)
    upgrade(old, new, folder)
    new.start()
    with new.connect() as conn:
        after = contents(conn)
        for name, rows in before.items():
            assert after[name] == rows, f"{name}: {rows} became {after[name]}"
        wait(conn, f"SELECT count(*) > 0 FROM tensile.progress WHERE job = {job} AND epoch > 0")
        conn.execute("SELECT cancel_job(%s)", (job,))
        wait(conn, f"SELECT state = 'cancelled' FROM tensile.jobs WHERE job = {job}")
    with new.connect(user="alice") as alice:
        finish(alice, submit(alice, "kept", query="TABLE rows", epochs=2, options=None), "300 s")
    new.stop()
    print(f"{major(old)} to {major(new)}: everything is in place")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
