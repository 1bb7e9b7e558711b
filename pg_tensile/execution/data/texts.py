"""Texts as token numbers, for the architecture `pretrained`.

A token has the tokenizer's number plus 1, so that PADDING (0) is not a token: a model knows from the numbers alone
which of them are text. Tokens are looked up once for each distinct string of a column, in training as in a request.

Needs numpy and, to encode, the library tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.pretrained_folder import TOKENIZER, PretrainedFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_CHARACTERS = 65_536  # of a text that are looked at; csrc/base/convert.h has the same limit
BATCH = 4096  # strings that are encoded at once


class TextSource(NamedTuple):
    """The folder whose tokenizer turns texts into tokens.

    `length`: most tokens of a text; `sha256`: identity of the folder; `weight_bytes`: bytes of the weights that a
    version does not store itself."""

    path: str
    length: int
    sha256: str
    weight_bytes: int = 0

    def encoder(self) -> TextEncoder:
        """Return the encoder. Raises ArchitectureError if the folder is missing, damaged or has changed."""
        folder = PretrainedFolder.open(self.path)
        if folder.sha256 != self.sha256:
            hint = "Restore the folder as it was, or train the model again."
            raise ArchitectureError(f'the folder "{self.path}" has changed since the model was trained', hint=hint)
        return TextEncoder(folder)


class TextColumns(NamedTuple):
    """Text columns that are tokenised: those named, or all if `names` is None."""

    source: TextSource
    names: tuple[str, ...] | None = None

    def include(self, name: str) -> bool:
        return self.names is None or name in self.names


class TextEncoder:
    """The tokenizer of a folder; `vocabulary` is the number of different token numbers, PADDING included."""

    def __init__(self, folder: PretrainedFolder) -> None:
        """Load tokenizer.json. Raises ArchitectureError if it is damaged."""
        self._tokenizer = _tokenizer(folder)
        self.vocabulary = 2 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, strings: Sequence[str], length: int, padded: bool = True) -> NDArray[np.int32]:
        """Return the tokens [strings, width] of texts, of which the first `length` count, special ones included.

        The width is `length` if they are `padded`, else that of the longest text, at least 1."""
        _truncate(self._tokenizer, length)
        parts = [self._encode(strings[start : start + BATCH]) for start in range(0, len(strings), BATCH)]
        width = length if padded else max((part.shape[1] for part in parts), default=1)
        tokens = np.zeros((len(strings), width), np.int32)
        start = 0
        for part in parts:
            tokens[start : start + len(part), : part.shape[1]] = part
            start += len(part)
        return tokens

    def _encode(self, strings: Sequence[str]) -> NDArray[np.int32]:
        encodings = self._tokenizer.encode_batch_fast([text[:MOST_CHARACTERS] for text in strings])
        lengths = np.fromiter((len(encoding.ids) for encoding in encodings), np.int64, len(encodings))
        flat = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int32, int(lengths.sum()))
        tokens = np.zeros((len(strings), max(1, int(lengths.max(initial=0)))), np.int32)
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = flat + 1
        return tokens


def _tokenizer(folder: PretrainedFolder) -> Tokenizer:
    path = folder.file(TOKENIZER)
    status = path.stat()
    try:
        return _load(str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    except Exception as error:  # tokenizers raises Exception itself
        reason = str(error).partition("\n")[0]
        raise ArchitectureError(
            f'{TOKENIZER} of the folder "{folder.name}" is damaged: {reason}', hint="Copy the whole folder again."
        ) from error


@lru_cache(8)
def _load(path: str, *identity: int) -> Tokenizer:
    """Return the tokenizer in a file; `identity` says that it is still the same file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    return tokenizer


def _truncate(tokenizer: Any, length: int) -> None:
    """Make the tokenizer cut texts at `length` tokens, before its special tokens."""
    if tokenizer.truncation is None or tokenizer.truncation["max_length"] != length:
        tokenizer.enable_truncation(length)
