"""Training through the database against the same loop in plain PyTorch on arrays in memory, in the same run.

The flights' late arrivals: 300,000 flights of the three-table join, MLP [128, 64] with embeddings, AdamW, batches of
1024. A job's rate is that of whole epochs, by the time at which their metrics were committed, so it includes batches,
steps, training metrics, progress, and checkpoints with their way into the catalogue. The plain loop runs in a process
of its own, with the default threads of a job (all cores but one), on tensors of the same shapes and types, with a new
permutation for every epoch; and once more on all cores, the default of a standalone script. A job leaves one core to
the server, because the server's other work slows steps on all cores down many times. Rounds are interleaved and medians
taken, those of ratios of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psycopg
import torch
from torch import Tensor, nn

from benchmarks import flights
from benchmarks.checks import Goal
from benchmarks.command import ROOT
from benchmarks.runner import Run, goals_section
from benchmarks.server.cluster import fresh_cluster
from pg_tensile.execution.data.preprocessing import ModelInputs, Preprocessing
from scripts.cluster import Cluster, child_python

ROUNDS = 3
EPOCHS = 6
BATCH_SIZE = 1024
HIDDEN = (128, 64)
EMBEDDING = 16
QUERY = "SELECT * FROM departures WHERE time_hour < '2013-12-01'"


class PlainMLP(nn.Module):
    """The same model, written by hand."""

    def __init__(self, inputs: ModelInputs) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(inputs.cardinalities), EMBEDDING)
        width = inputs.numeric + EMBEDDING * len(inputs.cardinalities)
        self.layers = nn.Sequential(
            *(nn.Linear(width, HIDDEN[0]), nn.ReLU(), nn.Linear(*HIDDEN), nn.ReLU(), nn.Linear(HIDDEN[1], 1))
        )

    def forward(self, numeric: Tensor, categories: Tensor) -> Tensor:
        return self.layers(torch.cat([numeric, self.embedding(categories).flatten(1)], 1)).squeeze(1)


def train_plain(rows: int, inputs: ModelInputs, threads: int) -> float:
    """Train EPOCHS epochs after a first one, and return rows per second."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    numeric = torch.randn(rows, inputs.numeric)
    offsets = [sum(inputs.cardinalities[:i]) for i in range(len(inputs.cardinalities))]
    columns = [torch.randint(low, low + size, (rows,)) for low, size in zip(offsets, inputs.cardinalities, strict=True)]
    categories, target = torch.stack(columns, 1), (torch.rand(rows) < 0.24).float()
    model = PlainMLP(inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_function = nn.BCEWithLogitsLoss()
    started = 0.0
    for epoch in range(EPOCHS + 1):
        if epoch == 1:
            started = time.perf_counter()
        order = torch.randperm(rows)
        total = 0.0
        for start in range(0, rows, BATCH_SIZE):
            index = order[start : start + BATCH_SIZE]
            loss = loss_function(model(numeric[index], categories[index]), target[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
    return EPOCHS * rows / (time.perf_counter() - started)


def plain(rows: int, inputs: ModelInputs, threads: int) -> float:
    """Run `train_plain` in a process like the trainer's."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [child_python(), "-m", "benchmarks.server.training", json.dumps([rows, inputs, threads])]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return float(done.stdout)


def train(conn: psycopg.Connection[Any]) -> tuple[float, int, ModelInputs]:
    """Run a job and return its speed, its training rows and its model's inputs.

    The speed is in rows per second over EPOCHS epochs after the first.
    """
    row = conn.execute(
        "SELECT train_model('bench', %s, 'late', epochs => %s, batch_size => %s, learning_rate => 0.001,"
        """ validation => 0, options => '{"keep": "last"}')""",
        (QUERY, EPOCHS + 1, BATCH_SIZE),
    ).fetchone()
    assert row is not None
    conn.execute("SELECT wait_for_job(%s, '10 min')", row)
    row = conn.execute(
        "SELECT extract(epoch FROM max(m.at) - min(m.at))::float8, max(m.samples), v.preprocessing"
        " FROM tensile.epoch_metrics m JOIN tensile.model_versions v USING (job) WHERE job = %s"
        " GROUP BY v.preprocessing",
        row,
    ).fetchone()
    assert row is not None
    seconds, rows, preprocessing = row
    return EPOCHS * rows / seconds, rows, Preprocessing.from_json(preprocessing).model_inputs


def rates_of(cluster: Cluster, threads: int, rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"job": [], "plain": [], "all": []}
    with cluster.connect() as conn:
        flights.load(conn)
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        architecture = {"type": "mlp", "hidden": HIDDEN, "embedding": EMBEDDING}
        conn.execute("SELECT register_model('bench', %s)", (json.dumps(architecture),))
        for _ in range(rounds):
            rate, rows, inputs = train(conn)
            rates["job"].append(rate)
            rates["plain"].append(plain(rows, inputs, threads))
            rates["all"].append(plain(rows, inputs, len(os.sched_getaffinity(0))))
    return rates


def ratio(jobs: list[float], others: list[float]) -> float:
    return round(statistics.median(job / reference for job, reference in zip(jobs, others, strict=True)), 3)


def measure(run: Run) -> dict[str, Any]:
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    with fresh_cluster() as cluster:
        rates = rates_of(cluster, threads, 1 if run.quick else ROUNDS)
    return {
        "rows_per_s": round(statistics.median(rates["job"])),
        "plain_rows_per_s": round(statistics.median(rates["plain"])),
        "ratio": ratio(rates["job"], rates["plain"]),
        "ratio_all_cores": ratio(rates["job"], rates["all"]),
    }


GOALS = (
    Goal("rows_per_s", "flights' network, rows/s", ","),
    Goal("ratio", "the same over plain PyTorch's, a thread each", ".2f", least=0.95),
    Goal("ratio_all_cores", "the same over plain PyTorch's on all cores", ".2f"),
)
BENCHMARK = goals_section("Training beside plain PyTorch", "training", measure, GOALS)

if __name__ == "__main__":
    rows, (numeric, cardinalities, *_), threads = json.loads(sys.argv[1])
    print(train_plain(rows, ModelInputs(numeric, tuple(cardinalities), ()), threads))
