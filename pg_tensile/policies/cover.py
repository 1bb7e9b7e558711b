"""Which of many ranges of operators that cover a certain one comes first."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple)


class Cover(Generic[Key]):
    """Keys with the ranges of operators that they cover: a segment tree with a heap of keys in each node. Keys are
    unique, also among those that were removed before. `insert` takes O(log n), `remove` O(1), `first` O(log n) and what
    it takes to order the keys that have come to these nodes since they were looked at; most nodes never are."""

    def __init__(self, operators: int) -> None:
        self._operators = operators
        self._heaps: list[list[Key]] = [[] for _ in range(2 * operators)]
        self._new: list[list[Key]] = [[] for _ in range(2 * operators)]  # what is not in the heap yet
        self._present: set[Key] = set()

    def insert(self, key: Key, ranges: Iterable[tuple[int, int]]) -> None:
        """`key` covers the operators first … last of each of `ranges`."""
        self._present.add(key)
        new = self._new
        for first, last in ranges:
            left, right = first + self._operators, last + self._operators + 1
            while left < right:
                if left & 1:
                    new[left].append(key)
                    left += 1
                if right & 1:
                    right -= 1
                    new[right].append(key)
                left >>= 1
                right >>= 1

    def remove(self, key: Key) -> None:
        self._present.discard(key)

    def first(self, operator: int) -> Key | None:
        """The smallest key that covers `operator`."""
        found: Key | None = None
        node = operator + self._operators
        while node:
            heap = self._heaps[node]
            if self._new[node]:
                self._order(node)
            while heap and heap[0] not in self._present:
                heappop(heap)
            if heap and (found is None or heap[0] < found):
                found = heap[0]
            node >>= 1
        return found

    def _order(self, node: int) -> None:
        heap, new = self._heaps[node], self._new[node]
        if heap:
            for key in new:
                heappush(heap, key)
        else:
            heap += new
            heapify(heap)
        new.clear()
