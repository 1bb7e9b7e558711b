"""Training from SQL to predictions: architectures, kinds of features and targets, ends and resumption of jobs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import torch

from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Features, Inputs, Kind, Preprocessing
from pg_tensile.execution.training import checkpoint
from tests.server.support import MLP, Connection, Row, Wait, finish, python_model, steps, submit, trainer_pid, value

# The class and the quantity are functions of every kind of feature; a twentieth of the values is null
EVERYTHING = """
    CREATE TABLE everything AS
    WITH x AS (SELECT i, sin(i) AS s, cos(i * 1.7) AS c, i % 4 AS k FROM generate_series(1, {rows}) i)
    SELECT i AS id,
           CASE WHEN i % 20 <> 0 THEN s > 0 END AS f_bool,
           CASE WHEN i % 20 <> 1 THEN (s * 1000)::int2 END AS f_int2,
           CASE WHEN i % 20 <> 2 THEN (c * 1e6)::int4 END AS f_int4,
           CASE WHEN i % 20 <> 3 THEN (c * 1e15)::int8 END AS f_int8,
           CASE WHEN i % 20 <> 4 THEN s::float4 END AS f_float4,
           CASE WHEN i % 20 = 5 THEN NULL WHEN i = 6 THEN 'NaN' WHEN i = 7 THEN 'inf' ELSE c END AS f_float8,
           CASE WHEN i % 20 <> 8 THEN (s * 100)::numeric(10, 4) END AS f_numeric,
           CASE WHEN i % 20 <> 9 THEN 'ä' || k END AS f_text,
           CASE WHEN i % 20 <> 10 THEN date '2020-01-01' + i END AS f_date,
           CASE WHEN i % 20 <> 11 THEN timestamptz '2020-01-01 00:00Z' + i * interval '1 hour' END AS f_timestamptz,
           CASE WHEN i % 20 <> 12 THEN ARRAY[s, c, NULL]::float8[] END AS f_array,
           set_byte(set_byte('\\x0000', 0, (100 + s * 100)::int), 1, k::int) AS f_bytea,
           s * 10 + c * 5 + k AS quantity,
           CASE WHEN s + c > 0 THEN 'high' ELSE 'low' END AS class
    FROM x
"""
FEATURES = (
    *("f_bool", "f_int2", "f_int4", "f_int8", "f_float4", "f_float8", "f_numeric"),
    *("f_text", "f_date", "f_timestamptz", "f_array", "f_bytea"),
)
QUERY = f"SELECT {', '.join(FEATURES)}, {{target}} FROM everything"
# 8×8 images of a bright row or a bright column
IMAGES = """
    CREATE TABLE images AS
    SELECT i AS id, CASE WHEN i % 2 = 0 THEN 'row' ELSE 'column' END AS class,
           (SELECT array_agg(CASE WHEN (CASE WHEN i % 2 = 0 THEN p / 8 ELSE p % 8 END) = (i / 2) % 8 THEN 200 ELSE 0 END
                             + (i * 31 + p * 17) % 50 ORDER BY p) FROM generate_series(0, 63) p)::int2[] AS pixels
    FROM generate_series(1, 600) i
"""
# Sentences of 1 to 9 tokens; how many of them are 3?
SENTENCES = """
    CREATE TABLE sentences AS
    SELECT i AS id, tokens, cardinality(array_positions(tokens, 3)) AS threes
    FROM generate_series(1, 600) i,
         LATERAL (SELECT array_agg((i * p * 7 + i / 3 + p) % 6 ORDER BY p)
                  FROM generate_series(1, 1 + i % 9) p) t (tokens)
"""
PYTHON = {
    "type": "python",
    "source": """
import torch
def build(n_inputs, n_outputs):
    return torch.nn.Sequential(torch.nn.Linear(n_inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, n_outputs))
""",
}


@pytest.fixture
def tables(db: Connection) -> Connection:
    for table in (EVERYTHING.format(rows=800), IMAGES, SENTENCES):
        db.execute(table)
    return db


def last_metrics(conn: Connection, job: int, split: str = "validation") -> dict[str, Any]:
    names = ("epoch", "samples", "loss", "accuracy", "f1", "rmse", "r2", "seconds")
    row = conn.execute(
        f"SELECT {', '.join(names)} FROM tensile.epoch_metrics WHERE job = %s AND split = %s"
        " ORDER BY epoch DESC LIMIT 1",
        (job, split),
    ).fetchone()
    assert row is not None
    return dict(zip(names, row, strict=True))


@pytest.mark.parametrize(
    ("architecture", "query", "target", "metric", "least"),
    [
        ({"type": "mlp", "hidden": [32]}, QUERY, "class", "accuracy", 0.9),
        pytest.param(
            *({"type": "cnn", "channels": [8]}, "SELECT pixels, class FROM images", "class", "accuracy", 0.95),
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"type": "transformer", "dim": 16, "heads": 2, "layers": 1},
            "SELECT tokens, threes FROM sentences",
            *("threes", "r2", 0.8),
            marks=pytest.mark.long,
        ),
        (PYTHON, QUERY, "class", "accuracy", 0.9),
        ({"type": "import", "callable": "torch.nn:Linear", "kwargs": {"bias": True}}, QUERY, "quantity", "r2", 0.9),
    ],
    ids=["mlp", "cnn", "transformer", "python", "import"],
)
def test_each_architecture_learns_from_sql_and_predicts(
    tables: Connection, architecture: dict[str, Any], query: str, target: str, metric: str, least: float
) -> None:
    """Images and sequences are long: they take the most steps of a plan; their networks are tested in the library."""
    query = query.format(target=target)
    arguments: dict[str, Any] = {"batch_size": 16, "epochs": 15, "learning_rate": 1e-2}
    arguments["policy"] = "none" if architecture["type"] in ("python", "import") else "joint"
    job = submit(tables, "m", architecture, query=query, target=target, **arguments)
    finish(tables, job)
    metrics = last_metrics(tables, job)
    assert metrics["epoch"] == 15 and metrics[metric] > least, metrics
    assert value(tables, "SELECT count(*) FROM tensile.epoch_metrics WHERE job = %s", job) == 30
    rows = f"SELECT *, row_number() OVER () AS n FROM ({query}) q"
    if metric == "accuracy":
        right = value(tables, f"SELECT avg((predict_class('m', q) = q.class)::int) FROM ({query}) q")
    else:
        right = value(tables, f"SELECT regr_r2(predict('m', q), q.{target}) FROM ({rows}) q")
    assert right > least


@pytest.mark.long
def test_validation_rows_are_separate_and_counted(tables: Connection) -> None:
    job = submit(tables, "m", MLP, query=QUERY.format(target="class"), target="class", validation=0.25)
    finish(tables, job)
    training, validation = (last_metrics(tables, job, split)["samples"] for split in ("training", "validation"))
    assert training + validation == 800 and 150 < validation < 250
    again = submit(
        tables, "m", query=QUERY.format(target="class") + " ORDER BY id DESC", target="class", validation=0.25
    )
    finish(tables, again)
    assert weights(tables, again) == weights(tables, job)  # the order of the rows does not matter
    none = submit(tables, "m", query=QUERY.format(target="class"), target="class", validation=0.0)
    finish(tables, none)
    assert last_metrics(tables, none, "training")["samples"] == 800
    assert (
        value(tables, "SELECT count(*) FROM tensile.epoch_metrics WHERE job = %s AND split = 'validation'", none) == 0
    )


def weights(conn: Connection, job: int) -> bytes:
    """Return the weights of the job's version."""
    parts = conn.execute(
        "SELECT w.data FROM tensile_internal.model_weights w JOIN tensile.model_versions v ON v.version_id = w.version"
        " WHERE v.job = %s ORDER BY w.seq",
        (job,),
    ).fetchall()
    assert parts
    return b"".join(bytes(part[0]) for part in parts)


# ---- the same features in training and prediction ----


def inputs(preprocessing: Preprocessing, rows: list[dict[str, Any]]) -> Inputs:
    """Convert rows of psycopg to the predictor's raw inputs."""
    numeric: list[list[float]] = []
    categories: list[CategoryInput] = []
    arrays: list[ArraysInput] = []
    for feature in preprocessing.features:
        values = [row[feature.name] for row in rows]
        if feature.kind == Kind.CATEGORY:
            strings = sorted({value for value in values if value is not None})
            places = np.array([-1 if value is None else strings.index(value) for value in values])
            categories.append(CategoryInput(places, np.array([*preprocessing.codes(len(categories), strings), 0])))
        elif feature.kind == Kind.ARRAY:
            lengths = np.array([-1 if value is None else len(value) for value in values])
            elements = [math.nan if item is None else float(item) for value in values for item in value or ()]
            arrays.append(ArraysInput(lengths, np.array(elements)))
        else:
            numeric.append([math.nan if value is None else float(value) for value in values])
    return Inputs(len(rows), np.array(numeric), categories, arrays)


def test_prediction_computes_the_features_that_training_saw(tables: Connection) -> None:
    """With a learning rate of almost 0, the training loss is the loss of the model that predicts, so every feature of
    every row must be the same in both, and the same as the library computes from the rows."""
    query = QUERY.format(target="class")
    job = submit(
        tables, "m", MLP, query=query, target="class", learning_rate=1e-30, validation=0.0, epochs=1, batch_size=64
    )
    finish(tables, job)
    loss = last_metrics(tables, job, "training")["loss"]
    right = "CASE WHEN q.class = 'low' THEN predict('m', q) ELSE 1 - predict('m', q) END"
    predicted = value(tables, f"SELECT avg(-ln({right})) FROM ({query}) q")
    assert predicted == pytest.approx(loss, rel=1e-6)

    version = tables.execute(
        "SELECT architecture, preprocessing FROM tensile.model_versions WHERE job = %s", (job,)
    ).fetchone()
    assert version is not None
    preprocessing = Preprocessing.from_json(version[1])
    assert {feature.name: feature.nulls for feature in preprocessing.features}[
        "f_float8"
    ] == 42  # NaN and infinity included
    model = models.build(models.parse(version[0]), preprocessing.model_inputs, preprocessing.outputs).eval()
    checkpoint.load_model(model, checkpoint.from_bytes(weights(tables, job)))
    microseconds = "(extract(epoch FROM {0}) - 946684800) * 1000000 AS {0}"
    columns = [microseconds.format(name) if name in ("f_date", "f_timestamptz") else name for name in FEATURES]
    with tables.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        rows = cursor.execute(f"SELECT {', '.join(columns)} FROM everything ORDER BY id").fetchall()
    features = preprocessing.apply(inputs(preprocessing, rows))
    with torch.no_grad():
        outputs = model(Features.from_flat([torch.from_numpy(array) for array in features.flat()]))[:, 0]
    server = tables.execute(
        f"SELECT predict('m', e) FROM (SELECT {', '.join(FEATURES)}, id FROM everything) e ORDER BY id"
    )
    np.testing.assert_allclose(
        [row[0] for row in server.fetchall()], torch.sigmoid(outputs.double()).numpy(), rtol=1e-5
    )


def test_nulls_are_imputed_counted_and_predicted_with(tables: Connection) -> None:
    job = submit(tables, "m", MLP, query=QUERY.format(target="quantity"), target="quantity")
    finish(tables, job)
    nulls: dict[str, int] = dict(
        tables.execute(
            "SELECT f->>'name', (f->>'nulls')::int FROM tensile.model_versions v,"
            " jsonb_array_elements(v.preprocessing->'features') f WHERE v.job = %s",
            (job,),
        ).fetchall()
    )
    assert all(nulls[name] > 20 for name in FEATURES if name != "f_bytea") and nulls["f_bytea"] == 0
    nothing = ", ".join(f"NULL::{kind} AS {name}" for name, kind in kinds(tables).items())
    assert math.isfinite(value(tables, f"SELECT predict('m', q) FROM (SELECT {nothing}) q"))


def kinds(conn: Connection) -> dict[str, str]:
    """Return the kinds of the model's features by name."""
    rows = conn.execute(
        "SELECT attname, atttypid::regtype::text FROM pg_attribute WHERE attrelid = 'everything'::regclass"
    ).fetchall()
    return {name: kind for name, kind in rows if name in FEATURES}


@pytest.mark.parametrize(
    ("target", "task", "made", "present"),
    [
        pytest.param("quantity", None, "regression", ("rmse", "r2"), marks=pytest.mark.long),
        ("class", None, "binary", ("accuracy", "f1")),
        pytest.param("id % 3 = 0", None, "binary", ("accuracy", "f1"), marks=pytest.mark.long),
        ("id % 3 = 0", "regression", "regression", ("rmse", "r2")),
        ("id % 3", "classification", "multiclass", ("accuracy", "f1")),
    ],
)
def test_the_targets_type_or_the_option_decides_the_task(
    tables: Connection, target: str, task: str | None, made: str, present: tuple[str, str]
) -> None:
    """Two types are long: each case is a training, and other tests train with them."""
    query = f"SELECT f_int2, f_text, {target} AS t FROM everything"
    job = submit(tables, "m", MLP, query=query, target="t", options={} if task is None else {"task": task})
    finish(tables, job)
    assert value(tables, "SELECT task FROM tensile.model_versions WHERE job = %s", job) == made
    metrics = last_metrics(tables, job)
    assert {name for name in ("accuracy", "f1", "rmse", "r2") if metrics[name] is not None} == set(present)


def test_rows_without_a_target_are_skipped_and_reported(tables: Connection, job_row: Row) -> None:
    query = "SELECT f_float4, CASE WHEN id > 100 THEN class END AS class FROM everything"
    job = submit(tables, "m", MLP, query=query, target="class")
    finish(tables, job)
    assert '100 of 800 rows were skipped: their "class" is null' in job_row(tables, job)["warnings"]
    number = "CASE WHEN id > 100 THEN id WHEN id > 70 THEN 'infinity' WHEN id > 40 THEN 'NaN'::float8 END AS number"
    job = submit(tables, "n", MLP, query=f"SELECT f_float4, {number} FROM everything", target="number")
    finish(tables, job)
    reason = 'their "number" is null in 40 rows, NaN or infinite in 60'
    assert f"100 of 800 rows were skipped: {reason}" in job_row(tables, job)["warnings"]


# ---- mistakes found by the trainer -------------


@pytest.mark.parametrize(
    ("query", "arguments", "sqlstate", "message"),
    [
        ("SELECT 1 AS x, 2 AS y WHERE false", {}, "22000", "the query returned no rows"),
        (
            "SELECT i AS x, NULL::int AS y FROM generate_series(1, 99) i",
            {},
            "22000",
            'the target "y" is null in all 99 rows',
        ),
        (
            "SELECT i AS x, 'a' AS y FROM generate_series(1, 99) i",
            {},
            "22000",
            "the target \"y\" has only one value, 'a'",
        ),
        (
            "SELECT i AS x, i AS y FROM generate_series(1, 20) i",
            {"batch_size": 64, "validation": 0.0},
            "22000",
            "batch_size is 64, but there are only 20 rows to train on",
        ),
        (
            "SELECT array_fill(1, ARRAY[1 + i % 2]) AS x, i AS y FROM generate_series(1, 99) i",
            {},
            "22000",
            'feature "x" has arrays of different lengths',
        ),
    ],
    ids=["no rows", "all null", "one class", "batch size", "lengths"],
)
def test_data_that_cannot_be_learned_from(
    db: Connection, job_row: Row, query: str, arguments: dict[str, Any], sqlstate: str, message: str
) -> None:
    job = submit(db, "m", {"type": "mlp"}, query=query, target="y", **arguments)
    with pytest.raises(psycopg.Error, match=message):
        finish(db, job)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", sqlstate)
    assert message in row["error"] and row["hint"]
    assert value(db, "SELECT count(*) FROM tensile.model_versions WHERE job = %s", job) == 0


@pytest.mark.parametrize(
    ("architecture", "message", "line"),
    [
        (
            {"type": "python", "source": "def build(n, m):\n    return 1 / 0"},
            "build raised ZeroDivisionError: division by zero",
            "return 1 / 0",
        ),
        (
            {"type": "import", "callable": "no_such_module:build"},
            "could not import \"no_such_module:build\": No module named 'no_such_module'",
            "ModuleNotFoundError",
        ),
        (
            {"type": "python", "source": "import torch\ndef build(n, m):\n    return torch.nn.Linear(n, m + 1)"},
            "the model returned [2, 2] for 2 rows",
            "ArchitectureError",
        ),
        ({"type": "cnn"}, "a cnn needs exactly one array feature, the query has 0", "ArchitectureError"),
    ],
    ids=["raises", "not importable", "shape", "no image"],
)
def test_models_that_cannot_be_built(
    db: Connection, job_row: Row, architecture: dict[str, Any], message: str, line: str
) -> None:
    job = submit(db, "m", architecture)
    with pytest.raises(psycopg.Error):
        finish(db, job)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"], row["error"]) == ("failed", "22023", message)
    assert row["hint"] and line in row["traceback"]


def test_a_loss_that_is_not_finite_stops_the_job_at_that_step(db: Connection, job_row: Row) -> None:
    # 320 training rows or so in batches of 64 are 5 or 6 steps an epoch; validation is one pass more
    model = python_model(on_forward="x = x * float('nan') if step >= 20 else x")
    job = submit(db, "m", model, epochs=50, options={"checkpoint_interval": 0})
    with pytest.raises(psycopg.Error, match="the loss became nan at step"):
        finish(db, job)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "22003") and "learning rate" in row["hint"]
    (epochs,) = {value(db, "SELECT max(epoch) FROM tensile.epoch_metrics WHERE job = %s", job)}
    assert epochs >= 2
    meta = value(db, "SELECT meta FROM tensile_internal.checkpoints WHERE job = %s", job)
    assert 1 <= meta["epoch"] <= epochs  # the last valid checkpoint is kept


# ---- ends of jobs ----


def test_early_stopping_keeps_the_best_epoch(db: Connection) -> None:
    noise = "SELECT sin(i * 12.9) AS a, sin(i * 78.2) AS b, sin(i * 37.7) AS y FROM generate_series(1, 200) i"
    options = {"early_stopping": {"patience": 3, "min_delta": 0.0}}
    arguments = {"query": noise, "epochs": 500, "learning_rate": 0.05, "validation": 0.5, "options": options}
    job = submit(db, "m", {"type": "mlp", "hidden": [64]}, **arguments)
    finish(db, job)
    losses = [
        row[0]
        for row in db.execute(
            "SELECT loss FROM tensile.epoch_metrics WHERE job = %s AND split = 'validation' ORDER BY epoch", (job,)
        )
    ]
    best = min(range(len(losses)), key=losses.__getitem__) + 1
    assert len(losses) == best + 3 < 500
    metrics = value(db, "SELECT metrics FROM tensile.model_versions WHERE job = %s", job)
    assert metrics["epoch"] == best and metrics["validation"]["loss"] == pytest.approx(losses[best - 1])


SLOW = {"type": "mlp", "hidden": [64], "dropout": 0.3, "norm": "batch"}
LONG: dict[str, Any] = {"batch_size": 8, "epochs": 25, "seed": 3, "options": {"checkpoint_interval": 0.1}}


def kill(conn: Connection, wait_until: Wait, job: int, after_steps: int) -> None:
    saved = "SELECT count(*) FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL"
    wait_until(lambda: steps(conn, job) > after_steps and value(conn, saved, job), what="steps and a checkpoint")
    pid = trainer_pid(conn, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_killed_job_resumes_to_the_same_bits(tables: Connection, wait_until: Wait, job_row: Row) -> None:
    """Takes seconds: the same job is trained twice, once with two deaths."""
    arguments = LONG | {"query": QUERY.format(target="class"), "target": "class", "policy": "joint"}
    whole = submit(tables, "whole", SLOW, **arguments)
    finish(tables, whole)
    broken = submit(tables, "broken", SLOW, **arguments)
    kill(tables, wait_until, broken, 100)
    wait_until(lambda: job_row(tables, broken)["attempts"] == 2, what="the second attempt")
    kill(tables, wait_until, broken, 500)
    finish(tables, broken)
    row = job_row(tables, broken)
    assert row["attempts"] == 3 and row["warnings"] == job_row(tables, whole)["warnings"]
    assert weights(tables, broken) == weights(tables, whole)
    names = "epoch, split, samples, loss, accuracy, f1"
    metrics = [
        tables.execute(
            f"SELECT {names} FROM tensile.epoch_metrics WHERE job = %s ORDER BY epoch, split", (job,)
        ).fetchall()
        for job in (whole, broken)
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 50


@pytest.mark.long
def test_a_job_with_changed_data_starts_over_and_reports_it(tables: Connection, wait_until: Wait, job_row: Row) -> None:
    arguments = LONG | {"query": QUERY.format(target="class"), "target": "class"}
    job = submit(tables, "m", SLOW, **arguments)
    wait_until(lambda: steps(tables, job) > 100, what="steps")
    tables.execute("DELETE FROM everything WHERE id = 17")
    kill(tables, wait_until, job, 100)
    finish(tables, job)
    warning = "the data changed since the checkpoint of 800 rows was made, so training started over"
    assert warning in job_row(tables, job)["warnings"]
    fresh = submit(tables, "fresh", SLOW, **arguments)
    finish(tables, fresh)
    assert weights(tables, job) == weights(tables, fresh)


@pytest.mark.long
def test_spooled_data_trains_to_the_same_bits_and_leaves_nothing(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    cluster = fresh_cluster({"pg_tensile.dataset_cache": "1GB"})
    with cluster.connect() as conn:
        conn.execute(EVERYTHING.format(rows=60_000))
        arguments: dict[str, Any] = {"query": QUERY.format(target="class"), "target": "class", "batch_size": 500}
        in_memory = submit(conn, "m", SLOW, **arguments)
        finish(conn, in_memory)
        cluster.configure({"pg_tensile.dataset_cache": "1MB"})
        cluster.reload()
        wait_until(lambda: value(conn, "SHOW pg_tensile.dataset_cache") == "1MB")
        spooled = submit(conn, "m", **arguments, epochs=100)
        wait_until(lambda: steps(conn, spooled) > 0)
        pid = trainer_pid(conn, spooled)
        folder = str(cluster.data / "base" / "pgsql_tmp")
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps(pid) if folder in line}
        assert len(mapped) == 2 and all(name.endswith("(deleted)") for name in mapped)
        conn.execute("SELECT cancel_job(%s)", (spooled,))
        assert value(conn, "SELECT wait_for_job(%s, '1 min')", spooled) == "cancelled"
        spooled = submit(conn, "m", **arguments)
        finish(conn, spooled)
        assert weights(conn, spooled) == weights(conn, in_memory)


def maps(pid: int | None) -> Iterator[str]:
    with Path(f"/proc/{pid}/maps").open() as file:
        yield from file
