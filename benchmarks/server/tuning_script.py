"""Script outside the database that tunes a model with Optuna and PyTorch, for tuning.py.

    python benchmarks/server/tuning_script.py '{"dsn": …, "table": …, "trials": 20, …}'

reads the table by psycopg, makes columns of numbers and categories, and runs a study: an MLP with embeddings, AdamW,
rows in a new order for each epoch, the log loss of the validation rows after each, the best epoch kept. With `storage`,
the study goes on from one process to the next, in Optuna's journal file. The last line is JSON: the values of the
trials.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from typing import Any

import numpy as np
import optuna
import pandas as pd
import psycopg
import torch
from torch import nn

VALIDATION = 0.2
EMBEDDING = 16


class Rows:
    """The table as tensors: standardised numbers with zero for null, codes of categories, the target 0 or 1."""

    def __init__(self, dsn: str, table: str, target: str) -> None:
        with psycopg.connect(dsn) as conn:
            cursor = conn.execute(f"SELECT * FROM {table}")
            assert cursor.description is not None
            frame = pd.DataFrame(cursor.fetchall(), columns=[column.name for column in cursor.description])
        order = np.random.default_rng(0).permutation(len(frame))
        held = round(VALIDATION * len(frame))
        self.validation, self.training = torch.from_numpy(order[:held]), torch.from_numpy(order[held:])
        self.y = torch.from_numpy((frame.pop(target) == "late").to_numpy(np.float32))
        numbers = frame.select_dtypes("number")
        known = numbers.iloc[order[held:]]
        self.numbers = torch.from_numpy(
            ((numbers - known.mean()) / known.std()).fillna(0).to_numpy(np.float32, copy=True)
        )
        texts = frame.drop(columns=numbers.columns)
        codes = [pd.Categorical(texts[name]) for name in texts]
        self.codes = torch.from_numpy(np.stack([column.codes for column in codes], 1).astype(np.int64))
        self.sizes = [len(column.categories) for column in codes]


class MLP(nn.Module):
    def __init__(self, rows: Rows, hidden: list[int], dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, EMBEDDING) for size in rows.sizes)
        widths = [rows.numbers.shape[1] + EMBEDDING * len(rows.sizes), *hidden]
        layers: list[nn.Module] = []
        for width, following in itertools.pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        embedded = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *embedded], 1)).squeeze(1)


def train(trial: optuna.Trial, rows: Rows, epochs: int, batch_size: int) -> float:
    """Return the least log loss of the validation rows over the epochs."""
    hidden = json.loads(trial.suggest_categorical("hidden", ["[64]", "[128]", "[128, 64]", "[256, 128]"]))
    rate = trial.suggest_float("learning_rate", 3e-4, 1e-2, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.3)
    torch.manual_seed(0)
    model = MLP(rows, hidden, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loss_of = nn.BCEWithLogitsLoss()
    best, weights = float("inf"), None
    for epoch in range(epochs):
        model.train()
        order = rows.training[torch.randperm(len(rows.training))]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            optimizer.zero_grad()
            loss_of(model(rows.numbers[batch], rows.codes[batch]), rows.y[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            outputs = model(rows.numbers[rows.validation], rows.codes[rows.validation])
            loss = float(loss_of(outputs, rows.y[rows.validation]))
        if loss < best:
            best, weights = loss, copy.deepcopy(model.state_dict())
        trial.report(best, epoch + 1)
        if trial.should_prune():
            raise optuna.TrialPruned
    assert weights is not None
    return best


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    halving = asked["halving"]
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if halving is not None:
        pruner = optuna.pruners.SuccessiveHalvingPruner(halving["min_epochs"], halving["factor"])
    storage: Any = None
    if asked["storage"] is not None:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        storage = JournalStorage(JournalFileBackend(asked["storage"]))
    study = optuna.create_study(
        storage=storage,
        study_name="tuning",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=asked["seed"]),
        pruner=pruner,
    )
    rows = Rows(asked["dsn"], asked["table"], asked["target"])
    study.optimize(lambda trial: train(trial, rows, asked["epochs"], asked["batch_size"]), n_trials=asked["trials"])
    states = [trial.state.name for trial in study.trials]
    print(json.dumps({"best": study.best_value, "trials": len(states), "pruned": states.count("PRUNED")}))


if __name__ == "__main__":
    main()
