"""ALTER EXTENSION pg_tensile UPDATE from 0.1.0 that has trained: models, versions and ended jobs stay, and train on.

0.1.0 is installed from the repository's history into a copy of PostgreSQL's folders, which PostgreSQL finds relative to
its binaries. It trains there; then the current installation takes over the data directory.

Long: it installs a release and trains with it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from scripts.cluster import REPOSITORY, child_python, server_bin
from tests.server.catalogue import describe
from tests.server.support import FOREVER, MLP, ROWS, Connection, submit, value

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # compiles 0.1.0 and trains with it

RELEASE = "7531e0c"  # 0.1.0
PREDICTIONS = "SELECT array_agg(probability ORDER BY row_number) FROM predict_rows('kept', %s)"
NUMBERS = "SELECT cos(i) AS a, 3 * cos(i) AS y FROM generate_series(1, 200) i"
ALICES = "SELECT predict('alices', ARRAY[0.5])"
HISTORY = (
    "SELECT job, epochs, training_loss, validation_loss, accuracy, f1, rmse, r2 FROM tensile.job_history ORDER BY 1"
)
METRICS = "SELECT job, epoch, split, samples, loss, accuracy, f1, rmse, r2, seconds, at"
# What stays, as a query of 0.1.0 and one of the upgraded database
KEPT = {
    "models": (
        "SELECT id, name, owner_name, architecture, deployed_version, created_at FROM tensile.models ORDER BY 1",
        "SELECT model_id, model, owner, architecture, deployed_version, created_at FROM tensile.models ORDER BY 1",
    ),
    "versions": (
        "SELECT id, model, version, job, task, preprocessing, metrics, rows FROM tensile.model_versions ORDER BY 1",
        "SELECT version_id, model_id, version, job, task, preprocessing, metrics, rows FROM tensile.model_versions"
        " ORDER BY 1",
    ),
    "weights": (
        "SELECT version, seq, md5(data) FROM tensile.model_weights ORDER BY 1, 2",
        "SELECT version, seq, md5(data) FROM tensile_internal.model_weights ORDER BY 1, 2",
    ),
    "grants": (
        "SELECT model, grantee_name, privilege FROM tensile.model_grants ORDER BY 1, 2, 3",
        "SELECT model_id, grantee, privilege FROM tensile.model_grants ORDER BY 1, 2, 3",
    ),
    "jobs": (
        "SELECT id, model_name, owner_name, state, version, started_at, ended_at, rows, error FROM tensile.jobs"
        " ORDER BY 1",
        "SELECT job, model, owner, state, version, started_at, ended_at, rows, error FROM tensile.jobs ORDER BY 1",
    ),
    "history": (HISTORY, HISTORY),
    "metrics": (
        f"{METRICS} FROM tensile.metrics ORDER BY 1, 2, 3",
        f"{METRICS} FROM tensile.epoch_metrics ORDER BY 1, 2, 3",
    ),
}


def pg_config(option: str, program: str | Path | None = None) -> Path:
    program = program or os.environ.get("PG_CONFIG", "pg_config")
    return Path(subprocess.run([program, option], check=True, capture_output=True, text=True).stdout.strip())


def copy_of_postgresql(folder: Path) -> Path:
    """Copy PostgreSQL's folders into `folder`, keeping their relative paths; return the copy's pg_config."""
    options = ("--bindir", "--pkglibdir", "--sharedir", "--includedir-server", "--pkgincludedir")
    parts = {option: pg_config(option) for option in options}
    root = os.path.commonpath(parts.values())
    for part in {*parts.values()}:
        target = folder / part.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", "-T", part, target], check=True)
    copied = folder / parts["--bindir"].relative_to(root) / "pg_config"
    assert pg_config("--pkglibdir", copied).is_relative_to(folder), "this PostgreSQL was built with absolute paths"
    return copied


def install_release(folder: Path) -> Path:
    """Install 0.1.0 into a copy of PostgreSQL; return the folder of its binaries."""
    archive = subprocess.run(["git", "-C", REPOSITORY, "archive", RELEASE], capture_output=True)
    if archive.returncode != 0:
        pytest.fail(
            f"0.1.0 is revision {RELEASE} of this repository, which git archive does not find: run the test in a clone"
            f" with its history ({archive.stderr.decode(errors='replace').strip()})"
        )
    source = folder / "source"
    source.mkdir()
    subprocess.run(["tar", "xf", "-", "-C", source], input=archive.stdout, check=True)
    copied = copy_of_postgresql(folder / "postgresql")
    for current in (pg_config("--sharedir", copied) / "extension").glob("pg_tensile*"):
        current.unlink()
    make = ["make", "-s", "-C", str(source), "all", "install", f"PG_CONFIG={copied}", f"PYTHON={child_python()}"]
    subprocess.run(make, check=True, capture_output=True, text=True)
    return pg_config("--bindir", copied)


class Contents(NamedTuple):
    """Rows by name, and predictions of both models."""

    rows: dict[str, list[tuple[Any, ...]]]
    predictions: list[float]
    prediction: float


def contents(conn: Connection, upgraded: bool) -> Contents:
    """Read what an upgrade has to keep."""
    return Contents(
        {name: conn.execute(queries[upgraded]).fetchall() for name, queries in KEPT.items()},
        value(conn, PREDICTIONS, ROWS),
        value(conn, ALICES),
    )


class Upgraded(NamedTuple):
    """An upgraded server, with its contents before and after the upgrade."""

    conn: Connection
    cluster: Any
    before: Contents
    after: Contents


@pytest.fixture(scope="module")
def upgraded(new_cluster: Callable[..., Any], clusters_folder: Path) -> Iterator[Upgraded]:
    if not pg_config("--version").name.startswith("PostgreSQL 15"):
        pytest.skip("0.1.0 trains on PostgreSQL 15 only")
    folder = clusters_folder / "0.1.0"
    folder.mkdir(mode=0o755)
    cluster = new_cluster(extension=False, start=False)
    cluster.bin = install_release(folder)
    try:
        cluster.start()
        with cluster.connect() as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE; CREATE ROLE alice LOGIN")
            assert value(conn, "SELECT extversion FROM pg_extension WHERE extname = 'pg_tensile'") == "0.1.0"
            assert value(conn, "SELECT tensile._version()") == "0.1.0"
            fill(conn, cluster)
            before = contents(conn, upgraded=False)
        cluster.stop()
        (cluster.data / "pg_tensile").rmdir()  # docs/operations.md says so
        cluster.bin = server_bin()
        cluster.start()
        with cluster.connect() as conn:
            conn.execute("ALTER EXTENSION pg_tensile UPDATE")
            yield Upgraded(conn, cluster, before, contents(conn, upgraded=True))
    finally:
        cluster.end()


def fill(conn: Connection, cluster: Any) -> None:
    """Train two versions of a model, and a regression as an ordinary role; leave a failed and a cancelled job."""
    for seed in (0, 1):
        job = submit(conn, "kept", MLP if seed == 0 else None, seed=seed, epochs=3, options=None, policy=None)
        assert value(conn, "SELECT wait_for_job(%s, '5 min')", job) == "finished"
    conn.execute("SELECT grant_model('kept', 'alice')")
    with cluster.connect(user="alice") as alice:
        job = submit(alice, "alices", MLP, query=NUMBERS, options=None, policy=None)
        assert value(alice, "SELECT wait_for_job(%s, '5 min')", job) == "finished"
    query = "SELECT i AS x, 1 / (i - 3) AS y FROM generate_series(1, 9) i"
    failed = submit(conn, "never", MLP, query=query, options=None, policy=None)
    with pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("SELECT wait_for_job(%s, '5 min')", (failed,))
    endless = submit(conn, "never", epochs=FOREVER, options=None, policy=None)
    conn.execute("SELECT cancel_job(%s)", (endless,))
    assert value(conn, "SELECT wait_for_job(%s, '5 min')", endless) == "cancelled"


def test_an_upgrade_revokes_nothing(upgraded: Upgraded) -> None:
    """Role alice, not a member of tensile_user, trains as before: only the documented statements revoke that."""
    with upgraded.cluster.connect(user="alice") as alice:
        job = submit(alice, "alices", query=NUMBERS, epochs=1, policy=None)
        assert value(alice, "SELECT wait_for_job(%s, '5 min')", job) == "finished"


def test_the_documented_statements_replace_public_by_the_role(upgraded: Upgraded) -> None:
    conn = upgraded.conn
    before = value(conn, ALICES)
    with conn.transaction(force_rollback=True):
        for (statement,) in conn.execute(documented("REVOKE EXECUTE ON ROUTINE")).fetchall():
            conn.execute(statement)
        conn.execute(documented("REVOKE USAGE ON SCHEMA"))
        assert not [line for line in describe(conn) if re.match(r"(schema|function (?!tensile)).* PUBLIC:", line)]
        conn.execute("SET LOCAL ROLE alice")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            conn.execute(ALICES)
        conn.execute("RESET ROLE; GRANT tensile_user TO alice; SET LOCAL ROLE alice")
        assert value(conn, ALICES) == pytest.approx(before)


def documented(beginning: str) -> str:
    """Return the statement of docs/operations.md that contains these words, without psql's \\gexec."""
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    (statement,) = [block for block in re.findall(r"^ *[A-Z][^;`]*?(?:;|\\gexec)", text, re.M) if beginning in block]
    return str(statement).replace("\\gexec", "").rstrip(";")


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay(upgraded: Upgraded, name: str) -> None:
    assert upgraded.after.rows[name] == upgraded.before.rows[name]
    assert upgraded.before.rows[name]


def test_metrics_have_become_rows(upgraded: Upgraded) -> None:
    names = "SELECT array_agg(DISTINCT metric) FROM tensile.metrics"  # later jobs may have added others
    assert {"accuracy", "f1", "loss", "r2", "rmse"} <= set(value(upgraded.conn, names))


def test_models_predict_the_same(upgraded: Upgraded) -> None:
    assert upgraded.after.predictions == pytest.approx(upgraded.before.predictions)
    assert upgraded.after.prediction == pytest.approx(upgraded.before.prediction)


def test_an_upgraded_model_trains_on(upgraded: Upgraded) -> None:
    conn = upgraded.conn
    latest = value(conn, "SELECT max(version) FROM tensile.model_versions WHERE model = 'kept'")
    job = submit(conn, "kept", epochs=1, policy=None)
    assert value(conn, "SELECT wait_for_job(%s, '5 min')", job) == "finished"
    assert value(conn, "SELECT version FROM tensile.jobs WHERE job = %s", job) == latest + 1
