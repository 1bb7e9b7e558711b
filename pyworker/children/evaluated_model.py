"""A small version evaluated without PyTorch, to the bits of a prediction in a session."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import CheckpointError
from pg_tensile.execution.data.preprocessing import Inputs, Preprocessing, wrong_array
from pg_tensile.execution.evaluator import Evaluator, Image, Library, Rows, Status, Stored, WrongLength
from pyworker.children.loaded_models import Part, Version

LEAST_ROWS = 512  # of a thread


class EvaluatedModel(Version):
    """Version that evaluators of one image compute, each in a thread."""

    def __init__(self, preprocessing: Preprocessing, library: Library, image: Image, threads: int) -> None:
        super().__init__(preprocessing, image.bytes.nbytes)
        self._open = partial(Evaluator, library, image)
        self._evaluators: list[Evaluator] = []
        self._most = threads
        self._threads = ThreadPoolExecutor(threads)

    def _parts(self, inputs: Inputs) -> list[Part]:
        return [partial(self._outputs, _rows(inputs))]

    def _outputs(self, rows: Rows) -> NDArray[np.float64]:
        count = min(self._most, max(1, rows.total // LEAST_ROWS))
        self._evaluators += [self._open() for _ in range(count - len(self._evaluators))]
        places = [rows.total * place // count for place in range(count + 1)]
        work = zip(self._evaluators[:count], places, places[1:], strict=False)
        return np.concatenate([*self._threads.map(partial(self._some_outputs, rows), *zip(*work, strict=True))])

    def _some_outputs(self, rows: Rows, evaluator: Evaluator, start: int, end: int) -> NDArray[np.float64]:
        try:
            return evaluator.outputs(rows if end - start == rows.total else rows.part(start, end))
        except WrongLength as wrong:
            array, row, length, _ = wrong.args
            raise wrong_array(self._preprocessing.arrays[array], length, start + row) from None

    def close(self) -> None:
        self._threads.shutdown()
        for evaluator in self._evaluators:
            evaluator.close()


def _rows(inputs: Inputs) -> Rows:
    codes = [np.where(places < 0, -1, table[places]) for places, table in inputs.categories]
    return Rows(
        inputs.rows,
        inputs.numeric,
        np.array(codes, np.int32).reshape(len(codes), inputs.rows),
        [(lengths, elements) for lengths, elements in inputs.arrays],
    )


def evaluated_model(spec: dict[str, Any], weights: bytes, threads: int) -> EvaluatedModel | None:
    """Return the version of a JOB frame, or None if PyTorch has to evaluate it. Raises CheckpointError."""
    if spec["evaluator"] is None:
        return None
    try:
        library = Library(spec["evaluator"])
    except OSError:
        return None
    architecture, preprocessing = (
        json.dumps(spec[key], ensure_ascii=False) for key in ("architecture", "preprocessing")
    )
    status, image, problem = library.compile(Stored(architecture, preprocessing, None, weights))
    if status == Status.DAMAGED:
        hint = "Deploy another version, or train the model again."
        raise CheckpointError("this version of the model is damaged", hint=hint, detail=problem)
    if status == Status.UNSUITABLE:
        return None
    return EvaluatedModel(Preprocessing.from_json(spec["preprocessing"]), library, Image(image), threads)
