"""ALTER EXTENSION pg_tensile UPDATE from 0.1.0: models, versions and ended jobs stay, and the catalogue is that of a
fresh installation.

0.1.0 is installed from the repository's history into a copy of PostgreSQL's folders, which PostgreSQL finds relative to
its binaries. It trains there; then the current installation takes over the data directory.

Long: it installs a release and trains with it.
"""

from __future__ import annotations

import difflib
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
ROUTINES = """
    SELECT array_agg(p.oid::regprocedure::text) FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e'
    WHERE p.pronamespace = 'public'::regnamespace AND d.classid = 'pg_proc'::regclass
"""
ALICES = "SELECT predict('alices', ARRAY[0.5])"
METRICS = "SELECT job, epoch, split, samples, loss, accuracy, f1, rmse, r2, seconds, at"
KEPT = {
    "models": "SELECT id, name, owner_name, architecture, deployed_version, created_at FROM tensile.models ORDER BY 1",
    "versions": "SELECT id, model, version, job, task, preprocessing, metrics, rows FROM tensile.model_versions"
    " ORDER BY 1",
    "weights": "SELECT version, seq, md5(data) FROM tensile.model_weights ORDER BY 1, 2",
    "grants": "SELECT model, grantee_name, privilege FROM tensile.model_grants ORDER BY 1, 2, 3",
    "jobs": "SELECT id, model_name, owner_name, state, version, started_at, ended_at, rows, error FROM tensile.jobs"
    " ORDER BY 1",
    "history": "SELECT job, epochs, training_loss, validation_loss, accuracy, f1, rmse, r2 FROM tensile.job_history"
    " ORDER BY 1",
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
    """Rows by name, metrics, and predictions of both models."""

    rows: dict[str, list[tuple[Any, ...]]]
    metrics: list[tuple[Any, ...]]
    predictions: list[float]
    prediction: float


def contents(conn: Connection, metrics: str) -> Contents:
    """Read what an upgrade has to keep; `metrics` is the table or view with the metrics as columns."""
    return Contents(
        {name: conn.execute(query).fetchall() for name, query in KEPT.items()},
        conn.execute(f"{METRICS} FROM {metrics} ORDER BY 1, 2, 3").fetchall(),
        value(conn, PREDICTIONS, ROWS),
        value(conn, ALICES),
    )


class Upgraded(NamedTuple):
    """An upgraded server, with its contents before and after the upgrade, and the public functions of 0.1.0."""

    conn: Connection
    cluster: Any
    before: Contents
    after: Contents
    routines: list[str]
    warnings: list[str]


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
            before = contents(conn, "tensile.metrics")
            routines = value(conn, ROUTINES)
        cluster.stop()
        (cluster.data / "pg_tensile").rmdir()  # docs/operations.md says so
        cluster.bin = server_bin()
        cluster.start()
        with cluster.connect() as conn:
            warnings: list[str] = []
            conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
            conn.execute("ALTER EXTENSION pg_tensile UPDATE")
            after = contents(conn, "tensile.epoch_metrics")
            yield Upgraded(conn, cluster, before, after, routines, warnings)
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


def test_the_catalogue_is_that_of_a_fresh_installation(upgraded: Upgraded) -> None:
    """Privileges that PUBLIC had, and keeps, are excepted."""
    upgraded.conn.execute("CREATE DATABASE fresh")
    with upgraded.cluster.connect("fresh") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        fresh = describe(conn)
    kept = {"schema tensile | rights: PUBLIC: USAGE"}
    names = {routine.partition("(")[0] for routine in upgraded.routines}  # some have more arguments now
    right = re.compile(r"function (\w+)\(.*\) \| rights: PUBLIC: EXECUTE")
    described = describe(upgraded.conn)
    kept |= {line for line in described if (match := right.fullmatch(line)) and match[1] in names}
    assert len(kept) > len(names) and not kept & {*fresh}
    present = [line for line in described if line not in kept]
    difference = "\n".join(difflib.unified_diff(fresh, present, "fresh", "upgraded", n=1, lineterm=""))
    assert not difference, f"after ALTER EXTENSION UPDATE the catalogue differs:\n{difference}"


def test_an_upgrade_revokes_nothing(upgraded: Upgraded) -> None:
    """Role alice, not a member of tensile_user, trains as before: only the documented statements revoke that."""
    assert upgraded.warnings == ["PUBLIC may use pg_tensile as before"]
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


def test_metrics_have_become_rows_and_stay_columns_of_a_view(upgraded: Upgraded) -> None:
    assert upgraded.after.metrics == upgraded.before.metrics
    names = "SELECT array_agg(DISTINCT metric) FROM tensile.metrics"  # later jobs may have added others
    assert {"accuracy", "f1", "loss", "r2", "rmse"} <= set(value(upgraded.conn, names))


def test_models_predict_the_same(upgraded: Upgraded) -> None:
    assert upgraded.after.predictions == pytest.approx(upgraded.before.predictions)
    assert upgraded.after.prediction == pytest.approx(upgraded.before.prediction)


def test_an_upgraded_model_trains_on(upgraded: Upgraded) -> None:
    conn = upgraded.conn
    latest = value(conn, "SELECT max(v.version) FROM tensile.model_versions v JOIN tensile.models m ON m.id = v.model"
                         " WHERE m.name = 'kept'")  # fmt: skip
    job = submit(conn, "kept", epochs=1, policy=None)
    assert value(conn, "SELECT wait_for_job(%s, '5 min')", job) == "finished"
    assert value(conn, "SELECT version FROM tensile.jobs WHERE id = %s", job) == latest + 1
