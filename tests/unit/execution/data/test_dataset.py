"""Rows in, tables out: independent of order, chunking and where the data lies."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import DataError, SpoolError
from pg_tensile.execution.data import dataset
from pg_tensile.execution.data.columns import Column, Values, columns_from_header, concatenate, cut, decode, take
from pg_tensile.execution.data.dataset import Dataset, RowStore, Table
from tests.unit.rows import Rows, every_type


def arrays(table: Table) -> list[np.ndarray]:
    return [*table.features.flat(), table.target]


def assert_same(dataset: Dataset, other: Dataset) -> None:
    ours = arrays(dataset.training) + arrays(dataset.validation)
    theirs = arrays(other.training) + arrays(other.validation)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_neither_order_nor_chunks_of_the_scan_show(size: int) -> None:
    rows = every_type(500)
    expected = rows.prepare()
    order = np.random.default_rng(size).permutation(rows.count).tolist()
    store = rows.store(order, size)
    assert store.dictionaries == expected.store.dictionaries
    shuffled = rows.prepare(order=order)
    assert shuffled.fitted.preprocessing == expected.fitted.preprocessing
    assert_same(shuffled.dataset, expected.dataset)


def test_spooled_data_equals_data_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "BLOCK_ROWS", (64, 128))
    monkeypatch.setattr(dataset, "MIN_RUN_BYTES", 0)
    rows = every_type(2000)
    in_memory = rows.prepare()
    rows.cache_bytes, rows.spool_directory = 20_000, str(tmp_path)
    spooled = rows.prepare()
    assert spooled.store.spooled and spooled.dataset.spooled
    assert not in_memory.store.spooled and not in_memory.dataset.spooled
    assert len(list(spooled.store.blocks())) > 10
    assert spooled.fitted.preprocessing == in_memory.fitted.preprocessing
    assert_same(spooled.dataset, in_memory.dataset)


def test_spool_files_have_no_name(tmp_path: Path) -> None:
    rows = every_type(500)
    rows.cache_bytes, rows.spool_directory = 10_000, str(tmp_path)
    prepared = rows.prepare()
    assert prepared.dataset.spooled
    assert list(tmp_path.iterdir()) == []
    mapped = Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/" in mapped and all(
        "(deleted)" in line for line in mapped.splitlines() if str(tmp_path) in line
    )


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="could not spool 1152921504606846976 bytes") as error:
        dataset.allocate([((1 << 60,), np.uint8)], str(tmp_path))
    assert "disk space" in str(error.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_spool_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="No such file"):
        dataset.allocate([((8,), np.uint8)], os.path.join(tmp_path, "missing"))


def test_hashes_tell_equal_rows_apart_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0] * 300 + [2.0] * 5 + [float(i) for i in range(3, 40)]
    rows = Rows({"x": ("float8", values), "y": ("float8", [2 * x for x in values])})
    store = rows.store()
    (whole,) = store.blocks()
    monkeypatch.setattr(dataset, "BLOCK_ROWS", (16, 16))
    monkeypatch.setattr(dataset, "BLOCK_BYTES", 1)
    blocks = list(store.blocks())
    assert max(block.rows for block in blocks) <= 16
    hashes = np.concatenate([block.hashes for block in blocks])
    assert hashes.tolist() == whole.hashes.tolist() and len(set(hashes.tolist())) == len(values)


def test_rows_come_in_hash_order() -> None:
    store = every_type(300).store(size=7)
    hashes = np.concatenate([block.hashes for block in store.blocks()])  # of single rows, which keep theirs
    assert (np.diff(hashes.astype(object)) >= 0).all()


def test_the_times_are_those_of_the_validation_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(0).permutation(3000).tolist()
    rows = Rows({"t": ("timestamp", times), "y": ("float8", [time / 8 for time in times])})
    monkeypatch.setattr(dataset, "BLOCK_ROWS", (500, 500))
    prepared = rows.prepare(0.5, split_by="t")
    target = prepared.fitted.preprocessing.target
    found, encoded = prepared.dataset.validation_times, prepared.dataset.validation.target
    assert found is not None and np.allclose(found / 8, encoded * target.std + target.mean, rtol=1e-5)
    monkeypatch.setattr(dataset, "SAMPLED_ROWS", 700)
    first = rows.prepare(0.5, split_by="t").dataset.validation_times
    assert first is not None and first.tolist() == found[:700].tolist()
    assert rows.prepare(0.5).dataset.validation_times is None


def test_text_codes_are_sorted_by_string() -> None:
    rows = Rows({"c": ("text", ["b", None, "ä", "a", "b"]), "y": ("float8", [1, 2, 3, 4, 5])})
    store = rows.store(size=2)
    assert store.dictionaries[0] == ["a", "b", "ä"]
    (block,) = store.blocks()
    by_target = dict(zip(block.columns[1].data.tolist(), block.columns[0].data.tolist(), strict=True))
    assert by_target == {1: 1, 2: -1, 3: 2, 4: 0, 5: 1}


ELEMENTS = st.one_of(st.none(), st.floats(width=32, allow_nan=False))
COLUMN = st.lists(st.one_of(st.none(), st.lists(ELEMENTS, max_size=4)), min_size=1, max_size=12)


@given(COLUMN, st.data())
def test_chunks_of_arrays_keep_their_elements(values: list[list[float | None] | None], data: st.DataObject) -> None:
    rows = Rows({"a": ("float8[]", values), "y": ("int4", list(range(len(values))))})
    size = data.draw(st.integers(1, len(values)))
    chunk = concatenate([decode(rows.header, n, buffers) for n, buffers in rows.frames(size=size)])
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    places = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=8))
    for part, expected in (
        (chunk, values),
        (cut(chunk, start, stop), values[start:stop]),
        (take(chunk, np.array(places, np.intp)), [values[place] for place in places]),
    ):
        assert _unpack(part.columns[0]) == expected


def _unpack(column: Values) -> list[list[float | None] | None]:
    nulls, data, offsets, element_nulls = column
    assert offsets is not None
    elements = [None if element_nulls is not None and element_nulls[i] else x for i, x in enumerate(data.tolist())]
    return [None if null else elements[a:b] for null, a, b in zip(nulls, offsets[:-1], offsets[1:], strict=True)]


def test_buffers_that_do_not_fit_are_refused() -> None:
    rows = Rows({"a": ("int4", [1, 2, 3]), "s": ("int2[]", [[1], [2, 3], None]), "y": ("float8", [1.0, 2.0, 3.0])})
    ((count, buffers),) = rows.frames()
    decode(rows.header, count, buffers)
    broken = [buffers[:-1], [*buffers, b""], [buffers[0][:8], *buffers[1:]]]
    broken += [[*buffers[:i], buffers[i] + bytes(8), *buffers[i + 1 :]] for i in range(len(buffers))]
    for case in broken:
        with pytest.raises(DataError):
            decode(rows.header, count, case)


def test_missing_rows_and_no_rows_are_errors() -> None:
    store = RowStore([Column("a", "int4"), Column("y", "int4", True)], 1 << 20, "/tmp")
    with pytest.raises(DataError, match="returned no rows") as error:
        store.finish(0, "0:0", [])
    assert error.value.hint
    with pytest.raises(DataError, match="0 rows came, but 3 were announced"):
        store.finish(3, "3:0", [])


def test_a_query_needs_one_target_and_a_feature() -> None:
    y = {"name": "y", "type": "int4", "target": True}
    assert columns_from_header([{"name": "x", "type": "text"}, y]) == [Column("x", "text"), Column("y", "int4", True)]
    with pytest.raises(DataError, match="no column besides the target"):
        columns_from_header([y])
    with pytest.raises(DataError, match="exactly one target"):
        columns_from_header([y, y])
    with pytest.raises(DataError, match='"x" has the unknown element type money'):
        columns_from_header([{"name": "x", "type": "money"}, y])


def test_reading_can_be_interrupted_between_blocks() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    rows = every_type(50)
    store = RowStore(rows.header, 1 << 20, "/tmp", poll=stop)
    for count, buffers in rows.frames():
        store.add(count, buffers)
    store.finish(rows.count, "50:0", rows.dictionary_buffers())
    with pytest.raises(Stop):
        next(store.blocks())
