"""docs/first-steps.sql: it runs, it predicts well, and it uses no name that its output has not shown before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.repository import REPOSITORY
from tests.server.support import Connection, value

SCRIPT = REPOSITORY / "docs" / "first-steps.sql"
MARK = "-- step"
FUNCTIONS = """
    SELECT DISTINCT p.proname FROM pg_proc p
    JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
    JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass
    WHERE e.extname = 'pg_tensile' AND p.pronamespace = e.extnamespace
"""


class Step(NamedTuple):
    """A statement of the script, or a command of psql, and all that it has printed."""

    text: str
    output: str


def statements(script: str) -> list[str]:
    """Return the statements and commands of a psql script without comments."""
    lines = [line for line in script.splitlines() if line.strip() and not line.startswith("--")]
    found, pending = [], ""
    for line in lines:
        pending += line + "\n"
        if line.startswith("\\") or line.endswith((";", "\\gset")):
            found.append(pending)
            pending = ""
    assert not pending
    return found


def run(cluster: Any, script: Path) -> list[Step]:
    """Run the script with psql; marks in both streams tell which statement has printed what."""
    texts = statements(script.read_text())
    marked = "".join(f"\\echo {MARK}\n\\warn {MARK}\n{text}" for text in texts)
    command = [str(cluster.bin / "psql"), "-X", cluster.dsn()]
    done = subprocess.run(command, input=marked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    streams = [stream.split(f"{MARK}\n")[1:] for stream in (done.stdout, done.stderr)]
    return [Step(text, out + err) for text, out, err in zip(texts, *streams, strict=True)]


@pytest.fixture(scope="module")
def steps(module_cluster: Any) -> list[Step]:
    with module_cluster.connect() as conn:
        conn.execute("DROP EXTENSION IF EXISTS pg_tensile, plpython3u CASCADE")
    return run(module_cluster, SCRIPT)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.long
def test_no_name_is_used_before_the_output_has_shown_it(steps: list[Step], module_cluster: Any) -> None:
    """Three models are trained, one of them on 40,000 rows."""
    with module_cluster.connect() as conn:
        functions = {name for (name,) in conn.execute(FUNCTIONS).fetchall()}
    assert {"train_model", "predict"} < functions
    shown, used = "", set()
    for step in steps:
        for name in words(step.text) & functions:
            assert name in words(shown), f"{name} in: {step.text}"
            used.add(name)
        for relation in re.findall(r"tensile\.\w+", step.text):
            assert relation in shown or re.search(rf"\btensile \| {relation[8:]} ", shown), (
                f"{relation} in: {step.text}"
            )
        if "tensile." in step.text:
            assert "tensile" in words(shown)
        shown += step.output
    assert used == {"train_model", "wait_for_job", "predict", "predict_class", "predict_rows", "explain_training"}


@pytest.mark.long
def test_each_training_says_how_to_go_on(steps: list[Step]) -> None:
    """The script is run once for all tests of this file."""
    endings = [step.output for step in steps if "wait_for_job" in step.text]
    for model, function, ending in zip(
        ("survival", "duration", "broken"), ("predict_class", "predict", "predict_class"), endings, strict=True
    ):
        assert f"SELECT t.*, {function}('{model}', t) FROM my_table t." in ending
        assert "WARNING" not in ending
    assert 'has the architecture ensemble: "hours" is the only array, and is taken as numbers' in endings[2]


@pytest.mark.long
@pytest.mark.usefixtures("steps")
def test_the_predictions_are_good(module_cluster: Any) -> None:
    """The script is run once for all tests of this file."""
    with module_cluster.connect() as conn:
        assert share(conn, "survived = predict_class('survival', t)", "passengers") > 0.75
        assert share(conn, "broken = (predict('broken', t) > 0.5)", "sensors") > 0.95
        error = "SELECT avg(abs(minutes - predict('duration', t))) FROM (SELECT * FROM trips LIMIT 1000) t"
        assert value(conn, error) < 3


def share(conn: Connection, condition: str, table: str) -> float:
    return float(value(conn, f"SELECT avg(({condition})::int) FROM {table} t"))
