"""Versions that are left to the predictor, damaged ones, and damaged images."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from pg_tensile.execution.models.boosted import Boosted
from tests.evaluator.library import DAMAGED, READY, UNSUITABLE, Evaluator, RawRows, Stored, WrongLength, compiled
from tests.evaluator.versions import Version, random_rows, random_version

KINDS = {"numeric", "timestamp", "category", "array"}


def version_with(architecture: dict[str, Any]) -> Version:
    """Return a version with features of every kind."""
    for seed in range(1000):
        version = random_version(Random(seed), architecture)
        if {feature.kind.value for feature in version.preprocessing.features} == KINDS:
            return version
    raise AssertionError


MLP = version_with({"type": "mlp", "hidden": [9]}).stored
BOOSTED = version_with({"type": "boosted"})
TREES = BOOSTED.stored
TABULAR = version_with({"type": "tabular", "members": 2, "projection": 9, "hidden": 9}).stored
LINEAR = version_with({"type": "linear"})


def changed(stored: Stored, part: str, change: Callable[[Any], None]) -> Stored:
    """Return a version whose JSON or tensors have been changed."""
    text = getattr(stored, part)
    if part == "weights":
        tensors = load(text)
        change(tensors)
        return stored._replace(weights=save(tensors))
    value = json.loads(text)
    change(value)
    fields: dict[str, Any] = {part: json.dumps(value, ensure_ascii=False)}
    return stored._replace(**fields)


def feature(value: Any, kind: str) -> dict[str, Any]:
    """Return the first feature of a kind in the JSON of a preprocessing."""
    return next(item for item in value["features"] if item["kind"] == kind)


def changed_feature(stored: Stored, which: str, **keys: Any) -> Stored:
    return changed(stored, "preprocessing", lambda value: feature(value, which).update(keys))


@pytest.mark.parametrize(
    "stored",
    [
        changed(MLP, "architecture", lambda value: value.update(type="cnn")),
        changed_feature(MLP, "category", vocabulary=99),
        changed_feature(MLP, "category", vectors={"language": "english"}),
        changed_feature(MLP, "array", tokens=[1, 2]),
        changed(MLP, "preprocessing", lambda value: value.update(text={"path": "minilm"})),
        changed(MLP, "weights", lambda value: value.update({"dense.0.bias": value["dense.0.bias"].astype(np.float64)})),
        version_with({"type": "mlp", "hidden": [2100, 2100]}).stored,
        changed(TABULAR, "weights", lambda value: value["embeddings.impl.weight"].fill(2.0)),
    ],
    ids=["architecture", "tokenised", "vectors", "tokens", "text", "float64", "large", "other bins"],
)
def test_what_the_evaluator_has_not_is_left_to_the_predictor(stored: Stored) -> None:
    assert compiled(stored) == (UNSUITABLE, b"", None)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (MLP._replace(preprocessing="{"), "its JSON is not valid"),
        (MLP._replace(preprocessing="[" * 100_000), "its JSON is not valid"),
        (MLP._replace(preprocessing="1"), "its JSON is no object"),
        (MLP._replace(weights=MLP.weights[:5]), "its weights are cut off"),
        (MLP._replace(weights=MLP.weights[:-1]), "a number in its JSON is out of range"),
        (changed(MLP, "preprocessing", lambda value: value.pop("features")), "an array is missing in its JSON"),
        (changed(MLP, "preprocessing", lambda value: value.pop("task")), "it has no task"),
        (changed_feature(MLP, "numeric", kind="number"), "a feature has no kind"),
        (changed_feature(MLP, "numeric", mean="a"), "a number is missing in its JSON"),
        (changed(MLP, "weights", lambda value: value.pop("dense.0.bias")), "a tensor of its model is missing"),
        (changed(MLP, "weights", lambda value: value.update(more=np.zeros(1, np.float32))), "it has tensors that"),
        (
            changed(MLP, "weights", lambda value: value.update({"dense.0.bias": np.zeros(8, np.float32)})),
            "a tensor has not the shape",
        ),
        (changed(MLP, "architecture", lambda value: value.update(hidden=[0])), "a number in its JSON is out of range"),
        (changed_feature(TABULAR, "numeric", ranks={"values": [1, 1], "deviates": [0, 1]}), "the ranks of a column"),
        (changed_feature(TREES, "array", means=[0, 1], stds=[1]), "an array has not a mean"),
        (changed(TREES, "weights", lambda value: value["trees"].fill(32)), "its JSON is not valid"),
    ],
)
def test_a_damaged_version_is_described(stored: Stored, problem: str) -> None:
    status, image, found = compiled(stored)
    assert (status, image) == (DAMAGED, b"")
    assert found is not None and found.startswith(problem)


def trees(**keys: Any) -> Stored:
    """Return the version of trees with one tree of one node, whose keys are changed."""

    def change(tensors: Any) -> None:
        value = json.loads(tensors["trees"].tobytes())
        node = {"feature": [0], "threshold": [0], "codes": [None], "left": [-1], "right": [-2], "value": [1, 2]}
        value["trees"] = [node | keys] * value["outputs"]
        tensors["trees"] = np.frombuffer(json.dumps(value).encode(), np.uint8)

    return changed(TREES, "weights", change)


@pytest.mark.parametrize(
    "keys",
    [
        {"feature": [99]},
        {"feature": [-1]},
        {"left": [0]},
        {"left": [-3]},
        {"right": [-1]},
        {"threshold": [None]},
        {"value": [1]},
        {"codes": [[-1]]},
        {"codes": []},
        {"left": [-1.5]},
        {"feature": [0] * 32},
    ],
    ids=str,
)
def test_a_damaged_tree_is_described(keys: dict[str, Any]) -> None:
    assert compiled(trees())[0] == READY
    assert compiled(trees(**keys)) == (DAMAGED, b"", "one of its trees is damaged")


def test_statistics_that_do_not_fit_are_left_out() -> None:
    version = next(v for v in map(random_version, map(Random, range(100))) if v.reference is not None)
    whole = Evaluator(compiled(version.stored)[1])
    assert whole.histograms > 0 and whole.bins > 0
    assert version.stored.reference is not None
    for reference in (None, "null", "{", version.stored.reference.replace('"name"', '"nam"')):
        status, image, _ = compiled(version.stored._replace(reference=reference))
        without = Evaluator(image)
        assert (status, without.histograms, without.bins) == (READY, 0, 0)
        without.close()
    whole.close()


def test_an_image_is_refused_unless_it_is_that_of_the_version() -> None:
    image = compiled(MLP, identity=5)[1]
    Evaluator(image, identity=5).close()
    for other in (image[:-1], image[:64], b"", image + bytes(64), bytes(len(image))):
        with pytest.raises(ValueError, match="not the image of this version"):
            Evaluator(other, identity=5)
    with pytest.raises(ValueError, match="not the image of this version"):
        Evaluator(image, identity=6)


def test_an_image_whose_bounds_are_wrong_is_refused() -> None:
    image = compiled(TREES)[1]
    for word in range(3, 11):  # places of the sections
        damaged = bytearray(image)
        damaged[word * 8 : word * 8 + 8] = (1 << 40).to_bytes(8, "little")
        with pytest.raises(ValueError, match="is damaged"):
            Evaluator(bytes(damaged))


def test_a_forest_that_a_descent_would_leave_is_refused() -> None:
    assert isinstance(BOOSTED.module, Boosted)
    category = next(iter(BOOSTED.module.columns.cardinalities))
    stored = changed_feature(trees(feature=[category], codes=[[40]]), "category", buckets=99)
    image = compiled(stored)[1]
    outputs = BOOSTED.preprocessing.outputs
    last = 2 * outputs
    leaf = 3 * outputs - 1  # the last node, and its own left child
    starts = np.zeros(3 * outputs + 2, np.uint32)  # of the sets of nodes, two words each, behind an empty one
    starts[: leaf + 1 : 3] = 2 * np.arange(1, outputs + 1)

    def node(left: int, column: int = 0) -> bytes:
        return (left << 32 | 0xFFFF << 16 | column * 8).to_bytes(8, "little")

    def sets(start: int) -> bytes:
        others = starts.copy()
        others[leaf - 2] = start
        return others.tobytes()

    for right, wrong in ((node(leaf), node(leaf + 1)), (node(leaf), node(leaf, 1)), (sets(last), sets(last + 3))):
        assert image.count(right) == 1
        with pytest.raises(ValueError, match="is damaged"):
            Evaluator(image.replace(right, wrong))
    Evaluator(image.replace(sets(last), sets(last + 2))).close()  # the one behind, which is empty


def test_an_array_of_a_wrong_length_is_named() -> None:
    versions = (random_version(Random(seed), {"type": "linear"}) for seed in range(100))
    version = next(version for version in versions if len(version.preprocessing.arrays) > 1)
    rows = random_rows(Random(1), version.preprocessing, 6)
    expected = version.preprocessing.arrays[1].length
    assert expected is not None
    rows.arrays[1][4] = np.zeros(expected + 1)
    evaluator = Evaluator(compiled(version.stored)[1])
    with pytest.raises(WrongLength) as caught:
        evaluator.raw_outputs(rows)
    assert caught.value.args == (1, 4, expected + 1, expected)
    assert np.isfinite(evaluator.raw_outputs(rows.chosen(range(4)))).all()
    evaluator.close()


def test_codes_that_no_string_has_are_nulls() -> None:
    """A session asks for codes first, but what it passes is trusted no more than an image."""
    given = random_rows(Random(1), LINEAR.preprocessing, 3)
    rows = RawRows(3, given.scalars, [[None] * 3] * len(given.strings), given.arrays)
    evaluator = Evaluator(compiled(LINEAR.stored)[1])
    expected = evaluator.raw_outputs(rows)
    for code in (-(2**31), -2, 2**31 - 1):
        evaluator.code = lambda *_, code=code: (code, True)  # type: ignore[method-assign]
        strange = RawRows(3, given.scalars, [["a"] * 3] * len(given.strings), given.arrays)
        np.testing.assert_array_equal(evaluator.raw_outputs(strange), expected)
    evaluator.close()
