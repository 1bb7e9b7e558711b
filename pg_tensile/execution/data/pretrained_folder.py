"""Folders of pretrained transformers below the folder of such folders, the server's setting pg_tensile.model_path.

A folder has `config.json`, `tokenizer.json` and weights in safetensors, as `save_pretrained` writes them. What it must
not have is code: models and tokenizers with classes of their own (`auto_map`) are refused, and pickled weights are not
read. Names come from users, so nothing outside the folder of folders is opened, symbolic links are followed first, and
the messages are the same whether something outside exists or not.

Needs the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pg_tensile.errors import ArchitectureError

MODEL_PATH_VARIABLE = "PG_TENSILE_MODEL_PATH"  # environment variable with the folder of folders
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"  # of sentence-transformers
OPTIONAL = (TOKENIZER_CONFIG, INDEX, MODULES, POOLING)
MAX_JSON = 64 << 20  # bytes of a JSON file
_COMPONENT = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]*")
_READABLE = "Let the server's operating-system user read it: chmod -R a+rX."
_NO_CODE = "Only models that the library transformers has itself can be used; their files contain no code."


@dataclass(frozen=True)
class PretrainedFolder:
    """A checked folder. `name` is relative to the folder of folders; `path` has no symbolic links."""

    name: str
    path: Path

    @staticmethod
    def open(name: str) -> PretrainedFolder:
        """Return the folder with that name. Raises ArchitectureError if it is missing or cannot be used."""
        root = _root()
        folder = PretrainedFolder(name, _inside(root, name))
        folder._check()
        return folder

    def _check(self) -> None:
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise ArchitectureError(f'the folder "{self.name}" cannot be read', hint=_READABLE)
        if not (self._has(CONFIG) and self._has(TOKENIZER)):
            missing = TOKENIZER if self._has(CONFIG) else CONFIG
            hint = "Save model and tokenizer with save_pretrained(); only fast tokenizers have a tokenizer.json."
            raise ArchitectureError(f'the folder "{self.name}" has no {missing}', hint=hint)
        if self._has("adapter_config.json"):
            hint = "Merge the adapter into its model (merge_and_unload) and save that with save_pretrained()."
            raise ArchitectureError(f'the folder "{self.name}" has an adapter instead of a whole model', hint=hint)
        if "auto_map" in self.config:
            raise ArchitectureError(f'the model in the folder "{self.name}" needs code of its own', hint=_NO_CODE)
        if "auto_map" in self.tokenizer_config:
            raise ArchitectureError(f'the tokenizer in the folder "{self.name}" needs code of its own', hint=_NO_CODE)
        if not isinstance(self.config.get("model_type"), str):
            hint = "config.json must name it as model_type."
            raise ArchitectureError(f'the folder "{self.name}" does not say of which type the model is', hint=hint)
        if self.config.get("is_encoder_decoder"):
            hint = "Use an encoder such as BERT, or a decoder such as GPT-2."
            raise ArchitectureError(f'the model in the folder "{self.name}" is an encoder with a decoder', hint=hint)
        _ = self.weights

    # ---- files ----

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._json(CONFIG)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json(TOKENIZER_CONFIG) if self._has(TOKENIZER_CONFIG) else {}

    @cached_property
    def weights(self) -> tuple[Path, ...]:
        """Files with the weights. Raises ArchitectureError if there are none in safetensors."""
        names = sorted(path.name for path in self.path.glob("*.safetensors"))
        if self._has(INDEX):
            parts = self._json(INDEX).get("weight_map")
            shards = sorted(set(parts.values())) if isinstance(parts, dict) else []
            if not shards or not set(shards) <= set(names):
                raise ArchitectureError(
                    f'the folder "{self.name}" lacks files that its {INDEX} names', hint="Copy the whole folder again."
                )
        elif "model.safetensors" not in names:
            hint = "Save the model with save_pretrained(); pickled weights (.bin, .pt) are never read."
            raise ArchitectureError(f'the folder "{self.name}" has no model.safetensors', hint=hint)
        else:
            shards = ["model.safetensors"]
        return tuple(self.file(name) for name in shards)

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weights)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that a model's outputs depend on."""
        names = [CONFIG, TOKENIZER, *(name for name in OPTIONAL if self._has(name))]
        total = hashlib.sha256()
        for path in (*(self.file(name) for name in names), *self.weights):
            status = path.stat()
            digest = _digest(path, status.st_ino, status.st_size, status.st_mtime_ns)
            total.update(f"{path.name} {digest}\n".encode())
        return total.hexdigest()

    def file(self, name: str) -> Path:
        """Return the path of a file of the folder. Raises ArchitectureError if it is none, or leads outside."""
        path = _real(self.path / name)
        if path is None or not path.is_file() or _root() not in path.parents:
            raise ArchitectureError(f'the folder "{self.name}" has no file {name}', hint="Copy the whole folder again.")
        if not os.access(path, os.R_OK):
            raise ArchitectureError(f'{name} of the folder "{self.name}" cannot be read', hint=_READABLE)
        return path

    def _has(self, name: str) -> bool:
        return os.path.exists(self.path / name) and bool(self.file(name))

    def _json(self, name: str) -> dict[str, Any]:
        path = self.file(name)
        try:
            value = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_JSON else None
        except (ValueError, RecursionError, OSError):
            value = None
        if not isinstance(value, dict):
            message = f'{name} of the folder "{self.name}" is damaged: it is not a JSON object'
            raise ArchitectureError(message, hint="Copy the whole folder again.")
        return value

    # ---- sentence-transformers ----

    @cached_property
    def pooling(self) -> str | None:
        """Pooling that the folder prescribes: mean, cls or last; None if it prescribes none.

        Raises ArchitectureError for another one."""
        if not self._has(POOLING):
            return None
        modes = self._json(POOLING)
        chosen = {key.removeprefix("pooling_mode_") for key, value in modes.items() if value is True} - {
            "include_prompt"
        }
        supported = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
        if len(chosen) != 1 or not chosen <= set(supported):
            hint = 'Give the architecture a "pooling": mean, cls or last.'
            raise ArchitectureError(f'the folder "{self.name}" prescribes a pooling that is not supported', hint=hint)
        return supported[chosen.pop()]

    @cached_property
    def normalises(self) -> bool:
        """True if embeddings have length 1: always, unless the folder lists its modules and this is not among them."""
        if not self._has(MODULES):
            return True
        try:
            modules = json.loads(self.file(MODULES).read_bytes())
            return any(str(module["type"]).endswith("Normalize") for module in modules)
        except (ValueError, TypeError, KeyError, RecursionError):
            message = f'{MODULES} of the folder "{self.name}" is damaged'
            raise ArchitectureError(message, hint="Copy the whole folder again.") from None


def _root() -> Path:
    """Return the folder of folders, without symbolic links."""
    value = os.environ.get(MODEL_PATH_VARIABLE, "")
    if not value:
        hint = "An administrator sets it in postgresql.conf, to the folder that has a folder for each model."
        raise ArchitectureError("pg_tensile.model_path is not set, so there are no pretrained models", hint=hint)
    root = _real(Path(value))
    if root is None or not root.is_dir() or not os.path.isabs(value):
        hint = "An administrator sets it to an absolute path that the server's operating-system user can read."
        raise ArchitectureError("pg_tensile.model_path is not a folder that can be read", hint=hint)
    return root


def _inside(root: Path, name: str) -> Path:
    """Return the folder `name` below `root`. Every other name, and what lies elsewhere, has the same error."""
    valid = all(_COMPONENT.fullmatch(component) for component in name.split("/"))
    path = _real(root / name) if valid else None
    if path is None or root not in path.parents or not path.is_dir():
        hint = 'Ask an administrator which folders there are; a path is relative to it, and has no "..".'
        raise ArchitectureError(f'there is no folder "{name}" in pg_tensile.model_path', hint=hint)
    return path


def _real(path: Path) -> Path | None:
    """Return the path without symbolic links, or None if it does not exist or cannot be reached."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


@lru_cache(64)
def _digest(path: Path, inode: int, size: int, modified_ns: int) -> str:
    """Return the hash of a file; `inode`, `size` and `modified_ns` say that it is still the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
