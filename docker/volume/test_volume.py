"""The extension image as a volume: a server that has nothing of pg_tensile but the image's folders trains and predicts.

scripts/test_docker.sh unpacks the image into FOLDER and runs this in a folder with the Debian that it was built for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.cluster import Cluster, temporary_cluster
from tests.repository import REPOSITORY

FOLDER = Path("/extensions/pg_tensile")
SETTINGS = {
    "extension_control_path": f"$system:{FOLDER}/share",
    "dynamic_library_path": f"$libdir:{FOLDER}/lib",
    "pg_tensile.database": "postgres",
}
TRAIN = "SELECT train_model('line', 'SELECT x, 3 * x AS y FROM generate_series(0, 1, 0.001) x', 'y', epochs => 3)"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="pgt-volume-", dir="/tmp"))
    folder.chmod(0o755)
    with temporary_cluster(folder / "cluster", SETTINGS) as cluster:
        yield cluster


def test_the_folders_have_what_a_server_looks_for() -> None:
    licences = {path.parent.name: path.read_text() for path in FOLDER.glob("licenses/*/*")}
    assert licences == {"pg_tensile": (REPOSITORY / "LICENSE").read_text()}
    assert {path.name for path in FOLDER.glob("lib/*.so")} == {"pg_tensile.so", "pg_tensile_evaluator.so"}
    assert (FOLDER / "share" / "extension" / "pg_tensile.control").is_file()
    assert {path.name for path in (FOLDER / "lib" / "pg_tensile" / "python").iterdir()} == {"pg_tensile", "pyworker"}
    assert all(path.stat().st_mode & 0o004 for path in FOLDER.rglob("*"))


def test_a_server_trains_and_predicts_with_the_volume_alone(server: Cluster) -> None:
    for folder in ("/usr/lib/postgresql", "/usr/share/postgresql"):
        assert not [*Path(folder).rglob("*pg_tensile*")]
    with server.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        conn.execute(TRAIN)
        row = conn.execute("SELECT wait_for_job(max(job), '200 s') FROM tensile.jobs").fetchone()
        assert row == ("finished",), server.log()[-4000:]
        row = conn.execute("SELECT predict('line', ARRAY[0.5::float8])").fetchone()
        assert row is not None and abs(float(row[0]) - 1.5) < 0.5
    assert f"{FOLDER}/lib/pg_tensile.so" in Path(f"/proc/{server.postmaster_pid()}/maps").read_text()
