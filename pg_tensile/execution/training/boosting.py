"""Growing of gradient-boosted trees with LightGBM, which is imported when it is used.

Trees are grown until the loss of the validation rows has not fallen by LEAST_GAIN for PATIENCE rounds; those after the
best round are dropped. They depend on the rows, the settings and the seed alone, not on the number of threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.dataset import Table
from pg_tensile.execution.data.preprocessing import Preprocessing, Task
from pg_tensile.execution.models.boosted import BoostedArchitecture, TreeColumns
from pg_tensile.execution.models.trees import Forest, Tree, float32_at_most
from pg_tensile.execution.training.recipe import LEARNING_RATES

THREAD_NUMBERS = 1 << 19  # of the training rows, for each thread: fewer take longer to share than to bin
FEW_ROWS = 10_000  # training rows, below which trees have FEW_LEAVES
FEW_LEAVES, MANY_LEAVES = 15, 31
PATIENCE = 50  # rounds
LEAST_GAIN = 1e-4  # of the loss, as a part of it
ROUNDS_WITHOUT_VALIDATION = 100
# Of many rows, larger steps are enough, and fewer: as many rounds as pass over PASSED_ROWS together. Trees for a first
# look pass over QUICK_ROWS, in less than a second.
MANY_ROWS, FASTER, PASSED_ROWS, QUICK_ROWS = 100_000, 2.0, 100_000_000, 6_000_000
# LightGBM's beside those that the data and the settings determine. Columns and rows that are drawn anew make the trees
# less alike; no column of the features has nulls.
PARAMETERS = {
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction_bynode": 0.6,
    "lambda_l2": 3.0,
    "max_cat_to_onehot": 1,
    "cat_smooth": 20.0,
    "min_data_per_group": 20,
    "deterministic": True,
    "force_col_wise": True,
    "use_missing": False,
    "verbose": -1,
}


class Boosting(NamedTuple):
    """Settings of the growth."""

    architecture: BoostedArchitecture
    threads: int
    seed: int
    learning_rate: float | None = None  # None: that of the recipe
    is_quick: bool = False  # for a first look
    parameters: dict[str, Any] = PARAMETERS


class Round(NamedTuple):
    """Rounds done, of at most `rounds`, and the loss of the validation rows after the last one, or None without any."""

    done: int
    rounds: int
    loss: float | None


class Grown(NamedTuple):
    """Trees; the rounds of each model of LightGBM that were kept, and the most that were done."""

    forest: Forest
    rounds: tuple[int, ...]
    done: int


def grow(
    boosting: Boosting,
    preprocessing: Preprocessing,
    training: Table,
    validation: Table | None,
    observe: Callable[[Round], bool],
    rounds: Sequence[int] | None = None,
) -> Grown:
    """Return the trees for the rows of `training`.

    `rounds`: how many, as an earlier call has found them; without, they follow from `validation`. `observe` is called
    after each round, and returns whether that is the last one; it may also raise an exception."""
    columns = TreeColumns.of(preprocessing.model_inputs)
    matrix = columns.matrix(training.features)
    held = None if validation is None or not validation.rows else (columns.matrix(validation.features), validation)
    parts, kept, most = [], [], 0
    for number, objective in enumerate(_objectives(preprocessing)):
        passed = QUICK_ROWS if boosting.is_quick else PASSED_ROWS
        limit = min(boosting.architecture.rounds, max(ROUNDS_WITHOUT_VALIDATION, passed // training.rows))
        if rounds is not None:
            limit = rounds[number]
        if rounds is None and held is None:
            limit = min(limit, ROUNDS_WITHOUT_VALIDATION)
        growth = _Growth(boosting, objective, columns, matrix, training, held)
        best, done = growth.run(limit, observe)
        parts.append(growth.trees(best))
        kept.append(best)
        most = max(most, done)
    return Grown(Forest(columns.width, preprocessing.outputs, _interleaved(parts)), tuple(kept), most)


def _objectives(preprocessing: Preprocessing) -> Iterator[dict[str, Any]]:
    """Yield the objective of each model of LightGBM: one for all labels, or for a mean and for each quantile."""
    if preprocessing.task == Task.MULTICLASS:
        yield {"objective": "multiclass", "num_class": preprocessing.outputs}
    elif preprocessing.task == Task.BINARY:
        yield {"objective": "binary"}
    else:
        yield {"objective": "regression"}
        for quantile in preprocessing.quantiles:
            yield {"objective": "quantile", "alpha": quantile}


class _Growth:
    """One model of LightGBM."""

    def __init__(
        self,
        boosting: Boosting,
        objective: dict[str, Any],
        columns: TreeColumns,
        matrix: NDArray[np.float32],
        training: Table,
        held: tuple[NDArray[np.float32], Table] | None,
    ) -> None:
        lightgbm = _import_lightgbm()
        is_fast = boosting.is_quick or training.rows + (held[1].rows if held else 0) >= MANY_ROWS
        parameters = {
            **boosting.parameters,
            **objective,
            "num_leaves": boosting.architecture.leaves or (FEW_LEAVES if training.rows < FEW_ROWS else MANY_LEAVES),
            "min_data_in_leaf": boosting.architecture.least_rows,
            "learning_rate": boosting.learning_rate or LEARNING_RATES["boosted"] * (FASTER if is_fast else 1.0),
            "num_threads": min(boosting.threads, 1 + matrix.size // THREAD_NUMBERS),
            "seed": boosting.seed & 0x7FFFFFFF,
        }
        codes = sorted(columns.cardinalities)
        dataset = lightgbm.Dataset(
            matrix, training.target, weight=training.weight, categorical_feature=codes, params=parameters
        )
        self._booster = lightgbm.Booster(parameters, dataset)
        self._is_validated = held is not None
        if held is not None:
            rows, table = held
            validation = dataset.create_valid(rows, table.target, weight=table.weight, params=parameters)
            self._booster.add_valid(validation, "validation")

    def run(self, rounds: int, observe: Callable[[Round], bool]) -> tuple[int, int]:
        """Grow at most this number of rounds; return those to keep, and those done."""
        best, least, done = 0, float(np.finfo(np.float64).max), 0
        for done in range(1, rounds + 1):
            is_finished = self._booster.update()
            loss = float(self._booster.eval_valid()[0][2]) if self._is_validated else None
            if loss is not None and not loss >= least - LEAST_GAIN * abs(least):
                best, least = done, loss
            is_last = observe(Round(done, rounds, loss))
            if is_finished or is_last or (loss is not None and done - best >= PATIENCE):
                break
        return (best if self._is_validated else done) or 1, done

    def trees(self, rounds: int) -> list[Tree]:
        """Return the trees of the first rounds."""
        model = self._booster.dump_model(num_iteration=rounds)
        return [_tree(info["tree_structure"]) for info in model["tree_info"]]


def _import_lightgbm() -> Any:
    """Import LightGBM and return it, without the packages that it only has wrappers for, which take a second."""
    modules: dict[str, Any] = sys.modules
    wrapped = [name for name in ("pandas", "sklearn") if name not in modules]
    modules.update(dict.fromkeys(wrapped))  # as None: to import them raises an ImportError, which LightGBM expects
    try:
        import lightgbm
    finally:
        for name in wrapped:
            del modules[name]
    return lightgbm


def _interleaved(parts: Sequence[Sequence[Tree]]) -> tuple[Tree, ...]:
    """Return the trees of several models of one output each in rounds; a model that has fewer gets trees that add 0."""
    if len(parts) == 1:
        return tuple(parts[0])
    nothing = Tree((), (), (), (), (), (0.0,))
    most = max(map(len, parts))
    return tuple(part[number] if number < len(part) else nothing for number in range(most) for part in parts)


def _tree(root: dict[str, Any]) -> Tree:
    """Return a tree of LightGBM's dump: nested nodes, parents before their children."""
    feature: list[int] = []
    threshold: list[float] = []
    codes: list[tuple[int, ...] | None] = []
    left: list[int] = []
    right: list[int] = []
    value: list[float] = []
    pending: list[tuple[dict[str, Any], list[int], int]] = [(root, [0], 0)]  # nodes, and where they are referred to
    while pending:
        node, side, parent = pending.pop()
        if "split_feature" not in node:
            side[parent] = -1 - len(value)
            value.append(float(f"{node['leaf_value']:.9g}"))
            continue
        side[parent] = place = len(feature)
        feature.append(int(node["split_feature"]))
        is_set = node["decision_type"] == "=="
        codes.append(tuple(map(int, str(node["threshold"]).split("||"))) if is_set else None)
        threshold.append(0.0 if is_set else float32_at_most(node["threshold"]))
        left.append(0)
        right.append(0)
        pending += [(node["right_child"], right, place), (node["left_child"], left, place)]
    return Tree(tuple(feature), tuple(threshold), tuple(codes), tuple(left), tuple(right), tuple(value))
