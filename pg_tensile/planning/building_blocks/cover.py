"""Search for the smallest of many keys whose ranges of operators cover a given operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple)


class Cover(Generic[Key]):
    """Keys with the ranges of operators that they cover: a segment tree with a heap of keys in each node.

    Keys are unique, also among those that were removed before. A range moves down the tree only as far as queries have
    gone: planning queries few operators, the peaks. `insert` and `remove` take O(1). `first` sorts ranges that are
    waiting at the nodes on its way into these nodes or their children, in at most O(log² n) per key; it takes O(log n)
    if none is waiting.
    """

    def __init__(self, operators: int) -> None:
        self._last = (1 << (operators - 1).bit_length()) - 1  # last operator of the root's range
        self._heaps: defaultdict[int, list[Key]] = defaultdict(list)  # by node; the children of k are 2k and 2k + 1
        self._waiting: defaultdict[int, list[tuple[int, int, Key]]] = defaultdict(list)  # by node: not sorted yet
        self._present: set[Key] = set()

    def insert(self, key: Key, ranges: Iterable[tuple[int, int]]) -> None:
        """Add `key`, which covers the operators first … last of each of `ranges`."""
        self._present.add(key)
        self._waiting[1] += [(first, last, key) for first, last in ranges if first <= last]

    def remove(self, key: Key) -> None:
        self._present.discard(key)

    def first(self, operator: int) -> Key | None:
        """Return the smallest key that covers `operator`, or None."""
        smallest: Key | None = None
        node, low, high = 1, 0, self._last
        while True:
            heap = self._heaps[node]
            if node in self._waiting:
                self._sort(node, low, high, heap)
            while heap and heap[0] not in self._present:
                heappop(heap)
            if heap and (smallest is None or heap[0] < smallest):
                smallest = heap[0]
            if low == high:
                return smallest
            middle = (low + high) >> 1
            if operator <= middle:
                node, high = 2 * node, middle
            else:
                node, low = 2 * node + 1, middle + 1

    def _sort(self, node: int, low: int, high: int, heap: list[Key]) -> None:
        """Move the ranges that wait at the node of the operators low … high into its heap or to its children."""
        middle = (low + high) >> 1
        for waiting in self._waiting.pop(node):
            first, last, key = waiting
            if first <= low and high <= last:
                heappush(heap, key)
                continue
            if first <= middle:
                self._waiting[2 * node].append(waiting)
            if last > middle:
                self._waiting[2 * node + 1].append(waiting)
