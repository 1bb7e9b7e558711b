"""Predictions with a model file, without a server: those that `predict_rows` returns for the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.answers import answers
from pg_tensile.execution.exchange.checking import checked_model
from pg_tensile.execution.exchange.predictor import Predictor, Row, known
from pg_tensile.execution.exchange.reading import ModelFile
from pg_tensile.execution.exchange.values import inputs_of
from pg_tensile.execution.models.whole import WholeModel
from pg_tensile.rules import ARCHITECTURES


class FilePredictor(Predictor):
    """The model in a file of the format tensile.

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
        self.features = self.preprocessing.features

    def answers(self, columns: Mapping[str, Sequence[str]], rows: int, first: int) -> Iterator[Row]:
        inputs = inputs_of(self.preprocessing, columns, rows, first)
        with torch.inference_mode():
            outputs = self._model(self.preprocessing.apply(inputs), rows).astype(np.float64)
        labels = self.preprocessing.labels
        answered = (values.tolist() for values in answers(outputs, self.preprocessing))
        for number, (prediction, probability, label) in enumerate(zip(*answered, strict=True), first):
            name = None if labels is None else labels[label]
            yield number, known(prediction), name, known(probability)
