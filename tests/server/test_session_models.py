"""Versions that sessions evaluate themselves: one image for all sessions, its life, and versions that are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refusal
from tests.server.support import (
    FOREVER,
    MLP,
    Connection,
    Wait,
    finish,
    inference_pid,
    phase,
    python_model,
    submit,
    value,
)

QUERY = "SELECT cos(i) AS a, sin(i * 0.7) AS b, 'c' || i % 5 AS c, cos(i) + i % 5 AS y FROM generate_series(1, 200) i"
ROW = """predict('small', '{"a": 0.3, "b": null, "c": "c2"}')"""
ASK = f"SELECT {ROW}"
LARGE = {"type": "mlp", "hidden": [900, 900]}  # 3 MB of weights


@pytest.fixture(scope="module")
def server(shared_server: Any) -> Any:
    with shared_server.connect() as conn:
        finish(conn, submit(conn, "small", MLP, query=QUERY, epochs=1, seed=1))
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        yield connection


def images(server: Any, conn: Connection, model: str = "small") -> list[Path]:
    """Return the files of images of the model's versions."""
    version = (
        "SELECT v.version_id FROM tensile.model_versions v JOIN tensile.models m USING (model_id) WHERE m.model = %s"
    )
    ids = [number for (number,) in conn.execute(version, (model,))]
    folder = server.data / "base" / "pgsql_tmp"
    return [file for number in ids for file in folder.glob(f"pgsql_tmp.pg_tensile_image_*_{number}_*[!s]")]


def maps(server: Any, conn: Connection, file: Path) -> bool:
    """Return whether the session has the file mapped."""
    return str(file.name) in Path(f"/proc/{conn.info.backend_pid}/maps").read_text()


def test_sessions_need_no_predictor_and_share_one_image(server: Any, conn: Connection, wait_until: Wait) -> None:
    pid = inference_pid(conn)
    if pid is not None:
        conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        wait_until(lambda: inference_pid(conn) is None)
    own = value(conn, ASK)
    (file,) = images(server, conn)
    with server.connect() as other:
        assert value(other, ASK) == own
        assert maps(server, conn, file) and maps(server, other, file)
    assert images(server, conn) == [file]
    assert inference_pid(conn) is None
    shown = conn.execute("SELECT device, memory_budget, device_bytes FROM tensile.loaded_models WHERE model = 'small'")
    assert shown.fetchall() == [("cpu", None, file.stat().st_size)]
    conn.execute("SET pg_tensile.predict_in_session = off")
    assert value(conn, ASK) == pytest.approx(own, abs=1e-5)
    assert inference_pid(conn) is not None


def test_all_functions_and_forms_have_the_same_bits(conn: Connection) -> None:
    conn.execute("CREATE TEMPORARY TABLE own AS SELECT * FROM (" + QUERY + ") q")
    columns = "predict('small', o), predict('small', to_jsonb(o)), predict('small', to_json(o)::text)"
    rows = conn.execute(f"SELECT {columns}, (predict_interval('small', o, 0.5)).prediction FROM own o").fetchall()
    expected = [
        p for (p,) in conn.execute("SELECT prediction FROM predict_rows('small', 'TABLE own') ORDER BY row_number")
    ]
    assert [set(row) for row in rows] == [{prediction} for prediction in expected]


def test_an_image_goes_with_its_version(server: Any, conn: Connection) -> None:
    finish(conn, submit(conn, "dropped", MLP, query=QUERY, epochs=1))
    ask = ASK.replace("small", "dropped")
    value(conn, ask)
    (file,) = images(server, conn, "dropped")
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT drop_model('dropped')")
        assert file.exists()
    assert value(conn, ask) is not None
    conn.execute("SELECT drop_model('dropped')")
    assert not file.exists()
    assert not file.with_name(file.name + ".counts").exists()


def test_an_image_that_was_removed_or_damaged_is_made_again(server: Any, conn: Connection) -> None:
    before = value(conn, ASK)
    (file,) = images(server, conn)
    bytes_before = file.read_bytes()
    for damaged in (None, b"", bytes_before[:-100], bytes(len(bytes_before)), bytes_before[:64] + bytes_before[:-64]):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        assert value(conn, ASK) == before  # this session has the old one mapped
        with server.connect() as other:
            assert value(other, ASK) == before
        assert file.read_bytes() == bytes_before


WEIGHTS = "UPDATE tensile_internal.model_weights SET data = {} WHERE version = %s"
VERSION = "UPDATE tensile_internal.model_versions SET preprocessing = {} WHERE id = %s"


@pytest.mark.parametrize(
    "change",
    [
        WEIGHTS.format("substr(data, 1, length(data) - 8)"),
        WEIGHTS.format("overlay(data PLACING '\\xffffffff' FROM 1)"),
        WEIGHTS.format("overlay(data PLACING repeat('x', 200)::bytea FROM 9)"),
        VERSION.format("jsonb_set(preprocessing, '{features,0,kind}', '\"array\"')"),
        VERSION.format("jsonb_set(preprocessing, '{features,0,std}', '\"much\"')"),
        VERSION.format("jsonb_set(preprocessing, '{features,2,buckets}', '1000000000')"),
        VERSION.format('jsonb_set(preprocessing, \'{target}\', \'{"name": "y", "std": {}}\')'),
    ],
)
def test_a_version_that_is_damaged_is_an_error_and_the_session_lives(
    server: Any, conn: Connection, change: str
) -> None:
    before = value(conn, ASK)
    version = value(
        conn,
        "SELECT version_id FROM tensile.model_versions JOIN tensile.models m USING (model_id) WHERE m.model = 'small'",
    )
    conn.execute("CREATE TEMPORARY TABLE kept AS SELECT w.data, v.preprocessing FROM tensile_internal.model_versions v"
                 " JOIN tensile_internal.model_weights w ON w.version = v.id WHERE v.id = %s", (version,))  # fmt: skip
    (file,) = images(server, conn)
    file.unlink()
    conn.execute(change, (version,))
    try:
        with server.connect() as other:
            sqlstate, _, hint = refusal(other, ASK)
            assert sqlstate in ("XX001", "42804") and hint
            assert value(other, "SELECT 1") == 1
    finally:
        conn.execute(WEIGHTS.format("(SELECT data FROM kept)"), (version,))
        conn.execute(VERSION.format("(SELECT preprocessing FROM kept)"), (version,))
    with server.connect() as other:
        assert value(other, ASK) == before


def test_a_session_that_is_killed_while_it_predicts_leaves_no_half_image(server: Any, conn: Connection) -> None:
    before = value(conn, ASK)
    (file,) = images(server, conn)
    assert [other for other in file.parent.glob(file.name + ".*") if other.suffix != ".counts"] == []
    with server.connect() as other:
        value(other, ASK)
        other.execute("SET statement_timeout = '1ms'")
        refusal(other, f"SELECT count({ROW}) FROM generate_series(1, 100000000)")
        other.execute("RESET statement_timeout")
        assert value(other, ASK) == before


@pytest.fixture
def scarce(db: Connection, alter: Callable[[dict[str, object]], None]) -> Iterator[Connection]:
    """A device with 64 MB, and a model with an image of some of them."""
    alter({"pg_tensile.device_memory": "64MB"})
    finish(db, submit(db, "large", LARGE, query=QUERY, epochs=1))
    db.execute("SELECT register_model('lasting', %s)", (Jsonb(python_model(on_forward="time.sleep(0.02)")),))
    yield db
    for (job,) in db.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL").fetchall():
        db.execute("SELECT cancel_job(%s)", (job,))
        db.execute("SELECT wait_for_job(%s, '60 s')", (job,))


def test_an_image_gives_way_to_a_job_and_is_made_again(scarce: Connection, cluster: Any, wait_until: Wait) -> None:
    conn = scarce
    ask = ASK.replace("small", "large")
    before = value(conn, ask)
    (file,) = images(cluster, conn, "large")
    job = submit(conn, "lasting", query=QUERY.replace(", 'c' || i % 5 AS c", ""), epochs=FOREVER, memory_budget="62MB")
    wait_until(lambda: phase(conn, job) == "training")
    assert not file.exists()
    assert value(conn, ask) == before
    assert file.exists() and maps(cluster, conn, file)
    # beside it may be what the predictor keeps of models of other modules, which are dropped and not shown any more
    inference = value(conn, "SELECT inference_bytes FROM tensile.devices WHERE name = 'cpu'")
    shown = value(conn, "SELECT device_bytes FROM tensile.loaded_models WHERE model = 'large'")
    assert inference >= shown == file.stat().st_size
