"""Which of many ranges of operators that cover a certain one comes first."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple)


class Cover(Generic[Key]):
    """Keys with the ranges of operators that they cover: a segment tree with a heap of keys in each node. Keys are
    unique, also among those that were removed before. `insert` takes O(log² n), `first` O(log n), `remove` O(1)."""

    def __init__(self, operators: int) -> None:
        self._operators = operators
        self._heaps: list[list[Key]] = [[] for _ in range(2 * operators)]
        self._present: set[Key] = set()

    def insert(self, key: Key, ranges: Iterable[tuple[int, int]]) -> None:
        """`key` covers the operators first … last of each of `ranges`."""
        self._present.add(key)
        for first, last in ranges:
            left, right = first + self._operators, last + self._operators + 1
            while left < right:
                if left & 1:
                    heappush(self._heaps[left], key)
                    left += 1
                if right & 1:
                    right -= 1
                    heappush(self._heaps[right], key)
                left, right = left >> 1, right >> 1

    def remove(self, key: Key) -> None:
        self._present.discard(key)

    def first(self, operator: int) -> Key | None:
        """The smallest key that covers `operator`."""
        found: Key | None = None
        node = operator + self._operators
        while node:
            heap = self._heaps[node]
            while heap and heap[0] not in self._present:
                heappop(heap)
            if heap and (found is None or heap[0] < found):
                found = heap[0]
            node >>= 1
        return found
