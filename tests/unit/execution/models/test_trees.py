"""Trees: their JSON, and their evaluation in numpy and PyTorch against a walk from node to node."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pg_tensile.errors import CheckpointError
from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs
from pg_tensile.execution.models.boosted import Boosted, FusedBoosted, TreeColumns, few_rows
from pg_tensile.execution.models.trees import MOST_LEAVES, Forest, Scorer, Tree, float32_at_most
from pg_tensile.execution.training.checkpoint import load_model
from tests.examples import examples

CODES = 6
INPUTS = ModelInputs(3, (CODES,), (ArrayInput(2, 0),), bins=((-1.0, 1.0),))  # two numbers, a rank, a category, an array
WIDTH = TreeColumns.of(INPUTS).width
CATEGORY = 2
NUMBERS = st.floats(-4, 4, width=32)


@st.composite
def trees(draw: Any) -> Tree:
    """Return a tree that is grown leaf by leaf."""
    nodes = draw(st.integers(0, MOST_LEAVES - 1))
    sides: tuple[list[int], list[int]] = ([], [])
    leaves: list[tuple[int, int] | None] = [None]  # where each leaf hangs: side and node
    for node in range(nodes):
        place = leaves.pop(draw(st.integers(0, len(leaves) - 1)))
        if place is not None:
            sides[place[0]][place[1]] = node
        for side in (0, 1):
            sides[side].append(0)
            leaves.append((side, node))
    for number, place in enumerate(leaves):
        if place is not None:
            sides[place[0]][place[1]] = -1 - number
    feature = tuple(draw(st.integers(0, WIDTH - 1)) for _ in range(nodes))
    codes = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, CODES - 1))))) if column == CATEGORY else None for column in feature
    )
    numbers = draw(st.lists(NUMBERS, min_size=nodes, max_size=nodes))
    threshold = tuple(0.0 if column == CATEGORY else x for column, x in zip(feature, numbers, strict=True))
    value = tuple(draw(st.lists(st.floats(-1, 1), min_size=nodes + 1, max_size=nodes + 1)))
    return Tree(feature, threshold, codes, tuple(sides[0]), tuple(sides[1]), value)


@st.composite
def forests(draw: Any) -> Forest:
    outputs = draw(st.integers(1, 3))
    rounds = draw(st.integers(0, 4))
    return Forest(WIDTH, outputs, tuple(draw(trees()) for _ in range(rounds * outputs)))


@st.composite
def features(draw: Any) -> Features:
    rows = draw(st.integers(1, 5))
    shape = (rows, INPUTS.numeric + 2)
    # whole numbers are often equal to thresholds that are whole as well
    x = np.array(draw(st.lists(NUMBERS, min_size=rows * shape[1], max_size=rows * shape[1])), np.float32).reshape(shape)
    codes = draw(st.lists(st.integers(0, CODES - 1), min_size=rows, max_size=rows))
    return Features(x[:, :3].copy(), np.array(codes, np.int64)[:, None], (x[:, 3:].copy(),))


def walked(forest: Forest, row: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the outputs of a row."""
    outputs = np.zeros(forest.outputs)
    for number, tree in enumerate(forest.trees):
        node = 0 if tree.feature else -1
        while node >= 0:
            x, codes = row[tree.feature[node]], tree.codes[node]
            goes_left = x <= np.float32(tree.threshold[node]) if codes is None else int(x) in codes
            node = tree.left[node] if goes_left else tree.right[node]
        outputs[number % forest.outputs] += tree.value[-1 - node]
    return outputs


@given(forests(), features())
def test_every_evaluation_follows_the_nodes(forest: Forest, rows: Features) -> None:
    columns = TreeColumns.of(INPUTS)
    matrix = columns.matrix(rows)
    expected = np.array([walked(forest, row) for row in matrix])
    scorer = Scorer(forest, columns.cardinalities)
    outputs = scorer(matrix)
    assert np.allclose(outputs, expected, atol=1e-12)
    assert all((scorer(matrix[row : row + 1]) == outputs[row]).all() for row in range(len(matrix)))
    model = Boosted(INPUTS, forest.outputs, forest)
    tensors = Features.from_flat([torch.from_numpy(array) for array in rows.flat()])
    rounded = outputs.astype(np.float32)
    assert (FusedBoosted(model)(tensors).numpy() == rounded).all()
    assert np.allclose(model(tensors).numpy(), expected, atol=1e-6)
    single = few_rows(model)(Features.from_flat([array[:, None] for array in rows.flat()]))
    assert (single[:, 0] == rounded).all()


@given(forests())
def test_the_json_and_the_weights_have_the_whole_forest(forest: Forest) -> None:
    assert Forest.from_json(forest.to_json()) == forest
    model, other = Boosted(INPUTS, forest.outputs, forest), Boosted(INPUTS, forest.outputs)
    load_model(other, model.state_dict())
    assert other.scorer.nbytes == model.scorer.nbytes
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {"trees": torch.uint8}


@given(forests(), st.data())
@examples(100, long=2000)
def test_damaged_json_is_refused_or_evaluated_within_bounds(forest: Forest, data: st.DataObject) -> None:
    fields = json.loads(forest.to_json())
    places = [(tree, name) for tree in fields["trees"] for name in tree if tree[name]]
    target, key = data.draw(st.sampled_from([(fields, "outputs"), (fields, "columns"), (fields, "trees"), *places]))
    wrong: st.SearchStrategy[Any] = st.sampled_from([None, -1, 0, 1, 99, 1e300, float("nan"), "x", [], {}, 2**70, [2]])
    if isinstance(target[key], list) and target[key] and data.draw(st.booleans()):
        target[key][data.draw(st.integers(0, len(target[key]) - 1))] = data.draw(wrong)
    else:
        target[key] = data.draw(wrong)
    try:
        read = Forest.from_json(json.dumps(fields).encode())
    except ValueError:
        return
    if read.columns == WIDTH:
        outputs = Scorer(read, {CATEGORY: CODES})(np.zeros((1, WIDTH), np.float32))
        assert np.isfinite(outputs).all()


def test_weights_that_are_no_trees_are_refused() -> None:
    model = Boosted(INPUTS, 1)
    for trees in (torch.zeros(0, dtype=torch.uint8), torch.frombuffer(bytearray(b"[]"), dtype=torch.uint8)):
        with pytest.raises(CheckpointError, match="do not fit the model"):
            load_model(model, {"trees": trees})
    with pytest.raises(CheckpointError, match="do not fit the model"):
        load_model(model, {})
    with pytest.raises(ValueError, match="columns"):
        Boosted(INPUTS, 1, Forest(WIDTH + 1, 1, ()))


@given(st.floats(-1e30, 1e30), NUMBERS)
def test_rounded_thresholds_divide_numbers_as_before(threshold: float, x: float) -> None:
    rounded = float32_at_most(threshold)
    assert np.float32(rounded) == rounded
    assert (np.float32(x) <= threshold) == (np.float32(x) <= np.float32(rounded))
