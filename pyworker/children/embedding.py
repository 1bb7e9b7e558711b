"""Embeddings of texts by pretrained transformers: those of versions, and of models that have not been trained.

Texts come in an EMBED frame, vectors leave in an EMBEDDING frame (docs/internals.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.texts import TextEncoder
from pyworker.children.malformed import Malformed
from pyworker.wire import Frame

if TYPE_CHECKING:
    from pg_tensile.execution.models.pretrained import Texts


class Embedder(NamedTuple):
    """A transformer with its tokenizer, and the most tokens of a text."""

    transformer: Texts
    encoder: TextEncoder
    length: int

    def embed(self, frame: Frame) -> tuple[bytes, NDArray[np.float32]]:
        """Return the buffers of the answer to an EMBED frame; nulls have vectors of zeros. Raises Malformed."""
        import torch

        from pg_tensile.execution.models.whole import shorten

        texts = decode(frame)
        rows = [row for row, text in enumerate(texts) if text is not None]
        tokens = self.encoder.encode([text for text in texts if text is not None], self.length, padded=False)
        vectors = np.zeros((len(texts), self.transformer.width), np.float32)
        for chosen, (part,) in shorten([tokens], 1):
            embedded = self.transformer.embed(torch.from_numpy(part.astype(np.int64))).numpy()
            vectors[np.take(rows, chosen)] = embedded
        return np.array(vectors.shape, np.int32).tobytes(), vectors


def decode(frame: Frame) -> list[str | None]:
    """Return the texts of an EMBED frame. Raises Malformed."""
    rows = frame.header.get("rows")
    try:
        lengths, data = (bytes(buffer) for buffer in frame.buffers)
        sizes = np.frombuffer(lengths, np.int32).astype(np.int64)
    except ValueError:
        raise Malformed("a request's buffers are not those of texts") from None
    ends = np.cumsum(sizes.clip(min=0))
    if len(sizes) != rows or (ends[-1] if len(ends) else 0) != len(data) or sizes.min(initial=0) < -1:
        raise Malformed(f"a request's texts do not fit {rows} rows")
    return [
        None if size < 0 else data[end - size : end].decode("utf-8", "replace")
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)
    ]


class BaseModel:
    """A pretrained transformer as its folder has it: a model without a version."""

    device = "cpu"
    host_bytes = 0
    planned_bytes: int | None = None

    def __init__(self, architecture: dict[str, Any]) -> None:
        """Load the model. Raises ArchitectureError."""
        from pg_tensile.execution import models
        from pg_tensile.execution.models.pretrained import PretrainedArchitecture

        parsed = models.parse(architecture)
        if not isinstance(parsed, PretrainedArchitecture):
            raise ArchitectureError("the model is not a pretrained transformer", hint="Train it and use predict.")
        self._embedder = Embedder(*parsed.untrained())
        self.nbytes = sum(parameter.nbytes for parameter in self._embedder.transformer.parameters())

    def embed(self, frame: Frame) -> tuple[Any, ...]:
        """Return the buffers of the answer to an EMBED frame. Raises Malformed."""
        return self._embedder.embed(frame)

    def at_once(self, frame: Frame) -> bool:
        return False

    def replies(self, frames: Sequence[Frame]) -> NoReturn:
        raise AssertionError("no request is answered at once")

    def predict_in_parts(self, frame: Frame) -> NoReturn:
        raise Malformed("a request for a prediction is about a model without a version")

    def close(self) -> None:
        """Release resources that are not memory."""
