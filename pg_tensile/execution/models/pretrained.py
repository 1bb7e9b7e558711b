"""Pretrained transformers from a folder: an encoder like BERT or a decoder like GPT-2, and a head.

The texts of each text column are pooled to one vector each; these join all other features before the head. With `tune`
"head" only the head is trained, with "lora" adapters beside the attention's projections as well, with "full"
everything. What is not trained stays the folder's and is not part of the model's state: a version stores its own
tensors only.

The graph is static: the masks come from the tokens inside of `forward`, as tensors, so nothing depends on how many
tokens are padding. transformers and peft are imported when a model is built.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import PADDING, Features, ModelInputs
from pg_tensile.execution.data.pretrained_folder import PretrainedFolder
from pg_tensile.execution.data.texts import TextColumns, TextEncoder, TextSource
from pg_tensile.execution.models.layers import JoinedFeatures, dense

MOST_POSITIONS = 1 << 20  # larger limits of tokenizers mean that there is none


@dataclass(frozen=True)
class PretrainedArchitecture:
    """Architecture `pretrained`; rules.json describes its keys."""

    path: str
    tune: str = "lora"
    length: int = 128
    lora_rank: int = 8
    lora_alpha: float = 16
    pooling: str | None = None
    text: tuple[str, ...] | None = None
    hidden: tuple[int, ...] = ()
    dropout: float = 0
    embedding: int = 16

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        return Pretrained(self, PretrainedFolder.open(self.path), inputs, outputs)

    def untrained(self) -> tuple[Texts, TextEncoder, int]:
        """Return the transformer as the folder has it, its tokenizer, and the most tokens of a text.

        Raises ArchitectureError."""
        folder = PretrainedFolder.open(self.path)
        length = self.text_source(folder).length
        return Texts(replace(self, tune="head"), folder).eval(), TextEncoder(folder), length

    def text_columns(self) -> TextColumns:
        """Return the columns to tokenise. Raises ArchitectureError if the folder cannot be used."""
        return TextColumns(self.text_source(PretrainedFolder.open(self.path)), self.text)

    def text_source(self, folder: PretrainedFolder) -> TextSource:
        """Return the source of tokens; raise ArchitectureError if the model does not know all of them."""
        tokens, embedded = TextEncoder(folder).vocabulary - 1, folder.config.get("vocab_size")
        if isinstance(embedded, int) and tokens > embedded:
            raise ArchitectureError(
                f'the tokenizer in the folder "{self.path}" has {tokens} tokens, its model only {embedded}',
                hint="Copy model and tokenizer from the same source.",
            )
        stored = 0 if self.tune == "full" else folder.weight_bytes
        return TextSource(self.path, min(self.length, _positions(folder)), folder.sha256, stored)


class Pretrained(nn.Module):
    """Transformer, pooling and head. `base` is the transformer as the library transformers builds it."""

    def __init__(
        self, architecture: PretrainedArchitecture, folder: PretrainedFolder, inputs: ModelInputs, outputs: int
    ) -> None:
        super().__init__()
        self.texts = Texts(architecture, folder)
        self.columns = tuple(i for i, array in enumerate(inputs.arrays) if array.vocabulary)
        if not self.columns:
            hint = "Select a column of type text, or use another architecture."
            raise ArchitectureError("a pretrained model needs a text column", hint=hint)
        others = [i for i in range(len(inputs.arrays)) if i not in self.columns]
        self.join = JoinedFeatures(inputs, architecture.embedding, others)
        width = self.texts.width * len(self.columns) + self.join.width
        self.head = dense(width, architecture.hidden, outputs, "gelu", architecture.dropout, "none")

    def forward(self, features: Features) -> Tensor:
        pooled = [self.texts(features.arrays[i]) for i in self.columns]
        if self.join.width:
            pooled.append(self.join(features))
        return self.head(torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0])

    def embed(self, tokens: Tensor) -> Tensor:
        return self.texts.embed(tokens)


class Texts(nn.Module):
    """The transformer as a map from tokens [rows, length] to one vector for each row: float32 [rows, width]."""

    def __init__(self, architecture: PretrainedArchitecture, folder: PretrainedFolder) -> None:
        super().__init__()
        self.base = _load(folder)
        self.causal = _is_causal(folder)
        self.pooling = architecture.pooling or folder.pooling or ("last" if self.causal else "mean")
        self.normalises = folder.normalises
        self.frozen = architecture.tune == "head"
        self._padding = _padding_id(self.base)
        self._makes_mask = False
        if architecture.tune != "full":
            self.base.requires_grad_(False)
        if architecture.tune == "lora":
            _add_adapters(self.base, architecture, folder)
        self.width = self._try(folder)
        own = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        self.inherited = (
            () if architecture.tune == "full" else tuple(name for name in self.state_dict() if name not in own)
        )
        self.register_state_dict_post_hook(_drop_inherited)
        self.register_load_state_dict_post_hook(_allow_inherited)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != PADDING
        present = torch.cat([torch.ones_like(present[:, :1]), present[:, 1:]], 1)  # attention needs at least one token
        ids = torch.where(present, tokens - 1, self._padding).clamp(min=0)
        hidden = self.base(input_ids=ids, attention_mask=self._mask(present), **self._options).last_hidden_state
        return torch.matmul(self._weights(present, hidden.dtype).unsqueeze(1), hidden).squeeze(1).float()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors as a folder of sentence-transformers prescribes them: of length 1 unless it says no."""
        vectors = self(tokens)
        return F.normalize(vectors, dim=1) if self.normalises else vectors

    def train(self, mode: bool = True) -> Texts:
        super().train(mode and not self.frozen)  # what is not trained has no dropout
        self.training = mode
        return self

    def _weights(self, present: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight of each token in its row's vector [rows, length]."""
        if self.pooling == "mean":
            weights = present.to(dtype)
            return weights / weights.sum(1, keepdim=True)
        positions = torch.arange(present.shape[1], device=present.device)
        last = present.sum(1, keepdim=True) - 1 if self.pooling == "last" else 0
        return (positions == last).expand(present.shape).to(dtype)

    def _mask(self, present: Tensor) -> Tensor:
        """Return the mask [rows, 1, length, length]: which token (the last dimension) each one attends to.

        A model that makes it itself, as some older ones do, has the mask [rows, length]."""
        if self._makes_mask:
            return present.to(torch.int64)
        length = present.shape[1]
        mask = present[:, None, None, :]
        if self.causal:
            positions = torch.arange(length, device=present.device)
            mask = mask & (positions <= positions[:, None])
        mask = mask.expand(-1, 1, length, length)
        if self.base.config._attn_implementation == "sdpa":
            return mask
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)

    def _try(self, folder: PretrainedFolder) -> int:
        """Return the width of a vector, after a trial on two rows. Raises ArchitectureError."""
        accepted = inspect.signature(self.base.forward).parameters
        if not {"input_ids", "attention_mask"} <= accepted.keys():
            hint = "Use a model of text, such as BERT or GPT-2."
            raise ArchitectureError(f'the model in the folder "{folder.name}" does not take text', hint=hint)
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        tokens = torch.ones(2, 3, dtype=torch.int64)
        training, reason = self.training, ""
        for self._makes_mask in (False, True):
            try:
                with torch.no_grad():
                    return int(self.eval()(tokens).shape[1])
            except Exception as error:  # of the library's models, anything
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            finally:
                self.train(training)
        message = f'the model in the folder "{folder.name}" cannot be used as an encoder of texts'
        raise ArchitectureError(message, hint="Use an encoder such as BERT, or a decoder such as GPT-2.", detail=reason)


def _drop_inherited(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the folder's own tensors from the module's state."""
    for name in module.inherited:
        state.pop(prefix + name, None)


def _allow_inherited(module: Any, keys: Any) -> None:
    """Accept a state without the folder's own tensors."""
    endings = tuple(module.inherited)
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(endings)]


# ---- the library transformers ----------------------------------------------------------------------------------------


def _load(folder: PretrainedFolder) -> Any:
    """Return the transformer with its weights in float32, without a head. Raises ArchitectureError."""
    import transformers
    from safetensors import SafetensorError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder.path, **options)
        base, report = transformers.AutoModel.from_pretrained(
            folder.path,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    except (Exception, SystemExit, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0].replace(str(folder.path), folder.name)
        message = f'the model in the folder "{folder.name}" cannot be loaded: {type(error).__name__}'
        hint = "Check config.json and the weights; the folder must be as save_pretrained() writes it."
        raise ArchitectureError(message, hint=hint, detail=reason or None) from error
    if getattr(base, "pooler", None) is not None:
        base.pooler = None  # the texts are pooled here, and weights that have no gradient would only take memory
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise ArchitectureError(
            f'the weights in the folder "{folder.name}" are not those of its config.json',
            hint="Copy the whole folder again.",
            detail=f"{len(missing)} tensors are missing, for example {missing[0]}.",
        )
    return base


def _is_causal(folder: PretrainedFolder) -> bool:
    """Return whether each token sees only those before it."""
    from transformers.models.auto import modeling_auto

    kind = folder.config["model_type"]
    decoders, encoders = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    return bool(folder.config.get("is_decoder")) or (kind in decoders and kind not in encoders)


def _padding_id(base: Any) -> int:
    padding = getattr(base.config, "pad_token_id", None)
    return padding if isinstance(padding, int) and 0 <= padding < base.config.vocab_size else 0


def _positions(folder: PretrainedFolder) -> int:
    """Return the most tokens of a text that model and tokenizer allow."""
    config = folder.config
    limits = [config.get("max_position_embeddings"), config.get("n_positions")]
    limits.append(folder.tokenizer_config.get("model_max_length"))
    usable = [limit for limit in limits if isinstance(limit, int) and 8 <= limit < MOST_POSITIONS]
    return min(usable, default=MOST_POSITIONS)


def _add_adapters(base: Any, architecture: PretrainedArchitecture, folder: PretrainedFolder) -> None:
    """Add LoRA adapters to the attention's projections, or to all linear layers of a model that peft does not know."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    targets: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(folder.config["model_type"])
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if targets is None:
        targets = linear
    transposed = any(isinstance(module, Conv1D) for module in base.modules())
    alpha: Any = architecture.lora_alpha  # peft only divides it by the rank
    config = LoraConfig(
        r=architecture.lora_rank,
        lora_alpha=alpha,
        lora_dropout=architecture.dropout,
        target_modules=targets,
        fan_in_fan_out=transposed,
    )
    try:
        inject_adapter_in_model(config, base)
    except ValueError as error:
        message = f'the model in the folder "{folder.name}" cannot have LoRA adapters'
        raise ArchitectureError(message, hint='Use "tune": "head" or "full".', detail=str(error)) from error
