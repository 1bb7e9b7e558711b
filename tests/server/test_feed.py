"""The feed: frames, hashes, errors and settings of the session that runs the query (trainer: recorder.py)."""

from __future__ import annotations

import datetime as dt
import math
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import psycopg
import pytest

from tests.server.recording import Recorder, microseconds

MAX_ROWS = 16_384
MAX_BYTES = 8 << 20

# -- frames ----------------------------------------------------------------------------------------------------------


def test_frames_keep_to_their_rows_and_bytes(recorder: Recorder) -> None:
    narrow = recorder("SELECT i AS x, i % 2 AS y FROM generate_series(1, 40000) i")
    assert narrow.frame_rows == [MAX_ROWS, MAX_ROWS, 40_000 - 2 * MAX_ROWS]
    columns = ", ".join(f"i + {n} AS x{n}" for n in range(300))
    wide = recorder(f"SELECT {columns}, i % 2 AS y FROM generate_series(1::int8, 8000) i")
    assert max(wide.frame_bytes) <= MAX_BYTES
    assert wide.values("x299") == list(range(300, 8300))
    arrays = recorder("SELECT array_fill(i::float8, '{1000}') AS a, i % 2 AS y FROM generate_series(1, 3000) i")
    assert max(arrays.frame_bytes) <= MAX_BYTES + 8000 + 4096
    assert arrays.values("a")[2999] == [3000.0] * 1000


def test_codes_are_in_order_of_first_appearance(recorder: Recorder) -> None:
    recording = recorder("SELECT 'v' || i % 1000 AS x, i % 2 AS y FROM generate_series(0, 39999) i")
    assert recording.dictionaries["x"] == [f"v{i}" for i in range(1000)]
    assert recording.values("x")[39_999] == "v999"


# -- hashes ----------------------------------------------------------------------------------------------------------


def test_hashes_belong_to_content_and_not_to_order(recorder: Recorder) -> None:
    query = (
        "SELECT i AS a, 'c' || i % 100 AS b, array[i, i + 1] AS d, 1 AS y FROM generate_series(1, 20000) i ORDER BY {}"
    )
    up, down = recorder(query.format("i")), recorder(query.format("i DESC"))
    assert up.fingerprint == down.fingerprint
    assert up.rows.hashes.tolist() == down.rows.hashes.tolist()[::-1]
    assert len(set(up.rows.hashes.tolist())) == 20_000
    assert up.fingerprint == f"20000:{int(np.sum(up.rows.hashes, dtype=np.uint64)):016x}"


def test_a_parallel_scan_feeds_the_same_rows(recorder: Recorder) -> None:
    conn = recorder.conn
    conn.execute("CREATE TABLE spread AS SELECT i AS x, i % 2 AS y FROM generate_series(1, 100000) i")
    alone = recorder("SELECT * FROM spread")
    parallel = {"parallel_setup_cost": 0, "parallel_tuple_cost": 0, "min_parallel_table_scan_size": 0}
    for name, setting in parallel.items():
        conn.execute(f"ALTER DATABASE postgres SET {name} = {setting}")
        conn.execute(f"SET {name} = {setting}")
    plan = "\n".join(row[0] for row in conn.execute("EXPLAIN SELECT * FROM spread").fetchall())
    assert "Parallel Seq Scan" in plan
    try:
        together = recorder("SELECT * FROM spread")
    finally:
        for name in parallel:
            conn.execute(f"ALTER DATABASE postgres RESET {name}")
            conn.execute(f"RESET {name}")
    assert together.fingerprint == alone.fingerprint
    assert sorted(together.values("x")) == list(range(1, 100_001))


def test_only_equal_numbers_have_equal_hashes(recorder: Recorder) -> None:
    other_nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    assert math.isnan(other_nan)
    recorder.conn.execute("CREATE TABLE floats (n int, x float8, a float8[], y int)")
    with recorder.conn.cursor() as cursor, cursor.copy("COPY floats FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(["int4", "float8", "float8[]", "int4"])
        for n, x in enumerate([0.0, -0.0, math.nan, other_nan, None, 1.0]):
            copy.write_row((n, x, [x, 1.0], 1))
    hashes = recorder("SELECT x, a, y FROM floats ORDER BY n").rows.hashes.tolist()
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert len(set(hashes)) == 4


def test_null_empty_and_position_make_different_hashes(recorder: Recorder) -> None:
    recording = recorder(
        "SELECT a, b, c, y FROM (VALUES (1, 2, NULL, 1), (2, 1, NULL, 1), (NULL, 1, NULL, 1), (1, NULL, NULL, 1),"
        " (0, 1, NULL, 1), (1, 2, '{}'::int[], 1), (1, 2, '{NULL}', 1), (1, 2, '{0}', 1), (1, 2, '{NULL,0}', 1),"
        " (1, 2, '{0,NULL}', 1)) t(a, b, c, y)"
    )
    assert len(set(recording.rows.hashes.tolist())) == 10


# -- limits and errors -------------------------------------------------------------------------------------------------


def test_a_million_distinct_strings_are_enough(recorder: Recorder) -> None:
    job = recorder.job("SELECT i::text AS x, 1 AS y FROM generate_series(1, 1000001) i", "y")
    sqlstate, message, hint, _ = recorder.end(job)
    assert (sqlstate, message) == ("54000", 'text column "x" has more than 1000000 distinct values')
    assert hint is not None and "fewer categories, for example by hashtext(x) % 1000" in hint


@pytest.mark.long
def test_a_row_of_more_than_a_gigabyte_is_refused(recorder: Recorder) -> None:
    """Long: the server makes the row."""
    columns = ", ".join(f"b AS b{n}" for n in range(11))
    query = f"SELECT {columns}, 1 AS y FROM (SELECT convert_to(repeat('x', 100000000), 'UTF8') AS b OFFSET 0) t"
    sqlstate, message, hint, detail = recorder.end(recorder.job(query, "y"))
    assert (sqlstate, message) == ("54000", "the data does not fit into a message to the child process")
    assert hint is not None and "1 GB" in hint
    assert detail is not None and "bytes" in detail


def test_an_error_names_the_row_of_the_query(recorder: Recorder) -> None:
    query = "SELECT 1 / (20005 - i) AS x, i % 2 AS y FROM generate_series(1, 30000) i"
    sqlstate, message, _, detail = recorder.end(recorder.job(query, "y"))
    assert (sqlstate, message, detail) == ("22012", "division by zero", "row 20005 of the training query")


def test_a_date_that_no_timestamp_reaches_is_the_last_day_of_timestamps(recorder: Recorder) -> None:
    recording = recorder("SELECT d, 1 AS y FROM unnest('{2000-01-01,5874897-01-01,294276-12-31}'::date[]) d")
    days = [microseconds / 86_400e6 for microseconds in recording.values("d")]
    assert days == [0, 106_751_982, 106_751_982]


def test_a_trainer_that_takes_no_data_is_given_up(recorder: Recorder, wait_until: Callable[..., Any]) -> None:
    conn, cluster = recorder.conn, recorder.cluster
    conn.execute("ALTER SYSTEM SET pg_tensile.executor_timeout = '1 s'")
    conn.execute("ALTER SYSTEM SET pg_tensile.max_retries = 0")
    cluster.reload()
    try:
        job = recorder.job(
            "SELECT i AS x, j % 2 AS y FROM generate_series(1, 10000) i, generate_series(1, 10000) j", "y"
        )

        def trainer() -> int | None:
            return next((pid for pid, command in cluster.processes().items() if "recorder.py" in command), None)

        pid = wait_until(trainer, what="the trainer")
        phase = "SELECT count(*) FROM tensile_worker._progress() WHERE job = %s AND phase = 'loading'"
        wait_until(lambda: conn.execute(phase, (job,)).fetchone() == (1,), what="rows in the socket")
        os.kill(pid, signal.SIGSTOP)
        sqlstate, message, _, _ = recorder.end(job)
    finally:
        conn.execute("ALTER SYSTEM RESET pg_tensile.executor_timeout")
        conn.execute("ALTER SYSTEM RESET pg_tensile.max_retries")
        cluster.reload()
    assert sqlstate == "58000"
    assert message == "the trainer took no data for 1 s"
    wait_until(lambda: pid not in cluster.processes(), what="the trainer's end")


def test_the_query_cannot_feed_again(recorder: Recorder) -> None:
    query = "SELECT tensile_worker._feed(1, 'SELECT 1 AS x, 2 AS y', 'y', '{}') AS x, 1 AS y"
    assert recorder.end(recorder.job(query, "y"))[0] == "42501"


def test_a_session_cannot_feed(recorder: Recorder) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        recorder.conn.execute("SELECT tensile_worker._feed(1, 'SELECT 1 AS x, 2 AS y', 'y', '{}')")


def test_the_query_runs_with_the_submitters_settings_and_leaves_none_behind(recorder: Recorder) -> None:
    conn = recorder.conn
    conn.execute("CREATE SCHEMA elsewhere")
    conn.execute("CREATE TABLE elsewhere.hidden AS SELECT '2024-03-01'::date AS d, 1 AS y")
    conn.execute("SET search_path = elsewhere, public; SET timezone = 'Asia/Tokyo'; SET datestyle = 'German'")
    try:
        recording = recorder("SELECT d::text AS d, d::timestamptz AS z, y FROM hidden")
    finally:
        conn.execute("RESET search_path; RESET timezone; RESET datestyle")
    assert recording.values("d") == ["01.03.2024"]
    assert recording.values("z") == [microseconds(dt.datetime(2024, 2, 29, 15))]


def test_strings_of_other_encodings_arrive_as_utf8(recorder: Recorder) -> None:
    conn, cluster = recorder.conn, recorder.cluster
    conn.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    cluster.alter({"pg_tensile.database": "latin"})
    try:
        with cluster.connect("latin") as latin:
            latin.execute("CREATE EXTENSION pg_tensile CASCADE")
            latin.execute("""SELECT register_model('recorder', '{"type": "mlp"}')""")
            query = """SELECT 'caf' || chr(233) AS "père", 'x'::name AS n, 1 AS y"""
            recording = Recorder(cluster, latin, recorder.folder)(query)
    finally:
        cluster.alter({"pg_tensile.database": None})
        conn.execute("DROP DATABASE latin WITH (FORCE)")
    assert recording.dictionaries == {"père": ["café"], "n": ["x"]}
