"""What a job's process has when its rows are preprocessed: all that training needs.

It can be pickled, without the database: a job with ranks is trained by other processes, on other machines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pg_tensile.execution.data.dataset import Dataset
from pg_tensile.execution.data.drift import Reference
from pg_tensile.execution.data.fitting import FittedPreprocessing

State = tuple[bytes, dict[str, Any]]  # of a checkpoint: its safetensors file and meta


class Prepared(NamedTuple):
    """Preprocessed data of a job."""

    fitted: FittedPreprocessing
    dataset: Dataset
    reference: Reference


class Begun(NamedTuple):
    """A job that can be trained: its number, its spec with the recipe, data, and the checkpoint to resume, if any.

    `identity`: what a checkpoint must agree with; `warnings` are for the end of the job."""

    job: int
    spec: dict[str, Any]
    identity: dict[str, Any]
    recipe: dict[str, Any]
    warnings: list[str]
    prepared: Prepared
    checkpoint: State | None
