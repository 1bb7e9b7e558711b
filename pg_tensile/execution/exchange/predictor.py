"""Rows of texts, as those of a CSV file, that a model in a file predicts for. Needs numpy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pg_tensile.errors import DataError
from pg_tensile.execution.data.preprocessing import Feature

BATCH = 8192  # rows, as in predict_rows
COLUMNS = ("row_number", "prediction", "label", "probability")

Row = tuple[int, float | None, str | None, float | None]


class Predictor(ABC):
    """A model in a file."""

    features: Sequence[Feature]

    @abstractmethod
    def answers(self, columns: Mapping[str, Sequence[str]], rows: int, first: int) -> Iterator[Row]:
        """Yield COLUMNS of rows, of which `columns` has a text for each row by the feature's name.

        `first` is the number of the first row. Raises DataError for a text that is not a value."""

    def predict(self, header: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[Row]:
        """Yield COLUMNS of each row, whose texts are in the order of the `header`.

        Columns that are not features are ignored. Raises DataError if a feature is missing or a text is not a value."""
        places = self._places(header)
        batch: list[Sequence[str]] = []
        done = 0
        for number, row in enumerate(rows, 1):
            if len(row) != len(header):
                hint = "Quote values that contain commas or line breaks."
                raise DataError(f"row {number} has {len(row)} values for {len(header)} columns", hint=hint)
            batch.append(row)
            if len(batch) == BATCH:
                yield from self._batch(places, batch, done)
                done, batch = done + len(batch), []
        if batch:
            yield from self._batch(places, batch, done)

    def _places(self, header: Sequence[str]) -> dict[str, int]:
        places = {}
        for feature in self.features:
            count = header.count(feature.name)
            if count != 1:
                what = "missing" if count == 0 else "there more than once"
                names = ", ".join(f.name for f in self.features)
                raise DataError(f'feature "{feature.name}" is {what} in the header', hint=f"The model needs: {names}.")
            places[feature.name] = header.index(feature.name)
        return places

    def _batch(self, places: dict[str, int], batch: list[Sequence[str]], done: int) -> Iterator[Row]:
        columns = {name: [row[place] for row in batch] for name, place in places.items()}
        return self.answers(columns, len(batch), done + 1)


def known(number: float) -> float | None:
    """Return the number, None for NaN."""
    return None if np.isnan(number) else number
