"""Registering, deploying and dropping models and versions."""

from __future__ import annotations

from functools import partial

import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refused
from tests.server.support import SMALL_MLP, Connection, train_late

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("architecture", "message", "hint"),
    [
        ([], "architecture must be a JSON object", "mlp"),
        ({}, 'key "type" is missing', '"transformer"'),
        ({"type": 3}, 'key "type"', '"mlp"'),
        ({"type": "mpl"}, 'unknown architecture type "mpl"', 'Did you mean "mlp"?'),
        ({"type": "recurrent"}, 'unknown architecture type "recurrent"', '"transformer"'),
        ({"type": "mlp", "hiden": [3]}, 'unknown key "hiden" in the architecture "mlp"', 'Did you mean "hidden"?'),
        ({"type": "mlp", "quux": 1}, 'unknown key "quux"', '"dropout"'),
        ({"type": "mlp", "hidden": 3}, 'key "hidden" in the architecture "mlp": 3', "array"),
        ({"type": "mlp", "hidden": [3, 0]}, 'key "hidden[1]" in the architecture "mlp": 0', "from 1 to 65536"),
        ({"type": "mlp", "hidden": [3, "4"]}, 'key "hidden[1]"', "integer"),
        ({"type": "mlp", "hidden": [1] * 65}, 'key "hidden"', "64"),
        ({"type": "mlp", "dropout": 1}, 'key "dropout" in the architecture "mlp": 1', "less than 1"),
        ({"type": "mlp", "dropout": True}, 'key "dropout"', "number"),
        ({"type": "mlp", "activation": "ReLU"}, 'key "activation"', '"relu"'),
        ({"type": "mlp", "embedding": None}, 'key "embedding"', "integer"),
        ({"type": "mlp", "embedding": 10**400}, 'key "embedding"', "1024"),
        ({"type": "cnn", "channels": []}, 'key "channels"', "1 to 16"),
        ({"type": "cnn", "kernel": 4}, 'key "kernel"', "odd"),
        ({"type": "cnn", "shape": [8]}, 'key "shape"', "2 to 3"),
        ({"type": "transformer", "dim": 30, "heads": 4}, '"dim"', "28"),
        ({"type": "transformer", "heads": 3}, '"dim"', "63"),
        ({"type": "import"}, 'key "callable" is missing', "package.module:function"),
        ({"type": "import", "callable": "os.system"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a.b:c:d"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a..b:c"}, 'key "callable"', "package.module:function"),
        ({"type": "import", "callable": "a.b:c", "kwargs": [1]}, 'key "kwargs"', "object"),
        ({"type": "python"}, 'key "source" is missing', "text"),
        ({"type": "python", "source": ""}, 'key "source"', "not empty"),
    ],
)
def test_bad_architecture(db: Connection, architecture: object, message: str, hint: str) -> None:
    refused("22023", message, hint, lambda: db.execute("SELECT register_model('m', %s)", (Jsonb(architecture),)))
    assert db.execute("SELECT count(*) FROM tensile.models").fetchone() == (0,)


@pytest.mark.parametrize(
    "architecture",
    [
        {"type": "mlp"},
        {"type": "mlp", "hidden": [], "dropout": 0.5, "activation": "gelu", "norm": "layer", "embedding": 8},
        {"type": "cnn", "channels": [8, 16], "kernel": 5, "shape": [1, 8, 8], "hidden": [32]},
        {
            "type": "transformer",
            "dim": 32,
            "heads": 8,
            "layers": 1,
            "length": 128,
            "vocabulary": 1000,
            "feedforward": 64,
        },
        {"type": "import", "callable": "my_models.tabular:build", "kwargs": {"depth": {"anything": [1]}}},
        {"type": "python", "source": "def build(n_inputs, n_outputs): ..."},
    ],
)
def test_good_architecture(db: Connection, architecture: object) -> None:
    row = db.execute("SELECT register_model('m', %s, 'about it')", (Jsonb(architecture),)).fetchone()
    assert row is not None
    assert db.execute("SELECT model_id, architecture, description FROM tensile.models").fetchone() == (
        *row,
        architecture,
        "about it",
    )


def test_names_of_models(db: Connection) -> None:
    for name in ("", "x" * 201, "two\nlines"):
        refused(
            "22023",
            "invalid model name",
            "200",
            partial(db.execute, "SELECT register_model(%s, %s)", (name, SMALL_MLP)),
        )
    refused("22004", '"name"', "", lambda: db.execute("SELECT register_model(NULL, %s)", (SMALL_MLP,)))
    db.execute("SELECT register_model('späte Flüge \"2\"', %s)", (SMALL_MLP,))


def test_registering_again(flights: Connection) -> None:
    refused(
        *("42710", 'model "late" already exists', "replace => true"),
        lambda: flights.execute("SELECT register_model('late', %s)", (SMALL_MLP,)),
    )
    first = flights.execute("SELECT model_id FROM tensile.models").fetchone()
    wide = {"type": "mlp", "hidden": [64]}
    again = flights.execute("SELECT register_model('late', %s, replace => true)", (Jsonb(wide),)).fetchone()
    assert again == first
    assert flights.execute("SELECT architecture FROM tensile.models").fetchall() == [(wide,)]
    with flights.transaction(force_rollback=True):
        train_late(flights)
        with flights.transaction(force_rollback=True):
            refused(
                *("55006", "is being trained", "cancel_job"),
                lambda: flights.execute("SELECT register_model('late', %s, replace => true)", (SMALL_MLP,)),
            )


def test_dropping(flights: Connection) -> None:
    refused(
        "42704", 'model "lat" does not exist', "tensile.models", lambda: flights.execute("SELECT drop_model('lat')")
    )
    with flights.transaction(force_rollback=True):
        job = train_late(flights)
        flights.execute("SELECT drop_model('late')")
        row = flights.execute(
            "SELECT state, model_id, model, sqlstate, error, hint IS NULL FROM tensile.jobs WHERE job = %s", (job,)
        )
        assert row.fetchone() == ("failed", None, "late", "42704", 'model "late" was dropped', False)
    flights.execute("SELECT drop_model('late')")
    assert flights.execute("SELECT count(*) FROM tensile.models").fetchone() == (0,)


def test_deploying_a_version_that_is_not_there(flights: Connection) -> None:
    refused(
        *("42704", 'model "late" has no version 1', "train_model"),
        lambda: flights.execute("SELECT deploy_model('late', 1)"),
    )
    flights.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
        " weight_bytes) SELECT id, v, 'regression', '{}', architecture, nullif(v, 3)"
        " FROM tensile_internal.models, generate_series(1, 3) v"
    )
    refused(
        *("42704", 'model "late" has no version 3', "It has: 1, 2."),
        lambda: flights.execute("SELECT deploy_model('late', 3)"),
    )
    flights.execute("SELECT deploy_model('late', 2)")
    assert flights.execute("SELECT deployed_version FROM tensile.models").fetchone() == (2,)


def test_dropping_a_version(flights: Connection) -> None:
    """Version 3 is unfinished, version 2 deployed."""
    flights.execute(
        "INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture,"
        " weight_bytes) SELECT id, v, 'regression', '{}', architecture, nullif(v, 3)"
        " FROM tensile_internal.models, generate_series(1, 3) v"
    )
    flights.execute("INSERT INTO tensile_internal.model_weights SELECT id, 0, '' FROM tensile_internal.model_versions")
    flights.execute("SELECT deploy_model('late', 2)")
    for version, named in ((3, "3"), (0, "0"), (None, "null")):
        refused(
            *("42704", f'model "late" has no version {named}', "It has: 1, 2."),
            lambda: flights.execute("SELECT drop_model_version('late', %s)", (version,)),  # noqa: B023
        )
    refused(
        *("55006", 'cannot drop version 2 of model "late" because it is deployed', "deploy_model"),
        lambda: flights.execute("SELECT drop_model_version('late', 2)"),
    )
    flights.execute("SELECT drop_model_version('late', 1)")
    left = flights.execute("SELECT version FROM tensile.model_versions ORDER BY version").fetchall()
    assert left == [(2,), (3,)]
    assert flights.execute("SELECT count(*) FROM tensile_internal.model_weights").fetchone() == (2,)


def test_retention_of_a_model(flights: Connection) -> None:
    keep = "SELECT keep_versions FROM tensile.models"
    assert flights.execute(keep).fetchone() == (None,)
    for versions in (5, 1, 0, None):
        flights.execute("SELECT set_model_retention('late', %s)", (versions,))
        assert flights.execute(keep).fetchone() == (versions,)
    refused(
        *("22023", "keep_versions is out of range: -1", "pg_tensile.version_retention"),
        lambda: flights.execute("SELECT set_model_retention('late', -1)"),
    )
