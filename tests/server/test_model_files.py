"""export_model and import_model: round trips between databases, imported versions, refusals, privileges."""

from __future__ import annotations

import csv
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pg_tensile.tools.cli.main import main
from tests.examples import examples
from tests.server.refusals import refused
from tests.server.shared import SharedServer
from tests.server.support import MLP, Connection, Wait, children, finish, python_model, register, submit, value

TABLE = """
    CREATE TABLE flights AS
    SELECT i AS id, (i % 24)::int2 AS hour, nullif(i % 700, 13)::int AS distance, (i % 100) / 10.0 AS wind,
           i % 3 = 0 AS weekend, '2024-01-01'::timestamptz + i * interval '1 hour' AS departure,
           CASE WHEN i % 50 > 0 THEN (ARRAY['UA', 'ÄÖ', 'B6', 'DL'])[i % 4 + 1] END AS carrier,
           ARRAY[i % 7, i % 5, i % 3] AS recent, 1 + (i % 24) * 2.0 + (i * i % 101) / 10.0 AS delay,
           CASE WHEN i % 24 + i * i % 7 > 15 THEN 'late' ELSE 'on time' END AS verdict, i % 24 / 8 AS part
    FROM generate_series(1, 1200) i
"""
FEATURES = "hour, distance, wind, weekend, departure, carrier, recent"
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {  # target, architecture
    "delay": ("delay", {"type": "mlp", "hidden": [16]}),
    "verdict": ("verdict", {"type": "tabular", "members": 2, "hidden": 16, "projection": 16}),
    "part": ("part::text AS part", {"type": "mlp", "hidden": [8], "norm": "batch"}),
}
EVERYTHING = "SELECT row_number, prediction, label, probability FROM predict_rows(%s, 'TABLE flights') ORDER BY 1"


@pytest.fixture(scope="module")
def source(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with trained models."""
    with shared_server.connect() as conn:
        conn.execute(TABLE)
        jobs = [
            submit(
                conn, name, architecture, query=f"SELECT {FEATURES}, {target} FROM flights",
                target=target.rpartition(" ")[2], epochs=2, seed=1,
            )
            for name, (target, architecture) in TRAINED.items()
        ]  # fmt: skip
        for job in jobs:
            assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    return shared_server


@pytest.fixture(scope="module")
def target(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Another cluster with the same rows, and ordinary roles."""
    cluster = new_cluster()
    with cluster.connect() as conn:
        conn.execute(TABLE)
        conn.execute("GRANT SELECT ON flights TO PUBLIC")
        conn.execute("CREATE ROLE alice LOGIN IN ROLE tensile_user; CREATE ROLE bob LOGIN IN ROLE tensile_user")
        # A job starts the fork server, without which each import would start a Python process that imports PyTorch.
        finish(
            conn,
            submit(conn, "first", query="SELECT wind, delay FROM flights", target="delay", epochs=1, architecture=MLP),
        )
        conn.execute("SELECT drop_model('first')")
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def files(source: Any) -> dict[str, bytes]:
    with source.connect() as conn:
        return {name: exported(conn, name) for name in TRAINED}


@pytest.fixture
def conn(target: Any) -> Iterator[Connection]:
    """A superuser's connection to the other cluster, whose models are dropped behind the test."""
    with target.connect() as connection:
        yield connection
        connection.execute("SELECT drop_model(model) FROM tensile.models")


@pytest.fixture
def trainer(source: SharedServer) -> Iterator[Connection]:
    """A connection to the cluster that trains, whose model m is dropped behind the test."""
    with source.connect() as connection:
        yield connection
        connection.execute("SELECT drop_model('m')")


def exported(conn: Connection, name: str, *arguments: Any) -> bytes:
    places = ", %s" * len(arguments)
    return bytes(value(conn, f"SELECT export_model(%s{places})", name, *arguments))


def imported(conn: Connection, contents: bytes, name: str) -> int:
    return int(value(conn, "SELECT import_model(%b, %s)", contents, name))


def header_of(contents: bytes) -> dict[str, Any]:
    return json.loads(contents[8 : 8 + struct.unpack("<Q", contents[:8])[0]])


def changed(contents: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """Return the file with a valid checksum after `change`(header, description)."""
    header = header_of(contents)
    tensors = contents[8 + struct.unpack("<Q", contents[:8])[0] :]
    metadata = header["__metadata__"]
    description = json.loads(metadata["description"])
    change(header, description)
    metadata |= {"description": json.dumps(description), "sha256": "0" * 64}
    text = json.dumps(header).encode()
    text = struct.pack("<Q", len(text)) + text
    digest = hashlib.sha256(text + hashlib.sha256(tensors).digest()).hexdigest()
    return text.replace(b'"sha256": "' + b"0" * 64, b'"sha256": "' + digest.encode()) + tensors


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_is_the_same_in_another_database(
    source: Any, conn: Connection, files: dict[str, bytes], name: str
) -> None:
    assert imported(conn, files[name], name) == 1
    assert exported(conn, name) == files[name]
    with source.connect() as other:
        expected = other.execute(EVERYTHING, (name,)).fetchall()
        assert exported(other, name) == files[name]
    assert conn.execute(EVERYTHING, (name,)).fetchall() == expected
    assert len(expected) == 1200


@pytest.mark.parametrize(
    "query",
    [
        "SELECT predict('delay', f) FROM flights f WHERE id < 20 ORDER BY id",
        "SELECT i.* FROM flights f, predict_interval('delay', f, 0.8) i WHERE id < 20 ORDER BY id",
        pytest.param(
            "SELECT e.* FROM flights f, explain_prediction('delay', f) e WHERE id = 7", marks=pytest.mark.long
        ),
        pytest.param("SELECT * FROM evaluate_model('delay', 'TABLE flights')", marks=pytest.mark.long),
        "SELECT task, preprocessing, v.architecture, metrics, rows, training FROM tensile.model_versions v"
        " JOIN tensile.models m ON m.model_id = v.model_id AND m.model = 'delay' AND v.version = 1",
    ],
    ids=["predict", "interval", "explain", "evaluate", "version"],
)
def test_whatever_is_asked_of_the_imported_model_is_that_of_the_trained_one(
    source: Any, conn: Connection, files: dict[str, bytes], query: str
) -> None:
    """Two cases are long: two processes each import scikit-learn or explain, from the weights and the description that
    the others compare."""
    imported(conn, files["delay"], "delay")
    with source.connect() as other:
        assert conn.execute(query).fetchall() == other.execute(query).fetchall() != []


def test_an_import_adds_a_version_that_is_deployed_if_none_is(trainer: Connection, files: dict[str, bytes]) -> None:
    conn = trainer
    register(conn, "m", {"type": "tabular"})
    deployed = "SELECT deployed_version FROM tensile.models WHERE model = 'm'"
    assert [imported(conn, files["delay"], "m"), value(conn, deployed)] == [1, 1]
    assert [imported(conn, files["part"], "m"), value(conn, deployed)] == [2, 1]
    assert json.loads(header_of(exported(conn, "m", 2))["__metadata__"]["description"])["name"] == "m"
    conn.execute("SELECT deploy_model('m', 2)")
    assert value(conn, "SELECT predict_class('m', f) IN ('0', '1', '2') FROM flights f LIMIT 1")
    conn.execute("SELECT set_model_retention('m', 1)")
    assert imported(conn, files["verdict"], "m") == 3
    of_model = "SELECT version FROM tensile.model_versions WHERE model = 'm' ORDER BY 1"
    assert conn.execute(of_model).fetchall() == [(2,), (3,)]
    job = submit(conn, "m", None, query="SELECT wind, delay FROM flights", target="delay", epochs=1)
    assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
    assert value(conn, deployed) == 4


def test_the_format_torch_has_the_weights_only(conn: Connection, files: dict[str, bytes]) -> None:
    from safetensors.torch import load

    imported(conn, files["delay"], "delay")
    contents = exported(conn, "delay", None, "torch")
    assert "__metadata__" not in header_of(contents)
    weights, whole = load(contents), load(files["delay"])
    assert weights.keys() == whole.keys() and all((weights[name] == whole[name]).all() for name in weights)


def test_weights_of_pytorch_become_a_version_like_another(
    source: Any, conn: Connection, files: dict[str, bytes]
) -> None:
    from safetensors.torch import load, save

    imported(conn, files["delay"], "delay")
    weights = load(exported(conn, "delay", 1, "torch"))
    like = "SELECT import_model(%b, %s, template => %s)"
    assert value(conn, like, save(weights), "same", "delay") == 1
    assert conn.execute(EVERYTHING, ("same",)).fetchall() == conn.execute(EVERYTHING, ("delay",)).fetchall()
    weights["dense.2.bias"] += 1
    assert value(conn, "SELECT import_model(%b, 'same', template => 'delay')", save(weights)) == 2
    assert value(conn, "SELECT metrics IS NULL AND training IS NULL FROM tensile.model_versions WHERE version = 2")
    conn.execute("SELECT deploy_model('same', 2)")
    assert conn.execute(EVERYTHING, ("same",)).fetchall() != conn.execute(EVERYTHING, ("delay",)).fetchall()
    interval = "SELECT i.* FROM flights f, predict_interval('same', f) i LIMIT 1"
    refused("22000", "without validation rows", "Train it again", lambda: conn.execute(interval))
    bias = weights["dense.2.bias"]
    for name, other in (("more", bias.clone()), ("dense.2.bias", bias.double())):
        attempt = partial(value, conn, like, save(weights | {name: other}), "same", "delay")
        assert name in (refused("22P03", "do not fit", "", attempt).diag.message_detail or "")
    refused("22P03", "export_model did not write", "template", lambda: imported(conn, save(weights), "same"))
    refused("42704", "does not exist", "", lambda: value(conn, like, save(weights), "same", "unknown"))


# -- without a server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_the_command_line_predicts_what_predict_rows_does(
    source: Any, files: dict[str, bytes], name: str, tmp_path: Any
) -> None:
    """The rows have strings, numbers, booleans, times, arrays and nulls."""
    rows = "SELECT * FROM flights ORDER BY id LIMIT 200"
    with source.connect() as conn, conn.cursor().copy(f"COPY ({rows}) TO STDOUT (FORMAT csv, HEADER)") as copied:
        (tmp_path / "rows.csv").write_bytes(b"".join(copied))
    with source.connect() as conn:
        conn.execute("SET pg_tensile.predict_in_session = off")  # the predictor has the bits of the library
        query = "SELECT row_number, prediction, label, probability FROM predict_rows(%s, %s) ORDER BY 1"
        expected = conn.execute(query, (name, rows)).fetchall()
    (tmp_path / "model").write_bytes(files[name])
    output = tmp_path / "predictions.csv"
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "rows.csv"), "-o", str(output)]) == 0
    with output.open(newline="") as lines:
        found = [
            (int(row), float(prediction) if prediction else None, label or None, float(share) if share else None)
            for row, prediction, label, share in list(csv.reader(lines))[1:]
        ]
    assert found == expected and len(found) == 200


def test_the_command_line_exports_and_imports(
    source: Any, target: Any, conn: Connection, files: dict[str, bytes], tmp_path: Any, capsys: Any
) -> None:
    def run(cluster: Any, *arguments: str) -> int:
        where = ("-h", str(cluster.folder), "-p", str(cluster.port), "-d", "postgres", "-U", "postgres")
        return main([*arguments, *where])

    path = tmp_path / "part.tensile"
    assert run(source, "export", "part", "-v", "1", "-o", str(path)) == 0
    assert path.read_bytes() == files["part"] and f"{len(files['part']):,} bytes" in capsys.readouterr().out
    assert run(target, "import", str(path), "part") == 0
    assert capsys.readouterr().out == 'version 1 of model "part"\n'
    assert run(source, "export", "part", "-f", "torch", "-o", str(path)) == 0
    assert run(target, "import", str(path), "part", "--like", "part") == 0
    assert value(conn, "SELECT count(*) FROM tensile.model_versions") == 2
    assert run(target, "import", str(path), "other") == 1
    assert "export_model did not write" in capsys.readouterr().err
    assert run(source, "export", "unknown", "-o", str(path)) == 1
    assert 'model "unknown" does not exist' in capsys.readouterr().err and path.exists()
    assert run(source, "export", "part", "-o", str(tmp_path / "no" / "file")) == 2
    assert run(target, "import", str(tmp_path / "none"), "m") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["part.tensile"]


@pytest.mark.long
def test_an_onnx_graph_predicts_what_predict_rows_does(source: Any) -> None:
    """The rows have strings, of which one is new, numbers, booleans, times, arrays and nulls.

    Long: two processes import what makes and runs graphs; tests of the library compare graphs with models."""
    import onnxruntime

    features = FEATURES.replace("carrier", "CASE WHEN id % 11 = 0 THEN 'new' ELSE carrier END AS carrier")
    rows = f"SELECT {features} FROM flights ORDER BY id"
    with source.connect() as conn:
        session = onnxruntime.InferenceSession(exported(conn, "verdict", 1, "onnx"))
        query = "SELECT prediction, label, probability FROM predict_rows(%s, %s) ORDER BY row_number"
        expected = conn.execute(query, ("verdict", rows)).fetchall()
        values = conn.execute(rows).fetchall()
    assert dict(session.get_modelmeta().custom_metadata_map)["name"] == "verdict"
    columns = dict(zip(FEATURES.split(", "), zip(*values, strict=True), strict=True))
    feeds = {
        "carrier": np.array(["" if text is None else text for text in columns["carrier"]], object),
        "departure": np.array([time.timestamp() * 1e6 for time in columns["departure"]]),
        "recent": np.array(columns["recent"], float),
    }
    for number in ("hour", "distance", "wind", "weekend"):
        feeds[number] = np.array([np.nan if x is None else float(x) for x in columns[number]])
    found = session.run(None, feeds)
    assert np.isnan(feeds["distance"]).any() and "" in feeds["carrier"]
    assert found[0].tolist() == [row[1] for row in expected]
    assert np.allclose(found[1], [row[2] for row in expected], atol=1e-5)
    assert np.allclose(found[2][:, 1], [row[0] for row in expected], atol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------------------


def nothing(conn: Connection) -> bool:
    return bool(value(conn, "SELECT count(*) = 0 FROM tensile.models"))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (b"PK\x03\x04 an archive", "pickle"),
        (b"\x80\x04\x95 a pickle", "pickle"),
        (b"\xff" * 100, "larger than 16 MB"),
        (struct.pack("<Q", 1 << 63), "larger than 16 MB"),
        (struct.pack("<Q", 16 << 20) + b"{}", "ends within its header"),
        (struct.pack("<Q", 0) + b"{}", "ends within its header"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "header is damaged"),
        (struct.pack("<Q", 2) + b"[]", "header is damaged"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "header is damaged"),
        (struct.pack("<Q", 12) + b'{"\\u0000": 1}'[:12].ljust(12), "header is damaged"),
        (struct.pack("<Q", 2) + b"{}", "export_model did not write"),
    ],
)
def test_what_is_no_model_file_is_refused(conn: Connection, contents: bytes, reason: str) -> None:
    refused("22P03", reason, "", lambda: imported(conn, contents, "m"))
    assert nothing(conn)


@examples(25, suppress=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_refused(conn: Connection, files: dict[str, bytes], data: st.DataObject) -> None:
    """Bytes that have changed, are missing or were added, anywhere."""
    contents = files["part"]
    place = data.draw(st.integers(0, len(contents) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != contents[place]))
    damaged = data.draw(
        st.sampled_from(
            [
                contents[:place] + bytes([other]) + contents[place + 1 :],
                contents[:place],
                contents[:place] + bytes([other]) + contents[place:],
                contents + contents[place:],
            ]
        )
    )
    with pytest.raises(psycopg.Error) as caught:
        imported(conn, damaged, "m")
    assert caught.value.sqlstate in ("22P03", "0A000"), caught.value
    assert caught.value.diag.message_hint
    assert nothing(conn)


def set_at(*path: Any, to: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return a change of a value in the description."""

    def change(header: dict[str, Any], description: dict[str, Any]) -> None:
        place: Any = description
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def newer(header: dict[str, Any], description: dict[str, Any]) -> None:
    header["__metadata__"]["format_version"] = "2"


def beyond(header: dict[str, Any], description: dict[str, Any]) -> None:
    next(value for name, value in header.items() if name != "__metadata__")["data_offsets"] = [0, 1 << 40]


def without_a_tensor(header: dict[str, Any], description: dict[str, Any]) -> None:
    del header[next(name for name in header if name != "__metadata__")]


DEEP = {"nested": json.loads("[" * 70 + "]" * 70)}


@pytest.mark.parametrize(
    ("change", "sqlstate", "reason"),
    [
        (newer, "0A000", "format version 2"),
        (beyond, "22P03", "tensors in the model file are damaged"),
        (without_a_tensor, "22P03", "damaged"),
        (set_at("architecture", to=None), "22P03", '"architecture"'),
        (set_at("architecture", "type", to="pickle"), "22023", "unknown architecture type"),
        (set_at("architecture", "hidden", to=[8, 8]), "22P03", "do not fit"),
        (set_at("architecture", "hidden", to=[65536] * 64), "22P03", "do not fit"),
        (set_at("rows", to=-1), "22P03", '"rows"'),
        (set_at("training", to=DEEP), "22P03", "64 levels"),
        (set_at("preprocessing", "task", to="poetry"), "22P03", '"task"'),
        (set_at("preprocessing", "target", "mean", to=10**400), "22P03", "out of range"),
        (set_at("preprocessing", "features", 0, "kind", to="spatial"), "22P03", "features[0].kind"),
        (set_at("preprocessing", "features", 5, "buckets", to=1 << 23), "22P03", "do not fit"),
        (set_at("preprocessing", "features", 6, "length", to=1 << 40), "22P03", "features[6].length"),
        (set_at("preprocessing", "features", 1, "name", to="hour"), "22P03", "features"),
        (
            set_at("preprocessing", "text", to={"path": "../..", "length": 8, "sha256": "x", "weight_bytes": 0}),
            "22P03",
            "tokenizer",
        ),
    ],
)
def test_a_file_with_a_hostile_description_is_refused(
    conn: Connection, files: dict[str, bytes], change: Any, sqlstate: str, reason: str
) -> None:
    refused(sqlstate, reason, "", lambda: imported(conn, changed(files["part"], change), "m"))
    assert nothing(conn)


def test_a_changed_file_with_a_checksum_is_read(conn: Connection, files: dict[str, bytes]) -> None:
    """Otherwise the tests of hostile descriptions would show nothing."""
    assert imported(conn, changed(files["part"], set_at("description", to="mine")), "m") == 1
    assert value(conn, "SELECT description FROM tensile.models") == "mine"


def test_arguments_are_checked(conn: Connection, files: dict[str, bytes]) -> None:
    refused("22004", '"contents"', "", lambda: conn.execute("SELECT import_model(NULL, 'm')"))
    refused("22004", '"model"', "", lambda: conn.execute("SELECT import_model('', NULL)"))
    refused("22023", "invalid model name", "", lambda: imported(conn, files["part"], ""))
    refused("42704", 'model "m" does not exist', "", lambda: exported(conn, "m"))
    register(conn, "m")
    refused("55000", "no version that is deployed", "", lambda: exported(conn, "m"))
    refused("42704", "has no version 1", "", lambda: exported(conn, "m", 1))
    refused("22023", 'unknown format "pickle"', "tensile", lambda: exported(conn, "m", None, "pickle"))


def test_a_version_that_exceeds_a_value_is_refused(conn: Connection, files: dict[str, bytes]) -> None:
    imported(conn, files["part"], "m")
    with conn.transaction(force_rollback=True):
        conn.execute("UPDATE tensile_internal.model_versions SET weight_bytes = 2000000000")
        refused("54000", "too large to be exported", "pg_dump", lambda: exported(conn, "m"))


# -- privileges -------------------------------------------------------------------------------------------------------


def test_code_of_a_file_runs_for_those_only_who_may_run_code_and_can_be_cancelled(
    source: Any, target: Any, conn: Connection, wait_until: Wait
) -> None:
    trace, slow = target.folder / "trace", target.folder / "slow"
    with source.connect() as other:
        code = python_model(
            on_build=f"""
            open({str(trace)!r}, "w").close()
            if os.path.exists({str(slow)!r}):
                time.sleep(600)"""
        )
        job = submit(other, "code", code, query="SELECT wind, delay FROM flights", target="delay", epochs=1)
        assert value(other, "SELECT wait_for_job(%s, '100 s')", job) == "finished"
        contents = exported(other, "code")
    trace.unlink()
    with target.connect(user="alice") as alice:
        refused("42501", 'architecture type "python"', "pg_execute", lambda: imported(alice, contents, "code"))
        assert not trace.exists()
    assert imported(conn, contents, "code") == 1
    trace.unlink()
    slow.touch()
    with target.connect() as other, ThreadPoolExecutor(1) as thread:
        pid = value(conn, "SELECT pg_backend_pid()")
        waiting = thread.submit(imported, conn, contents, "code")
        wait_until(trace.exists, what="the code of the file runs")
        assert value(other, "SELECT count(*) FROM tensile.model_versions") == 1
        assert value(other, "SELECT pg_cancel_backend(%s)", pid)
        with pytest.raises(psycopg.errors.QueryCanceled):
            waiting.result()
        assert children(pid) == []
        assert value(other, "SELECT count(*) FROM tensile.model_versions") == 1


def test_imports_of_the_same_name_at_once_become_versions(
    target: Any, conn: Connection, files: dict[str, bytes]
) -> None:
    with target.connect() as other, ThreadPoolExecutor(2) as threads:
        versions = [threads.submit(imported, session, files["part"], "part") for session in (conn, other)]
        assert sorted(version.result() for version in versions) == [1, 2]


def test_the_owner_alone_exports_and_adds_versions(target: Any, conn: Connection, files: dict[str, bytes]) -> None:
    with target.connect(user="alice") as alice, target.connect(user="bob") as bob:
        assert imported(alice, files["part"], "part") == 1
        assert value(conn, "SELECT owner FROM tensile.models") == "alice"
        refused("42501", "must be owner", "alice", lambda: exported(bob, "part"))
        refused("42501", "must be owner", "alice", lambda: imported(bob, files["part"], "part"))
        predict = "SELECT count(*) FROM predict_rows('part', 'TABLE flights')"
        refused("42501", "permission denied to predict", "grant_model", lambda: bob.execute(predict))
        alice.execute("SELECT grant_model('part', 'bob')")
        assert value(bob, predict) == 1200
        refused("42501", "must be owner", "alice", lambda: exported(bob, "part"))
        assert exported(alice, "part") == exported(conn, "part") == files["part"]


def test_an_import_that_fails_or_is_rolled_back_leaves_nothing(conn: Connection, files: dict[str, bytes]) -> None:
    with conn.transaction(force_rollback=True):
        assert imported(conn, files["part"], "m") == 1
    assert nothing(conn)
    with conn.transaction():
        conn.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            imported(conn, files["part"], "m")
    assert value(conn, "SELECT count(*) FROM tensile_internal.model_weights") == 0


def test_a_query_that_a_model_reads_cannot_import(conn: Connection, files: dict[str, bytes]) -> None:
    imported(conn, files["part"], "part")
    conn.execute("CREATE TABLE IF NOT EXISTS inbox (contents bytea)")
    conn.execute("INSERT INTO inbox VALUES (%s)", (files["part"],))
    query = "SELECT f.*, import_model(i.contents, 'other') FROM flights f, inbox i LIMIT 3"
    attempt = "SELECT count(*) FROM evaluate_model('part', %s)"
    refused("55000", "import_model cannot be called", "", lambda: conn.execute(attempt, (query,)))
    conn.execute("DROP TABLE inbox")
