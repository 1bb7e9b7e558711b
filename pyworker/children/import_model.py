"""The trainer of `import_model`: checks that a version from a model file is one that can predict.

Phases: JOB with architecture and preprocessing, and the weights; the model is built as far as the weights justify it,
the weights are loaded, and it predicts for rows of nulls. A RESULT frame with the number of the version ends it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from pg_tensile.errors import DataError, ModelFileError
from pg_tensile.execution.data.drift import Reference
from pg_tensile.execution.data.preprocessing import ArraysInput, CategoryInput, Inputs, Preprocessing
from pyworker.children.channel import Channel
from pyworker.children.loaded_models import LoadedModel, Version
from pyworker.wire import FrameType


def run(channel: Channel, libraries: Future[None]) -> None:
    """Run the checks: the rest of the process after JOB."""
    weights = channel.receive_state()
    channel.wait_for(libraries, "loading")
    channel.wait_for(channel.background.submit(_check, channel, weights), "loading")
    channel.send(FrameType.RESULT, {"rows": [[channel.spec["number"]]], "last": True})


def _check(channel: Channel, weights: bytes) -> None:
    import torch

    from pg_tensile.execution.data.answers import FEW_ROWS
    from pg_tensile.execution.exchange.checking import checked_model

    torch.set_num_threads(channel.threads)
    spec = channel.spec
    with torch.inference_mode():
        preprocessing, module = checked_model(spec["architecture"], spec["preprocessing"], weights)
        _check_reference(spec["reference"], preprocessing)
        version = LoadedModel(preprocessing, module, len(weights))
        for rows in (1, FEW_ROWS + 1):  # the two ways of WholeModel
            _try(version, rows)


def _check_reference(reference: Any, preprocessing: Preprocessing) -> None:
    """Raise ModelFileError unless the histograms of the training rows, if there are any, fit the preprocessing."""
    try:
        if reference is not None:
            Reference.from_json(reference, preprocessing)
    except DataError as error:
        raise ModelFileError(error.message, hint="Export the model again.") from error


def _try(version: Version, rows: int) -> None:
    """Predict for `rows` rows of nulls. Raises ModelFileError if the model cannot."""
    preprocessing = version.preprocessing
    try:
        outputs = version.outputs(nulls(preprocessing, rows))
    except Exception as error:
        hint = "Export the model again."
        raise ModelFileError("the model in the file cannot predict", hint=hint, detail=repr(error)) from error
    if outputs.shape != (rows, preprocessing.outputs) or not np.isfinite(outputs).all():
        raise ModelFileError(
            "the model in the file predicts values that are not numbers", hint="Export the model again."
        )


def nulls(preprocessing: Preprocessing, rows: int) -> Inputs:
    """Return rows of nulls."""
    missing = np.full(rows, -1, np.int32)
    return Inputs(
        rows,
        np.full((len(preprocessing.numbers), rows), np.nan),
        [CategoryInput(missing, preprocessing.table(i, [])) for i in range(len(preprocessing.categories))],
        [ArraysInput(missing, np.empty(0)) for _ in preprocessing.arrays],
    )
