"""A model built from a file's description and weights, after all checks that need PyTorch.

The sizes of the model are compared with those of the weights before the model is built, so that no description makes a
process allocate more than the file's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pg_tensile.errors import CheckpointError, ModelFileError, TensileError
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import Preprocessing
from pg_tensile.execution.exchange.fields import checked_preprocessing
from pg_tensile.execution.models.imported import ImportArchitecture, PythonArchitecture
from pg_tensile.execution.models.pretrained import PretrainedArchitecture
from pg_tensile.execution.models.registry import Architecture
from pg_tensile.execution.training import checkpoint

CODE = ImportArchitecture | PythonArchitecture
HINT = "Export the model again."


def checked_model(architecture: dict[str, Any], preprocessing: Any, weights: bytes) -> tuple[Preprocessing, nn.Module]:
    """Return preprocessing and module of a file's description and weights (a safetensors file).

    An architecture with code runs it, which the caller must have allowed. Raises ModelFileError, ArchitectureError."""
    parsed = models.parse(architecture)
    fitted = checked_preprocessing(preprocessing)
    _check_texts(parsed, fitted)
    tensors = _tensors(weights)
    if not isinstance(parsed, CODE | PretrainedArchitecture):
        with torch.device("meta"):
            _compare(_built(parsed, fitted).state_dict(), tensors)
    module = _built(parsed, fitted)
    _compare(checkpoint.model_tensors(module), tensors)
    checkpoint.load_model(module, tensors)
    return fitted, module


def _built(architecture: Architecture, preprocessing: Preprocessing) -> nn.Module:
    try:
        return models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
    except TensileError:
        raise
    except Exception as error:  # PyTorch's and Python's, for sizes that no training has
        raise ModelFileError("the model in the file cannot be built", hint=HINT, detail=repr(error)) from error


def _check_texts(architecture: Architecture, preprocessing: Preprocessing) -> None:
    """Check that the preprocessing names the tokenizer of the architecture, and no other folder."""
    text = preprocessing.text
    if (text is not None) != isinstance(architecture, PretrainedArchitecture):
        raise ModelFileError("the model file's tokenizer does not fit its architecture", hint=HINT)
    if text is None:
        return
    assert isinstance(architecture, PretrainedArchitecture)
    if text.path != architecture.path or text.length > architecture.length:
        raise ModelFileError("the model file's tokenizer does not fit its architecture", hint=HINT)
    vocabulary = preprocessing.encoder.vocabulary  # raises unless the folder is that of the training
    if any(feature.vocabulary not in (None, vocabulary) for feature in preprocessing.categories):
        raise ModelFileError("the model file's texts do not fit its tokenizer", hint=HINT)


def _tensors(weights: bytes) -> dict[str, Tensor]:
    try:
        return checkpoint.from_bytes(weights)
    except CheckpointError as error:
        raise ModelFileError("the tensors in the model file are damaged", hint=HINT, detail=error.message) from error


def _compare(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors are exactly those of the model. Raises ModelFileError."""
    if state.keys() != tensors.keys():
        names = sorted(state.keys() ^ tensors.keys())
        raise _unfitting(f'the tensor "{names[0]}" is missing or not the model\'s')
    for name, tensor in tensors.items():
        expected = state[name]
        is_open = expected.dtype == torch.uint8 and expected.shape == (0,)  # the JSON of trees, which loading checks
        if tensor.dtype != expected.dtype or (tensor.shape != expected.shape and not (is_open and tensor.dim() == 1)):
            given, wanted = (f"{x.dtype} {list(x.shape)}" for x in (tensor, expected))
            raise _unfitting(f'the tensor "{name}" is {given}, but must be {wanted}')
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise _unfitting(f'the tensor "{name}" has a value that is infinite or not a number')


def _unfitting(detail: str) -> ModelFileError:
    return ModelFileError("the weights in the model file do not fit its architecture", hint=HINT, detail=detail)
