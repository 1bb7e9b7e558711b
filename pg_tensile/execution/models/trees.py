"""Decision trees of a gradient-boosted model: their JSON, and their evaluation in numpy.

A model's outputs are sums of leaves: each tree adds the value of one leaf to one output. A node sends a row to the left
if the row's number in a column is at most a threshold, or if its code is one of a set.

`Scorer` evaluates all trees at once, column by column (QuickScorer, Lucchese et al. 2015). Each tree has a word whose
bits are its leaves, from left to right; a node that sends the row to the right clears the bits of the leaves to its
left, and the lowest bit that remains is the row's leaf. What all nodes of a column clear depends only on the place of
the row's number among the column's thresholds, so it is looked up in a table. Needs numpy only.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_LEAVES = 32  # of a tree: the bits of a word
ALL = np.uint32(0xFFFFFFFF)
NODES = ("root", "feature", "threshold", "left", "right", "value", "set", "sets")  # arrays of `Forest.nodes`
PART_WORDS = 1 << 16  # of the rows that are evaluated at once, so that they stay in the processor's cache


class Tree(NamedTuple):
    """Nodes of a tree [nodes], parents before their children, and the values of its leaves [nodes + 1].

    `left` and `right` are nodes or, as −1 − leaf, leaves. A node has the codes that go left, or None if it compares
    numbers: at most `threshold`, a float32, goes left."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    codes: tuple[tuple[int, ...] | None, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]


class Forest(NamedTuple):
    """Trees, of which the one with number i adds to output i modulo `outputs`, for rows of `columns` numbers."""

    columns: int
    outputs: int
    trees: tuple[Tree, ...]

    def to_json(self) -> bytes:
        """Return the JSON, in ASCII."""
        trees = [tree._asdict() for tree in self.trees]
        return json.dumps({"columns": self.columns, "outputs": self.outputs, "trees": trees}).encode("ascii")

    @property
    def depth(self) -> int:
        """Most nodes between a root and a leaf."""
        return max(map(_depth, self.trees), default=0)

    def nodes(self, codes: int) -> dict[str, NDArray[Any]]:
        """Return all nodes and leaves as arrays, for an evaluation level by level; the children of a leaf are itself.

        `root` [trees] is the node with which each tree begins. `set` is the row in `sets` [sets, codes] of the codes
        that go left; row 0 stands for a node that compares numbers."""
        return _nodes(self, codes)

    @staticmethod
    def from_json(data: bytes) -> Forest:
        """Return the forest, whose evaluation touches nothing but its own arrays. Raises ValueError."""
        try:
            fields = json.loads(data)
            columns, outputs = fields["columns"], fields["outputs"]
            trees = tuple(_checked(tree, columns) for tree in fields["trees"])
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the trees are damaged: {error!r}") from error
        if type(columns) is not int or type(outputs) is not int or outputs < 1 or len(trees) % outputs:
            raise ValueError(f"{len(trees)} trees cannot have {outputs!r} outputs")
        return Forest(columns, outputs, trees)


def _checked(fields: dict[str, Any], columns: int) -> Tree:
    """Return the tree of its JSON. Raises ValueError unless every row of `columns` numbers reaches one leaf."""
    feature, left, right = (tuple(fields[name]) for name in ("feature", "left", "right"))
    threshold, value = (tuple(map(float, fields[name])) for name in ("threshold", "value"))
    codes = tuple(None if item is None else tuple(item) for item in fields["codes"])
    nodes = len(feature)
    integers = [*feature, *left, *right, *(code for item in codes if item for code in item)]
    if {nodes} != {len(threshold), len(codes), len(left), len(right), len(value) - 1} or nodes >= MOST_LEAVES:
        raise ValueError("a tree's fields differ in length, or it has too many leaves")
    if any(type(number) is not int for number in integers) or not np.isfinite((*threshold, *value)).all():
        raise ValueError("a tree's fields are not the numbers that they should be")
    if not all(0 <= column < columns for column in feature) or any(code < 0 for item in codes for code in item or ()):
        raise ValueError("a tree compares a column or a code that no row has")
    if sorted((*left, *right)) != [*range(-nodes - 1, 0), *range(1, nodes)] and nodes:
        raise ValueError("a tree's nodes and leaves do not have one parent each")
    if any(0 <= child <= node for side in (left, right) for node, child in enumerate(side)):
        raise ValueError("a tree's node comes before its parent")
    return Tree(feature, threshold, codes, left, right, value)


def float32_at_most(threshold: float) -> float:
    """Return the largest float32 that is not above the threshold, which divides float32 numbers in the same way."""
    rounded = np.float32(threshold)
    return float(rounded if rounded <= threshold else np.nextafter(rounded, np.float32(-np.inf)))


class Scorer:
    """Evaluation of a forest. `cardinalities`: numbers of codes, by column that has codes."""

    def __init__(self, forest: Forest, cardinalities: dict[int, int]) -> None:
        self._outputs = forest.outputs
        self._values = np.zeros((len(forest.trees), MOST_LEAVES))
        self._starts = np.arange(len(forest.trees), dtype=np.int64) * MOST_LEAVES
        split: dict[int, list[tuple[int, float, tuple[int, ...] | None, np.uint32]]] = {}
        for number, tree in enumerate(forest.trees):
            masks, order = _masks(tree)
            self._values[number, : len(order)] = np.array(tree.value)[order]
            for node, feature in enumerate(tree.feature):
                split.setdefault(feature, []).append((number, tree.threshold[node], tree.codes[node], masks[node]))
        # of each column that a node compares: its distinct thresholds, or None for codes, and a word for each of the
        # places between them, or each code, and each tree
        self._columns: list[tuple[int, NDArray[np.float32] | None, NDArray[np.uint32]]] = []
        for feature, nodes in sorted(split.items()):
            cardinality = cardinalities.get(feature)
            if cardinality is None:
                thresholds = np.unique(np.array([threshold for _, threshold, _, _ in nodes], np.float32))
                table = np.full((len(thresholds) + 1, len(forest.trees)), ALL)
                places = np.searchsorted(thresholds, np.array([threshold for _, threshold, _, _ in nodes], np.float32))
                for place, (number, _, _, mask) in zip(places.tolist(), nodes, strict=True):
                    table[place + 1, number] &= mask
                np.bitwise_and.accumulate(table, axis=0, out=table)
                self._columns.append((feature, thresholds, table))
            else:
                table = np.full((cardinality, len(forest.trees)), ALL)
                for number, _, codes, mask in nodes:
                    goes_right = np.ones(cardinality, np.bool_)
                    goes_right[[code for code in codes or () if code < cardinality]] = False
                    table[goes_right, number] &= mask
                self._columns.append((feature, None, table))

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._values.nbytes + sum(table.nbytes for _, _, table in self._columns)

    def __call__(self, columns: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the outputs [rows, outputs] for numbers and codes [rows, columns]; a row's bits are its own."""
        rows = len(columns)
        size = max(1, PART_WORDS // max(len(self._values), 1))
        result = np.empty((rows, self._outputs))
        for start in range(0, rows, size):
            result[start : start + size] = self._part(columns[start : start + size])
        return result

    def _part(self, columns: NDArray[np.float32]) -> NDArray[np.float64]:
        words = np.full((len(columns), len(self._values)), ALL)
        taken = np.empty_like(words)
        for feature, thresholds, table in self._columns:
            x = columns[:, feature]
            places = x.astype(np.int64) if thresholds is None else np.searchsorted(thresholds, x)
            words &= np.take(table, places, axis=0, out=taken, mode="clip")
        lowest = words & (~words + np.uint32(1))
        leaves = np.bitwise_count(lowest - np.uint32(1)) + self._starts
        values = self._values.take(leaves)
        # [rows, outputs, rounds]: a sum along the last axis of an array in order has the same bits for any rows
        by_output = np.ascontiguousarray(values.reshape(len(columns), -1, self._outputs).swapaxes(1, 2))
        summed: NDArray[np.float64] = by_output.sum(axis=2)
        return summed


def _masks(tree: Tree) -> tuple[list[np.uint32], list[int]]:
    """Return the word of each node, without the leaves to its left, and the leaves from left to right."""
    nodes = len(tree.feature)
    order: list[int] = []
    masks = [ALL] * nodes
    pending: list[tuple[int, int | None]] = [(0 if nodes else -1, None)]
    while pending:  # in order; a node comes again when its left side is done, with where that began
        node, began = pending.pop()
        if node < 0:
            order.append(-1 - node)
        elif began is None:
            pending += [(tree.right[node], None), (node, len(order)), (tree.left[node], None)]
        else:
            cleared = (1 << len(order)) - (1 << began)
            masks[node] = np.uint32(0xFFFFFFFF ^ cleared)
    return masks, order


def _nodes(forest: Forest, codes: int) -> dict[str, NDArray[Any]]:
    feature: list[int] = []
    threshold: list[float] = []
    value: list[float] = []
    sides: tuple[list[int], list[int]] = ([], [])
    number: list[int] = []
    sets: list[tuple[int, ...]] = [()]
    roots: list[int] = []
    for tree in forest.trees:
        start, nodes = len(feature), len(tree.feature)
        leaves = range(start + nodes, start + 2 * nodes + 1)
        roots.append(start)
        for side, children in zip(sides, (tree.left, tree.right), strict=True):
            side += [start + (child if child >= 0 else nodes - 1 - child) for child in children]
            side += leaves
        feature += [*tree.feature, *(0 for _ in leaves)]
        threshold += [*tree.threshold, *(0.0 for _ in leaves)]
        value += [*(0.0 for _ in tree.feature), *tree.value]
        for chosen in tree.codes:
            number.append(0 if chosen is None else len(sets))
            sets += [] if chosen is None else [chosen]
        number += [0 for _ in leaves]
    table = np.zeros((len(sets), codes), np.bool_)
    for row, chosen in enumerate(sets):
        table[row, [code for code in chosen if code < codes]] = True
    left, right = sides
    indices = {"root": roots, "feature": feature, "left": left, "right": right, "set": number}
    arrays: dict[str, NDArray[Any]] = {name: np.array(values, np.int64) for name, values in indices.items()}
    return arrays | {"threshold": np.array(threshold, np.float32), "value": np.array(value), "sets": table}


def _depth(tree: Tree) -> int:
    """Return the most nodes between the root and a leaf."""
    depths = [1] * len(tree.feature)
    for node, children in enumerate(zip(tree.left, tree.right, strict=True)):
        for child in children:
            if child >= 0:
                depths[child] = depths[node] + 1
    return max(depths, default=0)
