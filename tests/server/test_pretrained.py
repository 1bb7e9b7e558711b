"""Pretrained transformers from SQL: training, predictions, embeddings, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.types.json import Jsonb

from pg_tensile.execution.data.preprocessing import Preprocessing
from tests.conftest import sweep
from tests.pretrained import minilm, save_bert, save_gpt2
from tests.server.shared import SharedServer, configure, lent, unload
from tests.server.support import Connection, Wait, finish, register, submit, value

BERT = {"type": "pretrained", "path": "bert"}
QUERY = "SELECT body, shop, stars, liked FROM reviews"
SENTENCES = ["A man is eating food.", "", "Ein Satz über 東京 🙂", "word " * 300, "The new movie is so great!"]


@pytest.fixture(scope="module")
def served(cluster: Any, clusters_folder: Path, wait_until: Wait) -> Iterator[SharedServer]:
    """The worker's cluster with pg_tensile.model_path: there are bert, gpt2, minilm and a link that leads outside."""
    models = clusters_folder / "models"
    save_bert(models / "bert")
    save_gpt2(models / "gpt2")
    shutil.copytree(minilm(), models / "minilm")
    shutil.copytree(models / "bert", clusters_folder / "outside")
    (models / "link").symlink_to(clusters_folder / "outside")
    for path in (models, *models.rglob("*"), clusters_folder / "outside"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    settings = {"pg_tensile.model_path": models, "pg_tensile.max_retries": 0}
    with lent(cluster, "pretrained", settings, wait_until) as server:
        with server.connect() as conn:
            unload(conn, wait_until)  # the predictor learns of the setting when it starts
            conn.execute("""
                CREATE TABLE reviews AS
                SELECT i AS id, CASE WHEN i % 19 <> 7 THEN
                           concat_ws(' ', 'it was a', (ARRAY['day', 'film'])[1 + i % 2],
                                     CASE WHEN i % 3 = 0 THEN (ARRAY['good', 'fine', 'nice'])[1 + i % 7 % 3]
                                          ELSE (ARRAY['bad', 'poor', 'awful'])[1 + i % 5 % 3] END) END AS body,
                       'shop ' || i % 4 AS shop, sin(i) AS stars, i % 3 = 0 AS liked
                FROM generate_series(1, 240) i
            """)
        yield server


@pytest.fixture
def conn(served: Any) -> Iterator[Connection]:
    with served.connect() as conn:
        yield conn
        sweep(conn)


def accuracy(conn: Connection) -> float:
    """Return the share of rows that model m predicts right; of some, predict_class and predict say the same."""
    rows = conn.execute(
        "SELECT q.id, r.label, q.liked, r.prediction"
        " FROM (SELECT row_number() OVER (ORDER BY id) AS n, * FROM reviews) q"
        " JOIN predict_rows('m', 'SELECT body, shop, stars FROM reviews ORDER BY id') r ON r.row_number = q.n"
    ).fetchall()
    single = {
        number: (label, probability)
        for number, label, probability in conn.execute(
            "SELECT id, predict_class('m', q), predict('m', q) FROM reviews q WHERE id <= 40"
        ).fetchall()
    }
    for number, label, _, prediction in rows:
        assert number not in single or single[number] == (label, pytest.approx(prediction, abs=1e-5))
    return float(np.mean([label == str(liked).lower() for _, label, liked, _ in rows]))


@pytest.mark.long
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_small_model_learns_under_a_plan_and_predicts(conn: Connection, tune: str) -> None:
    """A transformer is captured and planned, once with all its weights."""
    architecture = BERT | {"tune": tune, "text": ["body"], "lora_rank": 4}
    arguments = {"epochs": 6, "batch_size": 16, "learning_rate": 1e-2, "memory_budget": "900kB", "validation": 0.0}
    arguments["policy"] = "joint"
    job = submit(conn, "m", architecture, query=QUERY, target="liked", **arguments)
    finish(conn, job)
    assert accuracy(conn) > 0.9
    stored, parameters = conn.execute(
        "SELECT v.weight_bytes, (v.preprocessing->'text'->>'weight_bytes')::int FROM tensile.model_versions v"
    ).fetchone() or (0, 0)
    assert (stored < 20_000 < parameters) if tune == "lora" else (stored > 40_000 and parameters == 0)
    assert value(conn, "SELECT count(*) FROM tensile.plans WHERE job = %s", job) == 1
    budgeted = value(conn, "SELECT predict('m', r, '2MB') FROM reviews r WHERE id = 5")
    assert abs(budgeted - value(conn, "SELECT predict('m', r) FROM reviews r WHERE id = 5")) < 1e-5
    contents = value(conn, "SELECT export_model('m')")
    assert len(contents) < 40_000 or tune == "full"  # the folder's weights are not in the file
    assert value(conn, "SELECT import_model(%b, 'copy')", contents) == 1
    rows = "SELECT prediction FROM predict_rows(%s, 'TABLE reviews') ORDER BY row_number"
    assert conn.execute(rows, ("copy",)).fetchall() == conn.execute(rows, ("m",)).fetchall()
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="read by a tokenizer"):
        value(conn, "SELECT export_model('m', format => 'onnx')")


@pytest.mark.long
def test_a_decoder_learns_without_a_plan_from_all_text_columns(conn: Connection) -> None:
    architecture = BERT | {"path": "gpt2", "tune": "full"}
    arguments = {"epochs": 8, "batch_size": 16, "learning_rate": 1e-2, "policy": "none"}
    finish(conn, submit(conn, "m", architecture, query=QUERY, target="liked", **arguments))
    assert accuracy(conn) > 0.9
    preprocessing, sizes = conn.execute(
        "SELECT preprocessing, tensile_internal._model_inputs(preprocessing) FROM tensile.model_versions"
    ).fetchone() or ({}, {})
    inputs = Preprocessing.from_json({key: part for key, part in preprocessing.items() if key != "rows"}).model_inputs
    calibrated = (sizes["numeric"], tuple(sizes["cardinalities"]), tuple(map(tuple, sizes["arrays"])))
    assert calibrated == inputs[:3] and inputs.numeric == 2 and len(inputs.arrays) == 2
    long, short = ("it was a film nice " * 20_000, "it was a film nice " * 20)
    predict = "SELECT predict('m', jsonb_build_object('body', %s::text, 'shop', NULL, 'stars', 0))"
    assert value(conn, predict, long) == pytest.approx(value(conn, predict, short))


@pytest.mark.long
def test_a_trained_model_is_evaluated_and_explained(conn: Connection) -> None:
    """The words of `body` decide, so all says so: the metrics, the importance, the attributions of a row.

    Long: transformers are loaded in three processes."""
    architecture = BERT | {"tune": "full", "text": ["body"]}
    arguments = {"epochs": 6, "batch_size": 16, "learning_rate": 1e-2}
    finish(conn, submit(conn, "m", architecture, query=QUERY, target="liked", **arguments))
    metrics: dict[str, float] = dict(
        conn.execute("SELECT metric, value FROM evaluate_model('m', %s) WHERE metric ~ '^[a-z_0-9]+$'", (QUERY,))
    )
    assert metrics["accuracy"] == pytest.approx(accuracy(conn)) and metrics["roc_auc"] > 0.95
    assert metrics["log_loss"] < 0.3
    importance: dict[str, float] = dict(
        conn.execute("SELECT feature, importance FROM feature_importance('m', %s)", (QUERY,))
    )
    assert set(importance) == {"body", "shop", "stars"}
    assert importance["body"] > 5 * max(abs(importance["shop"]), abs(importance["stars"]), 0.02)
    for number in (1, 5, 7, 9):  # of the seventh, the text is null
        row = f"SELECT body, shop, stars FROM reviews WHERE id = {number}"
        parts: dict[str | None, float] = dict(
            conn.execute(f"SELECT x.feature, x.attribution FROM ({row}) r, explain_prediction('m', r) x")
        )
        prediction = value(conn, f"SELECT predict('m', r) FROM ({row}) r")
        assert sum(parts.values()) == pytest.approx(prediction, abs=1e-5)
        if number != 7:
            assert abs(parts["body"]) == max(abs(part) for name, part in parts.items() if name is not None)


@pytest.mark.long
def test_minilm_learns_with_its_head_only(conn: Connection) -> None:
    """Captures and trains a model of 22 million parameters, which takes a quarter of a minute."""
    architecture = {"type": "pretrained", "path": "minilm", "tune": "head", "text": ["body"], "length": 16}
    arguments = {"epochs": 6, "batch_size": 16, "learning_rate": 1e-2, "validation": 0.0, "policy": "joint"}
    finish(conn, submit(conn, "m", architecture, query=QUERY, target="liked", **arguments))
    assert accuracy(conn) > 0.8
    assert value(conn, "SELECT weight_bytes < 10000 FROM tensile.model_versions")


@pytest.mark.long
def test_training_is_explained(conn: Connection) -> None:
    register(conn, "m", BERT | {"text": ["body"]})
    lines = conn.execute("SELECT * FROM explain_training('m', %s, 'liked', batch_size => 16)", (QUERY,)).fetchall()
    assert any("pretrained" in line for (line,) in lines)


# ---- embeddings ----


def test_embeddings_are_those_of_sentence_transformers(conn: Connection) -> None:
    from sentence_transformers import SentenceTransformer  # takes seconds, in each worker

    register(conn, "m", {"type": "pretrained", "path": "minilm", "length": 256})
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(SENTENCES)
    single = [value(conn, "SELECT embed('m', %s)", text) for text in SENTENCES]
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-5)
    conn.execute("CREATE TEMP TABLE docs AS SELECT n, t FROM unnest(%s::text[]) WITH ORDINALITY u (t, n)", (SENTENCES,))
    rows = conn.execute("SELECT * FROM embed_rows('m', 'SELECT t FROM docs ORDER BY n')").fetchall()
    assert [number for number, _ in rows] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([vector for _, vector in rows], expected, rtol=0, atol=1e-5)


def test_many_texts_and_nulls_are_embedded_in_order(conn: Connection) -> None:
    register(conn, "m", BERT)
    rows = conn.execute("""
        SELECT r.body, e.embedding, embed('m', r.body)
        FROM (SELECT row_number() OVER (ORDER BY id) AS n, body FROM reviews) r
             JOIN embed_rows('m', 'SELECT body FROM reviews ORDER BY id') e ON e.row_number = r.n
    """).fetchall()
    assert len(rows) == 240 and sum(body is None for body, _, _ in rows) > 5
    for body, of_rows, single in rows:
        if body is None:
            assert of_rows is None and single is None
        else:
            np.testing.assert_allclose(of_rows, single, rtol=0, atol=1e-6)
            assert abs(float(np.linalg.norm(single)) - 1) < 1e-5
    assert conn.execute("SELECT * FROM embed_rows('m', 'SELECT ''x''::text WHERE false')").fetchall() == []
    assert value(conn, "SELECT count(*) FROM embed_rows('m', 'SELECT NULL::name FROM generate_series(1, 100)')") == 100
    assert value(conn, "SELECT embed(NULL, 'x') IS NULL AND embed('m', NULL) IS NULL")
    long = "it was a film nice " * 300_000
    assert value(conn, "SELECT embed('m', %s)", long) == value(conn, "SELECT embed('m', %s)", long[:100_000])


@pytest.mark.long
def test_the_deployed_version_embeds_once_there_is_one(conn: Connection) -> None:
    register(conn, "m", BERT | {"tune": "full", "text": ["body"]})
    before = value(conn, "SELECT embed('m', 'it was good')")
    finish(conn, submit(conn, "m", query=QUERY, target="liked", batch_size=16, learning_rate=1e-2))
    after = value(conn, "SELECT embed('m', 'it was good')")
    assert len(before) == len(after) == 32 and not np.allclose(before, after)


def test_a_model_that_is_replaced_embeds_as_its_new_architecture(conn: Connection, wait_until: Wait) -> None:
    register(conn, "m", BERT)
    bert = value(conn, "SELECT embed('m', 'it was good')")
    shown = "SELECT version IS NULL AND device_bytes > 40000 FROM tensile.loaded_models WHERE model = 'm'"
    wait_until(lambda: value(conn, shown), what="the predictor reports the model")
    replace = "SELECT register_model('m', %s, replace => true)"
    with conn.transaction():
        conn.execute(replace, (Jsonb(BERT | {"path": "gpt2"}),))
        error = psycopg.errors.ObjectNotInPrerequisiteState
        with pytest.raises(error, match="an open transaction"), conn.transaction():
            conn.execute("SELECT embed('m', 'it was good')")
    gpt2 = value(conn, "SELECT embed('m', 'it was good')")
    assert not np.allclose(bert, gpt2)
    conn.execute(replace, (Jsonb(BERT),))
    assert value(conn, "SELECT embed('m', 'it was good')") == bert


def test_what_cannot_be_embedded_is_an_error(conn: Connection) -> None:
    register(conn, "m", BERT)
    register(conn, "mlp")
    for sql, state in (
        ("SELECT embed('mlp', 'x')", "42809"),
        ("SELECT embed('absent', 'x')", "42704"),
        ("SELECT * FROM embed_rows('m', 'SELECT 1')", "42804"),
        ("SELECT * FROM embed_rows('m', 'SELECT ''a'', ''b''')", "42804"),
        ("SELECT * FROM embed_rows('m', 'DELETE FROM reviews')", "42601"),
        ("SELECT predict('m', '{}'::jsonb)", "55000"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(sql)
        assert caught.value.sqlstate == state, (sql, caught.value)
        assert caught.value.diag.message_hint
    assert value(conn, "SELECT embed('m', 'x') IS NOT NULL")


def test_only_roles_that_may_predict_may_embed(served: Any, conn: Connection) -> None:
    conn.execute("CREATE ROLE reader LOGIN IN ROLE tensile_user")
    register(conn, "m", BERT)
    with served.connect(user="reader") as reader:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            reader.execute("SELECT embed('m', 'x')")
        conn.execute("SELECT grant_model('m', 'reader')")
        assert len(value(reader, "SELECT embed('m', 'x')")) == 32
        register(reader, "own", BERT)  # runs no code of the role
        assert len(value(reader, "SELECT embed('own', 'x')")) == 32
        reader.execute("SELECT drop_model('own')")
    conn.execute("DROP OWNED BY reader; DROP ROLE reader")


# ---- refusals ----


@pytest.mark.long
@pytest.mark.parametrize("path", ["absent", "link"])
def test_a_folder_that_is_not_in_the_model_path_is_refused(conn: Connection, path: str) -> None:
    job = submit(conn, "m", BERT | {"path": path}, query=QUERY, target="liked")
    for refused in (lambda: finish(conn, job), lambda: conn.execute("SELECT embed('m', 'x')")):
        with pytest.raises(psycopg.Error, match=f'there is no folder "{path}" in pg_tensile.model_path') as caught:
            refused()
        assert caught.value.sqlstate == "22023"


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../b", ".hidden", "a//b", ""])
def test_a_path_that_leads_elsewhere_is_refused_at_registration(conn: Connection, path: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='key "path"'):
        register(conn, "m", BERT | {"path": path})


@pytest.mark.long
def test_a_folder_that_changed_or_went_is_an_error_of_the_prediction(served: Any, conn: Connection) -> None:
    models = Path(value(conn, "SHOW pg_tensile.model_path"))
    shutil.copytree(models / "bert", models / "copy")
    finish(conn, submit(conn, "m", BERT | {"path": "copy"}, query=QUERY, target="liked", batch_size=16))
    predict = "SELECT predict('m', r) FROM reviews r LIMIT 1"
    save_gpt2(models / "copy")
    for change, message in (
        (
            lambda: (models / "copy" / "model.safetensors").chmod(0o600),
            'model.safetensors of the folder "copy" cannot be',
        ),
        (
            lambda: (models / "copy" / "model.safetensors").chmod(0o644),
            'the folder "copy" has changed since the model was trained',
        ),
        (lambda: shutil.rmtree(models / "copy"), 'there is no folder "copy"'),
    ):
        change()
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
            conn.execute(predict)


def test_the_setting_belongs_to_the_configuration_file(served: Any, conn: Connection) -> None:
    with pytest.raises(psycopg.errors.CantChangeRuntimeParam):
        conn.execute("SET pg_tensile.model_path = '/etc'")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        conn.execute("ALTER SYSTEM SET pg_tensile.model_path = 'relative'")


def test_without_the_setting_there_are_no_pretrained_models(served: Any, conn: Connection, wait_until: Wait) -> None:
    path = value(conn, "SHOW pg_tensile.model_path")
    configure(served.cluster, conn, {"pg_tensile.model_path": ""}, wait_until)
    try:
        job = submit(conn, "m", BERT, query=QUERY, target="liked")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"pg_tensile\.model_path is not set"):
            finish(conn, job)
    finally:
        configure(served.cluster, conn, {"pg_tensile.model_path": path}, wait_until)
