"""Rows are divided into training and validation by content, time, group or query, whatever order they come in."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pg_tensile.errors import DataError
from pg_tensile.execution.data import dataset, splits
from pg_tensile.execution.data.columns import Column
from pg_tensile.execution.data.dataset import RowStore
from pg_tensile.execution.data.roles import FLAG, Roles
from pg_tensile.execution.data.splits import Division, Split, described, divide
from tests.examples import examples
from tests.unit.rows import Prepared, Rows

SECOND = 1_000_000


def rows_with(name: str, kind: str, values: Sequence[Any]) -> Rows:
    """Rows whose target is their number, so that each can be recognised."""
    x = [float(number % 7) for number in range(len(values))]
    return Rows({name: (kind, values), "x": ("float8", x), "y": ("float8", [float(i) for i in range(len(values))])})


def sides(prepared: Prepared) -> tuple[list[int], list[int]]:
    """The numbers of the training and of the validation rows, sorted; the target names them."""
    target = prepared.fitted.preprocessing.target
    tables = prepared.dataset.training, prepared.dataset.validation
    training, validation = (sorted(np.rint(t.target * target.std + target.mean).astype(int).tolist()) for t in tables)
    return training, validation


# ---- random ----


def test_a_random_split_depends_on_the_seed_alone_and_is_exact() -> None:
    rows = rows_with("n", "int4", list(range(2000)))
    chosen = [set(sides(rows.prepare(0.3, seed=seed))[1]) for seed in (0, 1, -1)]
    assert [len(side) for side in chosen] == [600] * 3
    assert len(chosen[0] & chosen[1]) == pytest.approx(180, abs=60) and chosen[0] != chosen[2]
    order = np.random.default_rng(0).permutation(2000).tolist()
    assert set(sides(rows.prepare(0.3, order=order))[1]) == chosen[0]
    assert sides(rows.prepare(0.0))[1] == []


def shares(prepared: Prepared) -> tuple[Counter[float], Counter[float]]:
    """Numbers of training and of validation rows by label."""
    tables = prepared.dataset.training, prepared.dataset.validation
    training, validation = (Counter(table.target.tolist()) for table in tables)
    return training, validation


def many_rows(rows: int) -> RowStore:
    """Rows of a number and one of three labels; every tenth is the same as the one before."""
    random = np.random.default_rng(0)
    store = RowStore([Column("x", "float8"), Column("y", "int4", target=True)], 1 << 30, "/tmp")
    size = 100_000
    for _ in range(rows // size):
        hashes = random.integers(0, 1 << 64, size, np.uint64)
        hashes[9::10] = hashes[8::10]
        nulls = bytes((size + 7) // 8)
        labels = (hashes % np.uint64(3)).astype("<i4")
        store.add(size, [hashes.tobytes(), nulls, random.random(size).tobytes(), nulls, labels.tobytes()])
    store.finish(rows, "", [])
    return store


@pytest.mark.long
@pytest.mark.parametrize("classify", [False, True])
def test_a_random_split_takes_no_more_memory_for_more_rows(classify: bool) -> None:
    def peak_bytes(rows: int) -> int:
        store = many_rows(rows)
        tracemalloc.start()
        try:
            divide(store, Split(0, 0.2), Roles.of(store.columns), classify)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(10_000_000) <= 1.05 * peak_bytes(1_000_000)


LABELS: dict[str, list[Any]] = {
    "text": ["no", "yes", "perhaps", ""],
    "bool": [False, True],
    "int4": [-5, 0, 7, 9],
    "float8": [-1.5, 0.0, 2.0],
}


@pytest.mark.parametrize("kind", LABELS)
def test_each_class_has_its_share_on_both_sides_even_of_equal_rows(kind: str) -> None:
    @examples(10, long=200)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=2, max_size=12),
        st.floats(0.01, 0.9),
        st.integers(0, 99),
    )
    def check(cells: list[tuple[int, int]], share: float, seed: int) -> None:
        """Cells of rows that are all equal, each of one class."""
        values = LABELS[kind]
        labels = [values[label % len(values)] for label, count in cells for _ in range(count)]
        assume(len(set(labels)) > 1)
        cell = [number for number, (_, count) in enumerate(cells) for _ in range(count)]
        rows = Rows({"cell": ("int4", cell), "y": (kind, labels)})
        prepared = rows.prepare(share, seed=seed, task="classification")
        training, validation = shares(prepared)
        for label, count in (training + validation).items():
            expected = min(max(round(share * count), 1), count - 1)
            assert validation[label] == expected
        order = np.random.default_rng(seed).permutation(len(labels)).tolist()
        assert shares(rows.prepare(share, seed=seed, task="classification", order=order)) == (training, validation)

    check()


def test_the_rows_of_a_cell_are_divided_whatever_their_label() -> None:
    """A validation part has the shares of yes and no that a cell has, not one of both only."""
    cells = [number // 1000 for number in range(24_000)]
    labels = [number % 1000 < 100 + 800 * cell / 23 for number, cell in enumerate(cells)]
    prepared = Rows({"cell": ("int4", cells), "y": ("bool", labels)}).prepare(0.2)
    validation = prepared.dataset.validation
    for cell in np.unique(validation.features.numeric[:, 0]):
        within = validation.features.numeric[:, 0] == cell
        assert within.sum() == pytest.approx(200, abs=60)
    of_cells = [
        validation.target[validation.features.numeric[:, 0] == cell].mean()
        for cell in np.unique(validation.features.numeric[:, 0])
    ]
    assert np.allclose(sorted(of_cells), [0.1 + 0.8 * cell / 23 for cell in range(24)], atol=0.12)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_equal_rows_are_divided(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "BLOCK_ROWS", (16, 16))  # copies come in several blocks
    rows = Rows({"x": ("int4", [1] * count), "y": ("float8", [2.0] * count)}).store()
    for share in (0.2, 0.9):
        division = divide(rows, Split(0, share), Roles.of(rows.columns))
        validation = sum(int(division.validation_rows(block).sum()) for block in rows.blocks())
        assert validation == (min(max(round(share * count), 1), count - 1) if count > 1 else 0)


def test_many_classes_of_few_rows_are_divided_in_smaller_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MOST_COUNTS", 1 << 11)
    labels = [f"label {number % 500}" for number in range(1500)] + ["single"]
    prepared = Rows({"x": ("int4", [*range(1501)]), "y": ("text", labels)}).prepare(0.34)
    training, validation = shares(prepared)
    assert set(validation.values()) == {1} and len(validation) == 500 and sorted(training.values())[:2] == [1, 2]


# ---- time ----

TIMES = st.lists(
    st.integers(-(2**62), 2**62) | st.integers(0, 12).map(lambda day: day * 86_400 * SECOND), min_size=4, max_size=60
).filter(lambda times: len(set(times)) > 1)


@examples(15)
@example([5, 5, 5, 9], 0.2, 1)
@example([3, 9, 9, 9], 0.2, 1)
@given(TIMES, st.floats(0.01, 0.9), st.integers(0, 1000))
def test_the_newest_rows_validate_whatever_order_they_come_in(times: list[int], share: float, shuffle: int) -> None:
    rows = rows_with("t", "timestamp", times)
    prepared = rows.prepare(share, split_by="t")
    training, validation = sides(prepared)
    assert training and validation and max(times[i] for i in training) < min(times[i] for i in validation)
    order = np.random.default_rng(shuffle).permutation(len(times)).tolist()
    assert sides(rows.prepare(share, seed=7, split_by="t", order=order)) == (training, validation)
    wanted = min(max(round(share * len(times)), 1), len(times) - 1)
    boundary = sorted(times)[-wanted]
    newer = sum(time > boundary for time in times)
    assert len(validation) in (newer, wanted) or newer == 0  # rows of the boundary's time stay together


def test_a_threshold_is_text_and_the_time_stays_a_feature() -> None:
    day = 86_400 * SECOND
    times = [number * day for number in range(10)]
    prepared = rows_with("t", "timestamp", times).prepare(0.2, split_by="t")
    assert [feature.name for feature in prepared.fitted.preprocessing.features] == ["t", "x"]
    assert described(prepared.fitted.division, 8, 2) == {
        "by": "time",
        "column": "t",
        "threshold": "2000-01-09T00:00:00",
        "training_rows": 8,
        "validation_rows": 2,
    }
    fine = rows_with("t", "timestamp", [-1, -2_500_000]).prepare(0.5, split_by="t")
    assert fine.fitted.division.threshold == "1999-12-31T23:59:59.999999"


def test_a_tie_at_the_threshold_trains_unless_nothing_would_validate() -> None:
    training, validation = sides(rows_with("t", "timestamp", [1, 2, 2, 2, 3]).prepare(0.4, split_by="t"))
    assert (training, validation) == ([0, 1, 2, 3], [4])
    training, validation = sides(rows_with("t", "timestamp", [1, 2, 2, 2, 2]).prepare(0.4, split_by="t"))
    assert (training, validation) == ([0], [1, 2, 3, 4])


# ---- groups ----

GROUPS = [
    ("text", st.sampled_from(["", "a", "ä", "b" * 50, "c", "d"])),
    ("int4", st.integers(-3, 3)),
    ("float8", st.sampled_from([0.0, -0.0, 1.5, math.inf, math.nan])),
    ("bool", st.booleans()),
]


def same(value: Any) -> Any:
    return "nan" if value != value else value


@pytest.mark.parametrize(("kind", "values"), GROUPS, ids=[kind for kind, _ in GROUPS])
def test_a_group_is_on_one_side_whatever_order_its_rows_come_in(kind: str, values: st.SearchStrategy[Any]) -> None:
    @examples(10)
    @given(st.lists(values, min_size=2, max_size=60).filter(lambda v: len(set(map(same, v))) > 1), st.integers(0, 99))
    def check(groups: list[Any], seed: int) -> None:
        rows = rows_with("g", kind, groups)
        prepared = rows.prepare(0.3, seed=seed, split_by="g")
        training, validation = sides(prepared)
        of_training, of_validation = ({same(groups[i]) for i in side} for side in (training, validation))
        assert training and validation and of_training.isdisjoint(of_validation)
        assert [feature.name for feature in prepared.fitted.preprocessing.features] == ["x"]
        order = np.random.default_rng(seed).permutation(len(groups)).tolist()
        assert sides(rows.prepare(0.3, seed=seed, split_by="g", order=order)) == (training, validation)

    check()


def test_groups_keep_the_share_and_depend_on_the_seed() -> None:
    rng = np.random.default_rng(0)
    groups = [f"customer {number}" for number in rng.integers(0, 300, 3000)]
    chosen = [set(sides(rows_with("g", "text", groups).prepare(0.2, seed=s, split_by="g"))[1]) for s in (0, 1)]
    largest = max(Counter(groups).values())
    assert all(abs(len(side) - 600) <= largest for side in chosen) and chosen[0] != chosen[1]


def test_a_huge_group_does_not_validate_if_another_order_avoids_it() -> None:
    groups = ["huge"] * 800 + [f"g{number}" for number in range(200)]
    for seed in range(10):
        training, validation = sides(rows_with("g", "text", groups).prepare(0.1, seed=seed, split_by="g"))
        assert 0 in training and 50 <= len(validation) <= 150


def test_many_groups_take_no_memory_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "BLOCK_ROWS", (64, 128))
    monkeypatch.setattr(dataset, "BLOCK_BYTES", 1)
    ids = np.random.default_rng(3).integers(0, 2**62, 3000).tolist()
    prepared = rows_with("g", "int8", ids).prepare(0.25, split_by="g")
    assert prepared.fitted.validation_rows == 750


# ---- flags, errors ----


def test_rows_of_the_validation_query_validate() -> None:
    flags = [number % 4 == 3 for number in range(20)]
    rows = rows_with(FLAG, "bool", flags)
    prepared = rows.prepare(0.2, flagged=True)
    assert sides(prepared)[1] == [number for number in range(20) if flags[number]]
    assert [feature.name for feature in prepared.fitted.preprocessing.features] == ["x"]
    assert described(prepared.fitted.division, 15, 5)["by"] == "query"


@pytest.mark.parametrize("name", ["t", "g"])
def test_without_validation_a_split_column_keeps_its_role(name: str) -> None:
    rows = rows_with(name, "timestamp" if name == "t" else "text", [5, None, 7] if name == "t" else ["a", None, "b"])
    prepared = rows.prepare(0.0, split_by=name)
    division: Division = prepared.fitted.division
    assert prepared.fitted.validation_rows == 0 and division.threshold is None
    assert division.by == ("time" if name == "t" else "group")
    assert len(prepared.fitted.preprocessing.features) == (2 if name == "t" else 1)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("text", ["a"] * 9, 'all 9 rows have the same group "c", so they cannot be divided by it'),
        ("int4", [3] * 9, 'all 9 rows have the same group "c"'),
        ("timestamp", [3] * 9, 'all 9 rows have the same time "c"'),
        ("text", ["a", None, "b", None], 'the split column "c" is null in 2 of 4 rows'),
        ("timestamp", [1, 2, None], 'the split column "c" is null or infinite in 1 of 3 rows'),
        ("text", ["a"], "only one row with a target"),
        ("int4[]", [[1], [2]], 'the split column "c" is an array'),
    ],
)
def test_columns_that_cannot_divide_are_errors(kind: str, values: Sequence[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        rows_with("c", kind, values).prepare(split_by="c")
    assert error.value.hint


def test_wrong_roles_are_errors() -> None:
    rows = rows_with("c", "text", ["a", "b"])
    for name, message in (("z", 'the query has no split column "z"'), ("y", 'the split column "y" is the target')):
        with pytest.raises(DataError, match=message):
            rows.prepare(split_by=name)
    lonely = Rows({"g": ("text", ["a", "b"]), "y": ("float8", [1.0, 2.0])})
    with pytest.raises(DataError, match="the query has no feature besides the target"):
        lonely.prepare(split_by="g")
    nothing = Rows({"t": ("timestamp", [1, 2]), "y": ("float8", [None, None])})
    with pytest.raises(DataError, match='the target "y" is null in all 2 rows'):
        nothing.prepare(split_by="t")


@pytest.mark.parametrize(("flag", "message"), [(False, "the validation query returned"), (True, "the training query")])
def test_a_query_without_a_target_is_an_error(flag: bool, message: str) -> None:
    with pytest.raises(DataError, match=f"{message}.*no row with a target"):
        rows_with(FLAG, "bool", [flag] * 5).prepare(flagged=True)
