"""Preprocessing is fitted on the training rows, and applied alike in training and prediction."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data import fitters, fitting
from pg_tensile.execution.data.columns import Column, Values
from pg_tensile.execution.data.dataset import Table
from pg_tensile.execution.data.hashing import string_hash
from pg_tensile.execution.data.preprocessing import (
    ArraysInput,
    CategoryInput,
    Features,
    Inputs,
    Kind,
    Preprocessing,
    Task,
    TokenLimits,
)
from tests.unit.rows import Prepared, Rows, every_type

DAY = 86_400_000_000


def inputs_of(preprocessing: Preprocessing, rows: Rows, chosen: list[int]) -> Inputs:
    """The inputs as a PREDICT frame has them, made from Python values and not by the code under test."""
    numeric, categories, arrays = [], [], []
    for number, feature in enumerate(preprocessing.features):
        values = [rows.columns[feature.name][1][row] for row in chosen]
        if feature.kind in (Kind.NUMERIC, Kind.TIMESTAMP):
            numeric.append([math.nan if value is None else float(value) for value in values])
        elif feature.kind == Kind.CATEGORY:
            strings = sorted({value for value in values if value is not None}, reverse=True)
            places = np.array([-1 if value is None else strings.index(value) for value in values], np.int32)
            codes = preprocessing.codes(sum(f.kind == Kind.CATEGORY for f in preprocessing.features[:number]), strings)
            categories.append(CategoryInput(places, np.array([*codes, 0], np.int64)))
        else:
            lengths = np.array([-1 if value is None else len(value) for value in values], np.int32)
            elements = [math.nan if x is None else float(x) for value in values for x in value or []]
            arrays.append(ArraysInput(lengths, np.array(elements, np.float64)))
    matrix = np.array(numeric, np.float64).reshape(len(numeric), len(chosen))
    return Inputs(len(chosen), matrix, categories, arrays)


def rows_of(features: Features) -> list[tuple[bytes, ...]]:
    return [tuple(array[row].tobytes() for array in features.flat()) for row in range(len(features.numeric))]


def table_rows(prepared: Prepared) -> list[tuple[bytes, ...]]:
    tables: tuple[Table, ...] = (prepared.dataset.training, prepared.dataset.validation)
    return [row for table in tables for row in rows_of(table.features)]


@pytest.mark.parametrize("tokens", [None, TokenLimits(None, 100)])
def test_training_and_prediction_see_the_same_bits(tokens: TokenLimits | None) -> None:
    rows = every_type(300)
    prepared = rows.prepare(tokens=tokens)
    stored = json.loads(json.dumps(prepared.fitted.preprocessing.to_json(), allow_nan=False))
    preprocessing = Preprocessing.from_json(stored)
    assert preprocessing == prepared.fitted.preprocessing
    together = preprocessing.apply(inputs_of(preprocessing, rows, list(range(rows.count))))
    one_by_one = [
        row for i in range(rows.count) for row in rows_of(preprocessing.apply(inputs_of(preprocessing, rows, [i])))
    ]
    assert rows_of(together) == one_by_one
    assert sorted(rows_of(together)) == sorted(table_rows(prepared))


def test_statistics_are_those_of_the_training_rows() -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=1000) * 3 + 7).tolist()
    for row in range(0, 1000, 10):
        values[row] = None
    rows = Rows({"x": ("float8", values), "y": ("float8", rng.normal(size=1000).tolist())})
    prepared = rows.prepare(validation=0.3)
    (feature,) = prepared.fitted.preprocessing.features
    (block,) = prepared.store.blocks()
    split = prepared.fitted.division.validation_rows(block)
    x, nulls = block.columns[0].data[~split], block.columns[0].nulls[~split]
    assert prepared.fitted.training_rows == len(x) and prepared.fitted.validation_rows == split.sum()
    assert feature.nulls == nulls.sum() > 0
    assert feature.mean == pytest.approx(x[~nulls].mean(), rel=1e-12)
    assert feature.std == pytest.approx(x[~nulls].std(), rel=1e-12)
    numeric = prepared.dataset.training.features.numeric
    assert numeric.shape[1] == 2
    assert numeric[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert set(numeric[numeric[:, 1] == 1][:, 0]) == {0.0}
    assert numeric[:, 1].sum() == feature.nulls


NUMBERS = st.one_of(
    st.none(),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e308, -1e308, 5e-324, 1e-300, 2**53, math.inf, -math.inf, math.nan]),
)


@example([1.7e308, 1.7e308, -1.7e308], None)
@given(st.lists(NUMBERS, min_size=1, max_size=30), NUMBERS)
def test_any_number_becomes_a_finite_feature(values: list[float | None], later: float | None) -> None:
    rows = Rows({"x": ("float8", values), "y": ("int4", list(range(len(values))))})
    prepared = rows.prepare(validation=0.0)
    (feature,) = prepared.fitted.preprocessing.features
    finite = [x for x in values if x is not None and math.isfinite(x)]
    assert feature.nulls == len(values) - len(finite)
    numeric = prepared.dataset.training.features.numeric
    assert np.isfinite(numeric).all()
    if finite:
        assert min(finite) <= feature.mean <= max(finite)
        assert abs(numeric[:, 0].astype(np.float64).mean()) < 1e-3
    if feature.std > 0:
        assert numeric[:, 0].std() == pytest.approx(math.sqrt(len(finite) / len(values)), rel=1e-3)
    single = Inputs(1, np.array([[math.nan if later is None else later]]), [], [])
    assert np.isfinite(prepared.fitted.preprocessing.apply(single).numeric).all()
    json.dumps(prepared.fitted.preprocessing.to_json(), allow_nan=False)


def test_constants_are_zero_whatever_comes() -> None:
    rows = Rows({"x": ("int4", [7] * 20), "n": ("float8", [None] * 20), "y": ("int4", list(range(20)))})
    prepared = rows.prepare(validation=0.0)
    assert [feature.std for feature in prepared.fitted.preprocessing.features] == [0.0, 0.0]
    assert set(prepared.dataset.training.features.numeric[:, :2].ravel()) == {0.0}
    for value in (7.0, 8.0, 1e308, -1e308, math.nan, math.inf):
        features = prepared.fitted.preprocessing.apply(Inputs(1, np.array([[value], [value]]), [], []))
        assert features.numeric[0, :2].tolist() == [0.0, 0.0]


def test_epoch_seconds_keep_their_differences() -> None:
    base = 1.7e9
    values = [base + i / 1000 for i in range(1000)]
    prepared = Rows({"x": ("float8", values), "y": ("int4", list(range(1000)))}).prepare(validation=0.0)
    assert len(set(prepared.dataset.training.features.numeric[:, 0].tolist())) == 1000


@pytest.mark.parametrize(("hours", "width"), [(0, 5), (6, 7)])
def test_timestamps_have_cycles(hours: int, width: int) -> None:
    days = 800
    values = [day * DAY + (day % 2) * hours * DAY // 24 for day in range(days)]
    prepared = Rows({"t": ("timestamp", values), "y": ("int4", list(range(days)))}).prepare(validation=0.0)
    (feature,) = prepared.fitted.preprocessing.features
    assert feature.hour == (hours > 0)
    numeric = prepared.fitted.preprocessing.apply(Inputs(days, np.array([values], np.float64), [], [])).numeric.astype(
        np.float64
    )
    assert numeric.shape == (days, width)
    phases = (width - 1) // 2
    angles = np.arctan2(numeric[:, 1 : 1 + phases], numeric[:, 1 + phases :]) / (2 * np.pi) % 1.0
    week, year = (
        (np.arange(days) % 7) / 7,
        np.array([d - (0 if d < 366 else 366 if d < 731 else 731) for d in range(days)]),
    )
    assert np.abs((angles[:, 0] - week + 0.5) % 1.0 - 0.5).max() < 1e-6
    assert np.abs((angles[:, 1] - year / 365.25 + 0.5) % 1.0 - 0.5).max() < 1e-6
    if hours:
        assert np.abs(angles[:, 2] - (np.arange(days) % 2) * hours / 24).max() < 1e-6


def test_null_timestamps_are_at_no_time_of_day() -> None:
    values = [None if i % 3 == 0 else i * DAY // 5 for i in range(60)]
    prepared = Rows({"t": ("timestamp", values), "y": ("int4", list(range(60)))}).prepare(validation=0.0)
    numeric = prepared.dataset.training.features.numeric
    null = numeric[:, 1] == 1
    assert null.sum() == 20 and (numeric[null][:, [0, 2, 3, 4, 5, 6, 7]] == 0).all()
    far = prepared.fitted.preprocessing.apply(Inputs(2, np.array([[1e300, -9.2e18]]), [], []))
    assert np.isfinite(far.numeric).all()


def test_categories_have_codes_by_their_frequency_and_rare_ones_share_a_code() -> None:
    values = ["d"] * 5 + ["c"] * 3 + ["b"] * 3 + ["a"] * 4 + ["e", "f"] + [None] * 2
    prepared = Rows({"c": ("text", values), "y": ("int4", list(range(len(values))))}).prepare(validation=0.0)
    preprocessing = prepared.fitted.preprocessing
    (feature,) = preprocessing.features
    assert feature.categories == ("d", "a", "b", "c")  # equally frequent ones are sorted
    assert (feature.nulls, feature.buckets, preprocessing.model_inputs.cardinalities) == (2, 1, (6,))
    codes = preprocessing.codes(0, ["a", "b", "c", "d", "e", "never"])
    assert codes == [2, 3, 4, 1, 5, 5]
    assert preprocessing.unknown(0, codes) == [False] * 4 + [True] * 2
    counts = np.bincount(prepared.dataset.training.features.categories[:, 0]).tolist()
    assert counts == [2, 5, 4, 3, 3, 2]


def test_without_rare_strings_unseen_ones_are_like_null() -> None:
    values = ["a"] * 5 + ["b"] * 3
    preprocessing = Rows({"c": ("text", values), "y": ("int4", list(range(8)))}).prepare(0.0).fitted.preprocessing
    assert preprocessing.model_inputs.cardinalities == (3,)
    codes = preprocessing.codes(0, ["b", "never"])
    assert codes == [2, 0] and preprocessing.unknown(0, codes) == [False, True]


@pytest.mark.parametrize(
    ("module", "limit", "value"), [(fitters, "MAX_CATEGORIES", 3), (fitting, "MAX_STRINGS_BYTES", 27)]
)
def test_strings_beyond_a_limit_are_hashed_to_the_same_codes_in_training_and_prediction(
    monkeypatch: pytest.MonkeyPatch, module: Any, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    counts = {"frequent": 60, "other": 40, "third": 20, "fourth": 20}
    values = [f"user{number}" for number in range(400)] + [text for text in counts for _ in range(counts[text])]
    rows = Rows({"c": ("text", values), "y": ("int4", list(range(len(values))))})
    prepared = rows.prepare(validation=0.5)
    stored = Preprocessing.from_json(json.loads(json.dumps(prepared.fitted.preprocessing.to_json())))
    (feature,) = stored.features
    assert feature.categories is not None and feature.categories[:2] == ("frequent", "other")
    assert len(feature.categories) <= 3 and feature.buckets == fitters.HASH_BUCKETS
    codes = stored.codes(0, values)
    assert codes[0] == len(feature.categories) + 1 + string_hash("user0") % feature.buckets
    assert len(set(codes[:400])) > 300 and stored.model_inputs.cardinalities[0] > max(codes)
    assert stored.unknown(0, stored.codes(0, ["never", "user1"])) == [False, False]
    tables = prepared.dataset.training, prepared.dataset.validation
    trained = np.concatenate([table.features.categories[:, 0] for table in tables])
    assert sorted(trained.tolist()) == sorted(codes)


def test_hashes_of_strings_are_the_same_everywhere() -> None:
    assert [string_hash(text) for text in ("", "a", "ä")] == [
        13020603013274838756,
        3405396810240292928,
        4152366542966443504,
    ]


def test_a_million_strings_have_a_small_preprocessing() -> None:
    count = 1_000_000
    fitter = fitters.CategoryFitter(Column("url", "text"), [f"https://example.org/{n}" for n in range(count)])
    fitter.observe(Values(np.zeros(count, np.bool_), np.arange(count, dtype=np.int32)))
    feature = fitter.feature()
    assert feature.categories == () and feature.buckets == fitters.HASH_BUCKETS


def test_versions_stored_before_there_were_buckets_keep_their_codes() -> None:
    stored = {"name": "c", "kind": "category", "type": "text", "nulls": 0, "categories": ["a", "b"]}
    number = {"name": "x", "kind": "numeric", "type": "int4", "nulls": 0, "mean": 2.0, "std": 1.0}
    preprocessing = Preprocessing.from_json(
        {
            "task": "regression",
            "target": {"name": "y", "type": "int4", "mean": 1.0, "std": 2.0},
            "labels": None,
            "label_values": None,
            "features": [stored, number],
        }
    )
    codes = preprocessing.codes(0, ["b", "a", "never"])
    assert codes == [2, 1, 0] and preprocessing.unknown(0, codes) == [False, False, True]
    assert preprocessing.model_inputs.cardinalities == (3,)
    category = CategoryInput(np.array([-1, 0]), np.array([*codes, 0], np.int64))
    features = preprocessing.apply(Inputs(2, np.array([[1e3, 2.0]]), [category], []))
    assert features.numeric[:, 0].tolist() == [998.0, 0.0]


def test_numbers_far_from_the_training_rows_are_limited() -> None:
    rows = Rows({"x": ("float8", [0.0, 10.0, 20.0, 30.0]), "y": ("int4", [1, 2, 3, 4])})
    preprocessing = rows.prepare(validation=0.0).fitted.preprocessing
    (feature,) = preprocessing.features
    assert (feature.low, feature.high, feature.limits) == (0.0, 30.0, (-30.0, 60.0))
    x = np.array([[-1e300, -31.0, -30.0, 15.0, 60.0, 61.0, 1e9, math.nan]])
    numeric = preprocessing.apply(Inputs(8, x, [], [])).numeric[:, 0]
    assert numeric.tolist() == pytest.approx([z / feature.std for z in (-45, -45, -45, 0, 45, 45, 45, 0)])


def test_arrays_of_different_lengths_are_an_error() -> None:
    rows = Rows({"a": ("int4[]", [[1, 2]] * 30 + [[1]] * 2 + [None]), "y": ("int4", list(range(33)))})
    with pytest.raises(DataError, match='feature "a" has arrays of different lengths') as error:
        rows.prepare()
    assert error.value.detail == "30 rows have 2 elements, 2 rows have 1."
    with pytest.raises(DataError, match="only empty or null arrays"):
        Rows({"a": ("int4[]", [[]] * 9 + [None]), "y": ("int4", list(range(10)))}).prepare()


def test_each_element_of_an_array_has_a_scale_of_its_own_beside_ranks() -> None:
    """As if it were a column; a constant one is 0, and a null one its mean."""
    rng = np.random.default_rng(3)
    x = np.stack([rng.integers(0, 2, 100), rng.normal(40, 15, 100), rng.normal(5e4, 2e4, 100), np.full(100, 7.0)], 1)
    values: list[Any] = x.tolist()
    prepared = Rows({"a": ("float8[]", values), "y": ("float8", x[:, 1].tolist())}).prepare(validation=0.0, ranks=True)
    array = prepared.dataset.training.features.arrays[0]
    np.testing.assert_allclose(array[:, :3].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(array[:, :3].std(axis=0), 1, rtol=1e-5)
    assert (array[:, 3] == 0).all()
    missing = Inputs(1, np.empty((0, 1)), [], [ArraysInput(np.array([4]), np.full(4, math.nan))])
    np.testing.assert_allclose(prepared.fitted.preprocessing.apply(missing).arrays[0], 0, atol=1e-6)
    again = Preprocessing.from_json(json.loads(json.dumps(prepared.fitted.preprocessing.to_json())))
    assert again == prepared.fitted.preprocessing
    together = Rows({"a": ("float8[]", values), "y": ("float8", x[:, 1].tolist())}).prepare(validation=0.0)
    assert together.dataset.training.features.arrays[0][:, 0].std() < 1e-4


def test_an_array_of_another_length_cannot_be_predicted() -> None:
    prepared = Rows({"a": ("float4[]", [[i, 2.0] for i in range(9)]), "y": ("int4", list(range(9)))}).prepare(0.0)
    good = ArraysInput(np.array([2, -1, 2], np.int32), np.array([1.0, 2.0, math.nan, 4.0]))
    features = prepared.fitted.preprocessing.apply(Inputs(3, np.empty((0, 3)), [], [good]))
    assert features.arrays[0].shape == (3, 2) and (features.arrays[0][1] == 0).all()
    bad = ArraysInput(np.array([2, 3], np.int32), np.zeros(5))
    with pytest.raises(DataError, match='feature "a" has an array of 3 elements in row 2, not 2'):
        prepared.fitted.preprocessing.apply(Inputs(2, np.empty((0, 2)), [], [bad]))


def test_tokens_are_coded_cut_and_padded() -> None:
    values: list[Any] = [[5, 9, 9], [9, 7], [], None, [5, 9, None, 1000, 9, 9]]
    rows = Rows({"t": ("int4[]", values), "y": ("int4", list(range(5)))})
    prepared = rows.prepare(validation=0.0, tokens=TokenLimits(4, 2))
    (feature,) = prepared.fitted.preprocessing.features
    assert feature.tokens == (5, 9) and feature.length == 4
    (array,) = prepared.fitted.preprocessing.apply(
        inputs_of(prepared.fitted.preprocessing, rows, list(range(5)))
    ).arrays
    assert array.tolist() == [[2, 3, 3, 0], [3, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [2, 3, 1, 1]]
    assert prepared.fitted.preprocessing.model_inputs.arrays[0].vocabulary == 4


X = ("int4", list(range(12)))


@pytest.mark.parametrize(
    ("kind", "values", "option", "task", "labels", "label_values"),
    [
        ("float8", [1.5, 2.5] * 6, None, Task.REGRESSION, None, None),
        ("bool", [True, False] * 6, None, Task.BINARY, ("false", "true"), (0.0, 1.0)),
        ("bool", [True, False] * 6, "regression", Task.REGRESSION, None, None),
        ("int4", [10, 9, 100] * 4, "classification", Task.MULTICLASS, ("9", "10", "100"), (9.0, 10.0, 100.0)),
        ("float8", [1.0, 0.5] * 6, "classification", Task.BINARY, ("0.5", "1"), (0.5, 1.0)),
        ("float4", [0.1, 2.0] * 6, "classification", Task.BINARY, ("0.1", "2"), (0.10000000149011612, 2.0)),
        ("text", ["10", "9", "-1.5"] * 4, None, Task.MULTICLASS, ("-1.5", "10", "9"), (-1.5, 10.0, 9.0)),
        ("text", ["b", "nan"] * 6, None, Task.BINARY, ("b", "nan"), None),
    ],
)
def test_the_target_decides_the_task(
    kind: str, values: list[Any], option: str | None, task: Task, labels: Any, label_values: Any
) -> None:
    prepared = Rows({"x": X, "y": (kind, values)}).prepare(validation=0.0, task=option)
    fitted = prepared.fitted.preprocessing
    assert (fitted.task, fitted.labels, fitted.label_values) == (task, labels, label_values)
    target = prepared.dataset.training.target
    x = prepared.dataset.training.features.numeric[:, 0].argsort().argsort()  # the row each came from
    if task == Task.REGRESSION:
        expected = (np.array(values, float) - np.mean(values)) / np.std(values)
        np.testing.assert_allclose(target, expected[x], rtol=1e-6)
    else:
        as_text = {"bool": "{}", "text": "{}"}.get(kind, "{:g}")
        assert [labels[int(label)] for label in target] == [as_text.format(values[row]).lower() for row in x]
        assert target.dtype == (np.int64 if task == Task.MULTICLASS else np.float32)


def test_rows_without_a_target_are_skipped_and_counted() -> None:
    y = [1.0, None, math.nan, math.inf, *[float(i) for i in range(8)]]
    prepared = Rows({"x": X, "y": ("float8", y)}).prepare(validation=0.0)
    assert prepared.fitted.skipped_rows == 3
    assert prepared.fitted.training_rows == prepared.dataset.training.rows == 9
    assert prepared.fitted.preprocessing.features[0].nulls == 0


@pytest.mark.parametrize(
    ("target", "task", "message"),
    [
        (("float8", [None] * 12), None, 'the target "y" is null in all 12 rows'),
        (("float8", [math.nan, -math.inf] * 6), None, 'the target "y" is NaN or infinite in all 12 rows'),
        (
            ("float4", [math.inf, None, None] * 4),
            None,
            'the target "y" is null in 8 rows, NaN or infinite in 4, all 12 rows',
        ),
        (("text", [None] * 12), None, 'the target "y" is null in all 12 rows'),
        (("text", ["a"] * 11 + [None]), None, "the target \"y\" has only one value, 'a'"),
        (("bool", [True] * 12), None, "only one value, 'true'"),
        (("int4", [3] * 12), "classification", "only one value, '3'"),
        (("float8", [3.5] * 11 + [None]), None, 'the target "y" is 3.5 in all'),
        (("bool", [True] * 12), "regression", 'the target "y" is 1 in all'),
        (("text", ["a", "b"] * 6), "regression", 'the target "y" is text, which has no regression'),
        (("timestamp", [0] * 12), None, 'the target "y" has the type timestamp, which cannot be predicted'),
        (("int4[]", [[1]] * 12), None, 'the target "y" has the type int4\\[\\], which cannot be predicted'),
    ],
)
def test_targets_that_cannot_be_learned_are_errors(target: Any, task: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        Rows({"x": X, "y": target}).prepare(task=task)
    assert error.value.hint and not error.value.message.endswith(".")


def test_too_many_labels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitters, "MAX_LABELS", 5)
    for target, task in ((("text", [f"l{i}" for i in range(12)]), None), (X, "classification")):
        with pytest.raises(DataError, match="more than 5 labels"):
            Rows({"x": X, "y": target}).prepare(task=task)


def test_a_single_row_has_a_regression() -> None:
    prepared = Rows({"x": ("int4", [1]), "y": ("float8", [3.5])}).prepare(validation=0.0)
    assert prepared.fitted.preprocessing.target.mean == 3.5
    assert prepared.dataset.training.target.tolist() == [0.0]


def test_labels_seen_only_in_validation_are_known() -> None:
    values = ["rare" if i == 5 else "ab"[i % 2] for i in range(200)]
    rows = Rows({"x": ("int4", list(range(200))), "y": ("text", values)})
    for seed in range(20):
        prepared = rows.prepare(seed=seed, validation=0.5)
        assert prepared.fitted.preprocessing.labels == ("a", "b", "rare")
        targets = np.concatenate([prepared.dataset.training.target, prepared.dataset.validation.target])
        assert np.bincount(targets).tolist() == [100, 99, 1]
