"""Parts of the ranks: of every batch the same rows as one process has, and what a rank must not do alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import OutOfDeviceMemoryError, TrainingError
from pg_tensile.execution.data import batches
from pg_tensile.execution.data.batches import Batch, Batches, division
from pg_tensile.execution.data.dataset import Table
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.distributed.group import Group, part_of
from pg_tensile.execution.training import steps
from pg_tensile.execution.training.settings import Settings
from tests.unit.execution.training.test_steps import PLAIN, Case
from tests.unit.rows import every_type

CPU = torch.device("cpu")


@given(rows=st.integers(0, 100), ranks=st.integers(1, 9))
def test_parts_are_all_rows_in_nearly_equal_numbers(rows: int, ranks: int) -> None:
    parts = [range(rows)[part_of(rows, rank, ranks)] for rank in range(ranks)]
    assert [row for part in parts for row in part] == list(range(rows))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("rows", "batch_size", "ranks", "expected"),
    [
        (64, 32, 4, (2, 32)),
        (65, 32, 1, (2, 33)),
        (71, 32, 4, (2, 39)),  # of seven rows, one rank would have a single one
        (72, 32, 4, (3, 8)),
        (20, 32, 4, (1, 20)),
        (0, 32, 4, (0, 32)),
    ],
)
def test_the_last_batch_has_two_rows_for_each_rank(
    rows: int, batch_size: int, ranks: int, expected: tuple[int, int]
) -> None:
    assert division(rows, batch_size, ranks) == expected


def test_a_batch_has_a_row_for_each_rank() -> None:
    with pytest.raises(TrainingError, match="a batch of 3 rows cannot be divided among 4 ranks"):
        division(3, 32, 4)
    with pytest.raises(TrainingError, match="4 ranks cannot divide every batch among themselves"):
        Settings(1, 32, ranks=4, lead=(8, 3))


def table(rows: int) -> Table:
    """Return rows whose target is their number, and their weight a half more."""
    numbers = np.arange(rows, dtype=np.float32)
    return Table(Features(numbers[:, None], np.empty((rows, 0), np.int64), ()), numbers, numbers + 0.5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"lead": (7, 9)}, {"full_only": True}], ids=["plain", "lead", "full"])
def test_ranks_divide_every_batch_of_one_process(
    monkeypatch: pytest.MonkeyPatch, ranks: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(batches, "WINDOW_BYTES", 400)  # batches span windows
    monkeypatch.setattr(batches, "BLOCK_BYTES", 40)

    def of(rank: int, count: int) -> Batches:
        monkeypatch.setattr(batches, "rank_here", lambda ranks: rank)
        return Batches(table(93), 20, 1, CPU, False, ranks=count, **options)

    for epoch in (0, 1):
        whole = list(of(0, 1).epoch(epoch))
        parts = [list(of(rank, ranks).epoch(epoch)) for rank in range(ranks)]
        assert {len(part) for part in parts} == {len(whole)} == {of(0, ranks).steps(epoch)}
        for batch, *divided in zip(whole, *parts, strict=True):
            assert torch.equal(batch.target, torch.cat([part.target for part in divided]))
            assert [part.share for part in divided] == [part.rows / batch.rows for part in divided]
            assert all(part.weight is not None and torch.equal(part.weight, part.target + 0.5) for part in divided)
        assert torch.equal(next(of(1, ranks).epoch(epoch, 2)).target, parts[1][2].target)


def test_ranks_divide_the_rows_for_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for rank in range(3):
        monkeypatch.setattr(batches, "rank_here", lambda ranks, rank=rank: rank)
        rows += [batch.target for batch in Batches(table(20), 20, 1, CPU, False, ranks=3).in_order(3)]
    assert torch.cat(rows).tolist() == list(range(20)) and max(map(len, rows)) == 3


def test_a_single_rank_needs_no_group() -> None:
    alone = Group()
    assert (alone.size, alone.rank, alone.seed(-3)) == (1, 0, -3)
    assert alone.summed([1.5]) == [1.5] and alone.of_first("x") == "x"


@pytest.mark.parametrize("collectives", [0, 1])
def test_a_step_that_has_begun_to_exchange_gradients_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, collectives: int
) -> None:
    """Other ranks would not exchange them again."""
    job = Case(every_type(100).prepare(), PLAIN, Settings(1, 32))
    begun = [0]
    asked: list[OutOfDeviceMemoryError] = []
    monkeypatch.setattr(steps, "begun", lambda: begun[0])

    def execute(*arguments: object, **options: object) -> Any:
        begun[0] += collectives
        if not asked:
            raise OutOfDeviceMemoryError("operator 3", 10, 10, 15)
        return torch.zeros(()), (torch.zeros(2, 1),)

    with closing(job.planned(1.0)) as planned:
        planned._renegotiate = asked.append
        batch: Batch = next(Batches(job.prepared.dataset.training, 32, 0, CPU, False).epoch(0))
        attempt: Callable[[], Any] = lambda: planned._execute(execute, True, batch)  # noqa: E731
        if collectives:
            with pytest.raises(OutOfDeviceMemoryError):
                attempt()
            assert not asked
        else:
            attempt()
            assert len(asked) == 1
