"""Moves of tensors to addresses where others of them are."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.runtime.relocation import Move, Relocation, order_of

MEMORY = 64


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges of a memory as (begin, end), which do not overlap."""
    cuts = sorted(draw(st.sets(st.integers(0, MEMORY), max_size=10)))
    return [(begin, end) for begin, end in pairwise(cuts) if draw(st.booleans())]


@st.composite
def moves(draw: st.DrawFn) -> list[Move]:
    """Moves of ranges that do not overlap to ranges that do not overlap."""
    sources = draw(layouts())
    sizes = draw(st.permutations([end - begin for begin, end in sources]))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    targets, at = {}, 0
    for index, gap in zip(draw(st.permutations(range(len(sizes)))), gaps, strict=True):
        targets[index] = at + gap
        at += gap + sources[index][1] - sources[index][0]
    return [Move(begin, targets[index], end - begin) for index, (begin, end) in enumerate(sources)]


@given(moves())
def test_contents_arrive(asked):
    order = order_of(asked)
    memory = list(range(2 * MEMORY + 50))
    expected = {move: memory[move.source : move.source + move.size] for move in asked}
    scratch = [-1] * order.scratch_bytes
    for move in order.first:
        moving = memory[move.source : move.source + move.size]
        if move.scratch is None:
            memory[move.target : move.target + move.size] = moving
        else:
            scratch[move.scratch : move.scratch + move.size] = moving
    for move in order.last:
        assert move.scratch is not None
        memory[move.target : move.target + move.size] = scratch[move.scratch : move.scratch + move.size]
    for move, contents in expected.items():
        assert memory[move.target : move.target + move.size] == contents
    assert len({move.source for move in order.first}) == sum(move.source != move.target for move in asked)


def test_a_circle_takes_the_scratch_memory_of_its_smallest():
    order = order_of([Move(0, 100, 10), Move(100, 0, 30)])
    assert order.scratch_bytes == 10 and len(order.last) == 1
    assert order_of([Move(0, 10, 5), Move(10, 20, 5)]).scratch_bytes == 0
    assert order_of([Move(0, 0, 5)]).first == []


def test_storages_are_moved_as_often_as_asked():
    memory = torch.arange(32, dtype=torch.uint8)
    at, device = memory.data_ptr(), memory.device
    storages = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
    for begin, tensor in zip((0, 8), storages, strict=True):
        tensor.set_(torch._C._construct_storage_from_data_pointer(at + begin, device, 8))
    relocation = Relocation([tensor.untyped_storage() for tensor in storages], [at + 8, at])
    assert relocation.scratch_bytes == 8
    for first in (8, 0):
        relocation.run()
        assert memory[:16].tolist() == [*range(first, first + 8), *range(8 - first, 16 - first)]
    Relocation([], []).run()
