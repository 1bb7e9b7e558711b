"""Private clusters are closed to others, and the demo's tools refuse folders that are not their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg
import pytest

from scripts.cluster import Cluster, ClusterError
from tests.repository import REPOSITORY


def test_server_does_not_run_as_root(cluster):
    assert Path(f"/proc/{cluster.postmaster_pid()}").stat().st_uid != 0


def test_folder_is_closed_to_others(cluster):
    assert cluster.folder.stat().st_mode & 0o077 == 0


def test_existing_folder_is_not_taken_over(clusters_folder):
    folder = clusters_folder / "taken"
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(ClusterError, match="exists already"):
        Cluster(folder).create()
    with pytest.raises(ClusterError, match="nothing was removed"):
        Cluster(folder).remove()
    assert (folder / "precious").exists()


def test_link_is_not_followed(clusters_folder, cluster):
    link = clusters_folder / "link"
    link.symlink_to(cluster.folder)
    with pytest.raises(ClusterError, match="nothing was removed"):
        Cluster(link).remove()
    assert cluster.running()


def test_long_path_is_refused_with_its_limit(clusters_folder):
    with pytest.raises(ClusterError, match="too long for a Unix socket"):
        Cluster(clusters_folder / ("x" * 100))


def test_tcp_needs_a_password(clusters_folder):
    served = Cluster(clusters_folder / "tcp", tcp=True)
    served.create({"shared_preload_libraries": ""}, durable=False)
    try:
        served.start()
        with served.connect() as conn:
            assert conn.execute("SHOW listen_addresses").fetchone() == ("localhost",)
        with pytest.raises(psycopg.OperationalError, match=r"password|fe_sendauth"):
            psycopg.connect(f"host=localhost port={served.port} user=postgres dbname=postgres")
    finally:
        served.remove()


def test_failed_start_shows_the_servers_log(clusters_folder):
    broken = Cluster(clusters_folder / "broken")
    broken.create({"shared_preload_libraries": "no_such_library"}, durable=False)
    try:
        with pytest.raises(ClusterError, match="no_such_library"):
            broken.start()
    finally:
        broken.remove()


@pytest.mark.timeout(300)
def test_installcheck():
    done = subprocess.run(["scripts/installcheck.sh"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
