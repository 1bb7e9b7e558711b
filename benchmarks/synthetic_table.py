"""A table with a known function behind it: 12 numbers, 8 categories, and two targets with noise.

Numbers have different scales and tails, some are rounded, and two are null now and then; categories have 2 to 100
values of unequal frequency. `amount` is a smooth function of the numbers, with interactions, plus effects of the
categories and of their products with numbers, plus noise whose size depends on the row; `late` is one of two
labels, with a probability that follows from another such function.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

NUMBERS = 12
CARDINALITIES = (2, 3, 5, 8, 12, 20, 40, 100)
FEATURES = (*(f"n{i}" for i in range(NUMBERS)), *(f"c{i}" for i in range(len(CARDINALITIES))))
TARGETS = {"regression": "amount", "classification": "late"}
NULLS = 0.05  # share of the nulls in n10 and n11


def synthetic_table(rows: int, seed: int = 0) -> pd.DataFrame:
    """Return rows with the columns FEATURES and the two targets."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, NUMBERS))
    z[:, 5] = 0.7 * z[:, 4] + 0.7 * z[:, 5]  # correlated
    codes = [np.minimum((rng.pareto(1.0, rows) * size / 6).astype(int), size - 1) for size in CARDINALITIES]
    effects = [rng.normal(size=size) for size in CARDINALITIES]
    smooth = (
        2.0 * np.sin(1.5 * z[:, 0]) * z[:, 1]
        + np.abs(z[:, 2])
        + z[:, 3] * (z[:, 4] > 0)
        + 0.5 * z[:, 6] ** 2
        + 0.8 * z[:, 7]
    )
    of_categories = sum(effect[code] for effect, code in zip(effects[2:], codes[2:], strict=True)) / 2
    products = effects[6][codes[6]] * z[:, 8] + (codes[0] == 1) * z[:, 9]
    signal = smooth + of_categories + products
    noise = rng.normal(size=rows) * (0.3 + 0.5 * np.abs(z[:, 3]))
    score = np.sin(2.0 * z[:, 0]) + z[:, 1] * z[:, 2] + effects[7][codes[7]] + effects[3][codes[3]] * z[:, 4]
    columns = {f"n{i}": _number(i, z[:, i]) for i in range(NUMBERS)}
    for i in (10, 11):
        columns[f"n{i}"][rng.random(rows) < NULLS] = np.nan
    columns |= {f"c{i}": np.char.add(f"v{i}_", code.astype(str)).astype(object) for i, code in enumerate(codes)}
    late = rng.random(rows) < 1.0 / (1.0 + np.exp(-2.5 * score))
    return pd.DataFrame(columns | {"amount": signal + noise, "late": np.where(late, "late", "on time").astype(object)})


def _number(index: int, z: np.ndarray) -> np.ndarray:
    """Return a column [rows] of the scale and shape that belong to its index, for standard normal numbers."""
    shapes = (z, 100.0 + 20.0 * z, np.exp(z), np.round(10.0 * z), 1e6 * np.exp(0.5 * z), z**3)
    return np.array(shapes[index % len(shapes)], np.float64)
