"""Several jobs on one device in the database: together against one after another, in the same run.

Two, three and four jobs train at once, of one network and of several (ResNet-20, SE-ResNet-20 and a small convolutional
network on images of 32 × 32), first on a device with room for all of them, then on one with so little memory that they
do not fit together without plans: `TIGHT` of the sum of what their tensors take alone, and what each process takes
besides (nothing on the CPU). Reported are the time of all jobs together as a ratio of the same jobs one after another
on the device with room, medians of several rounds; the largest values of the ledger and of the trainers' own records,
from continual samples of tensile.devices; and whether every job made the same weights, to the bit, as it did alone. The
section `sharing` measures jobs on an accelerator.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psycopg

from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.sampling import sampled
from benchmarks.tables import table
from scripts.cluster import Cluster

TIGHT = 0.6
MOST = 1.10  # times the same jobs one after another
SAMPLE_S = 0.02
SOURCE = """
def build(n_inputs, n_outputs):
    import torch
    from pytorchcv.models.{module} import {name}

    class Images(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = {name}(num_classes=n_outputs)

        def forward(self, x):
            return self.network(x.view(-1, 3, 32, 32))

    return Images()
"""
NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet-20": {"type": "python", "source": SOURCE.format(module="resnet_cifar", name="resnet20_cifar10")},
    "SE-ResNet-20": {"type": "python", "source": SOURCE.format(module="seresnet_cifar", name="seresnet20_cifar10")},
    "CNN": {"type": "cnn", "channels": [32, 64], "shape": [3, 32, 32]},
    "MLP": {"type": "mlp", "hidden": [256, 256, 256]},
    "ResNet-110": {"type": "python", "source": SOURCE.format(module="resnet_cifar", name="resnet110_cifar10")},
    "SE-ResNet-110": {"type": "python", "source": SOURCE.format(module="seresnet_cifar", name="seresnet110_cifar10")},
}
MIXES = {
    "2 alike": ("ResNet-20", "ResNet-20"),
    "2 mixed": ("ResNet-20", "SE-ResNet-20"),
    "3 mixed": ("ResNet-20", "SE-ResNet-20", "CNN"),
    "4 mixed": ("ResNet-20", "SE-ResNet-20", "CNN", "ResNet-20"),
}

Connection = psycopg.Connection[Any]


class Work(NamedTuple):
    """Rows, epochs and batch size of each job, how often all are measured, and whether each epoch has a checkpoint."""

    rows: int
    epochs: int
    batch_size: int
    rounds: int
    checkpoints: bool = False

    @property
    def images(self) -> str:
        """SQL that makes the table of images."""
        return f"""
            CREATE TABLE images AS
            SELECT r AS id, r % 10 AS label,
                (SELECT array_agg(sin(r * 0.37 + i * 0.011 * (1 + r % 10))::float4)
                 FROM generate_series(1, 3 * 32 * 32) i) AS image
            FROM generate_series(1, {self.rows}) r
            """

    def arguments(self, seed: int) -> str:
        """SQL of the arguments of train_model after the model."""
        options = {"task": "classification", "keep": "last"} | ({"checkpoint_interval": 0} if self.checkpoints else {})
        return (
            f"'SELECT label, image FROM images', 'label', epochs => {self.epochs}, batch_size => {self.batch_size},"
            f" seed => {seed}, validation => 0, options => '{json.dumps(options)}'"
        )


WORK = Work(rows=320, epochs=4, batch_size=32, rounds=3)


class Outcome(NamedTuple):
    """Results of the same jobs, run together or one after another."""

    seconds: float
    weights: tuple[str, ...]  # digests, one for each job
    granted_bytes: int  # the largest sample
    in_use_bytes: int
    budget_bytes: int


class Size(NamedTuple):
    """Bytes of a job without a plan: of its tensors, and of its process besides."""

    vanilla: int
    overhead: int


class Watch:
    """The largest values of the device's ledger over all samples; the jobs of a run use one device."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.granted = self.in_use = self.budget = 0

    def look(self) -> None:
        sql = "SELECT granted_bytes, in_use_bytes, budget_bytes FROM tensile.devices WHERE jobs > 0"
        for granted, in_use, budget in self._conn.execute(sql).fetchall():
            self.granted, self.in_use = max(self.granted, granted), max(self.in_use, in_use)
            self.budget = budget


def submit(conn: Connection, work: Work, model: str, seed: int) -> int:
    row = conn.execute(f"SELECT train_model('{model}', {work.arguments(seed)})").fetchone()
    assert row is not None
    return int(row[0])


def digest(conn: Connection, job: int) -> str:
    row = conn.execute("SELECT wait_for_job(%s, '30 min')", (job,)).fetchone()
    row = conn.execute(
        "SELECT encode(sha256(string_agg(w.data, '' ORDER BY seq)), 'hex') FROM tensile_internal.model_weights w"
        " JOIN tensile.model_versions v ON v.version_id = w.version WHERE v.job = %s",
        (job,),
    ).fetchone()
    assert row is not None
    return str(row[0])


def wait_until_left(conn: Connection) -> None:
    """Wait until no job is in the ledger: they leave it a little after their end."""
    while conn.execute("SELECT 1 FROM tensile.devices WHERE jobs > 0").fetchone():
        time.sleep(0.01)


def train(cluster: Cluster, conn: Connection, work: Work, models: Sequence[str], together: bool) -> Outcome:
    wait_until_left(conn)
    with cluster.connect() as observer:
        watch, started = Watch(observer), time.perf_counter()
        with sampled(watch.look, SAMPLE_S):
            if together:
                jobs = [submit(conn, work, model, seed) for seed, model in enumerate(models)]
                weights = [digest(conn, job) for job in jobs]
            else:
                weights = [digest(conn, submit(conn, work, model, seed)) for seed, model in enumerate(models)]
        seconds = time.perf_counter() - started
    return Outcome(seconds, tuple(weights), watch.granted, watch.in_use, watch.budget)


def size(conn: Connection, work: Work, model: str) -> Size:
    options = """'{"task": "classification", "format": "json"}'"""
    sql = (
        f"SELECT explain_training('{model}', {work.arguments(0)})".rpartition(" options => ")[0]
        + f" options => {options})"
    )
    row = conn.execute(sql).fetchone()
    assert row is not None
    explained = json.loads(row[0])
    return Size(int(explained["memory"]["vanilla_bytes"]), int(explained["overhead_bytes"]))


def set_memory(cluster: Cluster, conn: Connection, megabytes: int) -> None:
    conn.execute(f"ALTER SYSTEM SET pg_tensile.device_memory = '{megabytes}MB'")
    cluster.reload()
    while conn.execute("SHOW pg_tensile.device_memory").fetchone() == ("0",) and megabytes:
        time.sleep(0.01)


def compare(cluster: Cluster, work: Work, title: str, networks: Sequence[str]) -> dict[str, Any]:
    """Measure one mix of jobs in several rounds: one after another, together, and together on a small device."""
    models = [f"{name} {number}" for number, name in enumerate(networks)]
    with cluster.connect() as conn:
        for model, name in zip(models, networks, strict=True):
            conn.execute("SELECT register_model(%s, %s, replace => true)", (model, json.dumps(NETWORKS[name])))
        sizes = [size(conn, work, model) for model in models]
        alone = sum(size.vanilla for size in sizes)
        tight = int(TIGHT * alone + sum(size.overhead for size in sizes)) >> 20
        rounds = []
        for _ in range(work.rounds):
            set_memory(cluster, conn, 0)
            outcomes = {"after another": train(cluster, conn, work, models, False)}
            outcomes["together"] = train(cluster, conn, work, models, True)
            set_memory(cluster, conn, tight)
            outcomes["tight"] = train(cluster, conn, work, models, True)
            rounds.append(outcomes)
    return summary(title, alone, rounds)


def summary(title: str, alone: int, rounds: Sequence[dict[str, Outcome]]) -> dict[str, Any]:
    def ratio(kind: str) -> float:
        ratios = [outcomes[kind].seconds / outcomes["after another"].seconds for outcomes in rounds]
        return round(statistics.median(ratios), 3)

    reference = rounds[0]["after another"].weights
    tight = [outcomes["tight"] for outcomes in rounds]
    alone_s = [outcomes["after another"].seconds for outcomes in rounds]
    return {
        "jobs": title,
        "seconds_one_after_another": round(statistics.median(alone_s), 1),
        "together": ratio("together"),
        "tight": ratio("tight"),
        "vanilla_bytes": alone,
        "budget_bytes": tight[0].budget_bytes,
        "most_granted_bytes": max(outcome.granted_bytes for outcome in tight),
        "most_in_use_bytes": max(outcome.in_use_bytes for outcome in tight),
        "bit_identical": all(outcome.weights == reference for outcomes in rounds for outcome in outcomes.values()),
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all mixes; `quick`: in one round."""
    work = WORK._replace(rounds=1) if run.quick else WORK
    with fresh_cluster() as cluster:
        with cluster.connect() as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            conn.execute(work.images)
        for title in run.scenarios(MIXES):
            yield compare(cluster, work, title, MIXES[title])


def checks(results: Results) -> list[Check]:
    checked = []
    for row in results.rows():
        what = f"{row['jobs']} together, over one after another"
        checked.append(Check("jobs", what, f"{row['together']:.2f}", f"≤ {MOST:.2f}", row["together"] <= MOST))
        granted, budget, same = row["most_granted_bytes"], row["budget_bytes"], row["bit_identical"]
        checked.append(Check("jobs", f"{row['jobs']}: granted", f"{granted:,}", f"≤ {budget:,}", granted <= budget))
        checked.append(Check("jobs", f"{row['jobs']}: weights", str(same), "those of the jobs alone", same))
    return checked


def tables(results: Results) -> list[str]:
    headings = (
        *("jobs at once", "s, one after another", "both fit", f"within {TIGHT:.0%}"),
        *("budget, MiB", "most granted, MiB", "most in use, MiB"),
    )
    shown = []
    for row in results.rows():
        sizes = (f"{row[name] / 2**20:.1f}" for name in ("budget_bytes", "most_granted_bytes", "most_in_use_bytes"))
        alone_s = f"{row['seconds_one_after_another']:.1f}"
        shown.append((row["jobs"], alone_s, f"{row['together']:.2f}", f"{row['tight']:.2f}", *sizes))
    return table(headings, shown)


BENCHMARK = Section("Several jobs on one device", rows, tables, checks, lambda _: list(MIXES))
