"""Predictions with a model file, without a server: those that `predict_rows` returns for the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pg_tensile.errors import ArchitectureError, DataError
from pg_tensile.execution.data.answers import answers
from pg_tensile.execution.exchange.checking import checked_model
from pg_tensile.execution.exchange.reading import ModelFile
from pg_tensile.execution.exchange.values import inputs_of
from pg_tensile.execution.models.whole import WholeModel
from pg_tensile.rules import ARCHITECTURES

BATCH = 8192  # rows, as in predict_rows
COLUMNS = ("row_number", "prediction", "label", "probability")

Row = tuple[int, float | None, str | None, float | None]


class FilePredictor:
    """The model in a file.

    An architecture with code is refused unless `allow_code`. Raises ModelFileError, ArchitectureError."""

    def __init__(self, file: ModelFile, allow_code: bool = False) -> None:
        type = file.description["architecture"].get("type")
        if not allow_code and ARCHITECTURES.get(type, {}).get("code"):
            hint = "Read the architecture in the file's header; if you trust it, allow its code with --allow-code."
            raise ArchitectureError(f'the model in the file has the architecture "{type}", which runs code', hint=hint)
        with torch.inference_mode():
            self.preprocessing, module = checked_model(
                file.description["architecture"], file.description["preprocessing"], file.contents
            )
            self._model = WholeModel(self.preprocessing, module)

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
                yield from self._answers(places, batch, done)
                done, batch = done + len(batch), []
        if batch:
            yield from self._answers(places, batch, done)

    def _places(self, header: Sequence[str]) -> dict[str, int]:
        places = {}
        for feature in self.preprocessing.features:
            count = header.count(feature.name)
            if count != 1:
                what = "missing" if count == 0 else "there more than once"
                names = ", ".join(f.name for f in self.preprocessing.features)
                raise DataError(f'feature "{feature.name}" is {what} in the header', hint=f"The model needs: {names}.")
            places[feature.name] = header.index(feature.name)
        return places

    def _answers(self, places: dict[str, int], batch: list[Sequence[str]], done: int) -> Iterator[Row]:
        columns = {name: [row[place] for row in batch] for name, place in places.items()}
        inputs = inputs_of(self.preprocessing, columns, len(batch), done + 1)
        with torch.inference_mode():
            outputs = self._model(self.preprocessing.apply(inputs), len(batch)).astype(np.float64)
        labels = self.preprocessing.labels
        answered = (values.tolist() for values in answers(outputs, self.preprocessing))
        for number, (prediction, probability, label) in enumerate(zip(*answered, strict=True), done + 1):
            name = None if labels is None else labels[label]
            yield number, _known(prediction), name, _known(probability)


def _known(number: float) -> float | None:
    return None if np.isnan(number) else number
