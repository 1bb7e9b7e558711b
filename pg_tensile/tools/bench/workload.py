"""The training step that a benchmark runs: the user's model, its loss and its data, all from one seed.

A batch depends only on the seed and its number, so that every contender receives the same data in any order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import mmap
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from pg_tensile.errors import CaptureError, OptionError, TensileError
from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.execution.capture.state import ModelState, generators_kept
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.tools.bench.options import BenchOptions, InputSpec
from pg_tensile.tools.bench.report import message_of

MOMENTUM = 0.9  # of --optimizer momentum
MAP_NORESERVE = 0x4000  # Linux's; Python's mmap has it from 3.13 on


class Batch(NamedTuple):
    """Data of one step: the model's positional inputs and the loss's targets."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class OutputSpec(NamedTuple):
    """Shape and type of the output that the loss is computed from."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# ---- the model ------------------------------------------------------------------------------------------------------


def place(error: BaseException) -> str | None:
    """Return the file and line that raised, as "raised in net.py:12"; None if that is this module or not a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.exists(frame.filename)]
    if not frames or frames[-1].filename == __file__:
        return None
    return f"raised in {frames[-1].filename}:{frames[-1].lineno}"


def find_callable(name: str) -> Callable[..., Any]:
    """Return the callable named `package.module:callable` or `path/file.py:callable`.

    The current folder is searched first. Raises OptionError if it cannot be imported, or is a module or not callable.
    """
    hint = "Write package.module:callable or file.py:callable, as pytorchcv.models.resnet:resnet50."
    module_name, colon, path = name.rpartition(":")
    if not (module_name and colon and path):
        raise OptionError(f'--model: "{name}" names no callable', hint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        in_file = module_name.endswith(".py")
        target = load_file(os.path.abspath(module_name)) if in_file else importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:
        raise OptionError(f'--model: could not import "{name}": {message_of(error)}', hint, place(error)) from error
    if isinstance(target, nn.Module) or not callable(target):
        raise OptionError(f'--model: "{name}" is a {type(target).__name__}, not a callable that makes a module', hint)
    return target


@functools.cache
def load_file(path: str) -> Any:
    """Execute a file as a module, once, and return the module."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def seed_everything(seed: int) -> None:
    """Seed all generators that a model's constructor or its dropout may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def build_model(options: BenchOptions) -> nn.Module:
    """Build the model in training mode, with weights from the seed. Raises OptionError if the user's code fails."""
    function = find_callable(options.model)
    seed_everything(options.seed)
    try:
        model = function(**options.kwargs)
    except (Exception, SystemExit) as error:
        hint = "Check the callable and --kwargs."
        raise OptionError(f'"{options.model}" raised {message_of(error)}', hint, place(error)) from error
    if not isinstance(model, nn.Module):
        raise OptionError(
            f'"{options.model}" returned {type(model).__name__} instead of a module',
            "It must return a torch.nn.Module.",
        )
    return model.train()


# ---- the loss -------------------------------------------------------------------------------------------------------


def single(output: Any, wanted: str = "") -> Tensor:
    """Return the tensor in a model's output: the output itself, the element named `wanted`, or the only tensor in it.

    Raises OptionError if the output has several tensors or none.
    """
    names = names_in(output)
    if wanted in names or len(names) == 1:
        name = wanted if wanted in names else names[0]
        output = getattr(output, name) if hasattr(output, name) else output[int(name) if name.isdigit() else name]
    if not isinstance(output, Tensor):
        hint = f"Choose one with --output-key: {', '.join(names) or 'a key, an attribute or an index'}."
        raise OptionError(f"the model returns {len(names) or 'no'} tensors in a {type(output).__name__}", hint)
    return output


def names_in(output: Any) -> list[str]:
    """Return the keys, indices or attributes that hold tensors."""
    if isinstance(output, Tensor):
        return []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, Sequence):
        items = list(enumerate(output))
    else:
        items = list(getattr(output, "__dict__", {}).items())
    return [str(name) for name, value in items if isinstance(value, Tensor)]


def classes_last(shape: Sequence[int], classes: int) -> bool:
    """Return whether the shape is [batch, …, classes] instead of PyTorch's [batch, classes, …]."""
    return len(shape) > 2 and shape[1] != classes and shape[-1] == classes


def make_loss(options: BenchOptions) -> Callable[..., Tensor]:
    """Return the loss function selected by --loss: loss(output selected by --output-key, *targets)."""

    def cross_entropy(output: Any, target: Tensor) -> Tensor:
        logits = single(output)
        if classes_last(logits.shape, options.classes or 0):
            return F.cross_entropy(logits.flatten(0, -2), target.flatten())
        return F.cross_entropy(logits, target)

    def mse(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(single(output), target)

    def bce(output: Any, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(single(output), target)

    def lm(output: Any, ids: Tensor) -> Tensor:
        logits = single(output, "logits")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(torch.int64))

    def model(output: Any) -> Tensor:
        return single(output, "loss")

    losses: dict[str, Callable[..., Tensor]]
    losses = {"cross_entropy": cross_entropy, "mse": mse, "bce": bce, "lm": lm, "model": model}
    return losses[options.loss]


def make_spec(options: BenchOptions) -> StepSpec:
    """Return the training step in the form that `capture` and the eager reference take."""
    name, momentum = ("sgd", MOMENTUM) if options.optimizer == "momentum" else (options.optimizer, 0.0)
    optimizer = OptimizerSpec(name, options.learning_rate, momentum)
    key = options.output_key
    return StepSpec(
        make_loss(options),
        optimizer,
        clip=options.clip,
        autocast=options.autocast,
        accumulation=options.accumulation,
        output_key=int(key) if key is not None and key.isdigit() else key,
    )


def pick(output: Any, spec: StepSpec) -> Any:
    """Return the part of the output selected by --output-key. Raises OptionError."""
    if spec.output_key is not None and isinstance(output, Tensor):
        raise OptionError("--output-key: the model returns a single tensor", "Leave --output-key out.")
    try:
        return spec.pick(output)
    except CaptureError as error:
        hint = f"Choose one of: {', '.join(names_in(output)) or 'nothing, there are no tensors'}."
        raise OptionError(f"--output-key: {error.message}", hint) from None


def output_spec(model: nn.Module, options: BenchOptions, spec: StepSpec, mode: FakeTensorMode) -> OutputSpec | None:
    """Return the specification of the model's output, found on fake tensors.

    None if the model fails on them, which capture explains better. Raises OptionError if the output does not suit
    --output-key or the loss.
    """
    state = ModelState(model)
    try:
        with mode, generators_kept():
            inputs = tuple(fake_input(spec, options.batch) for spec in options.inputs)
            output = pick(model(*inputs), spec)
            tensor = single(output, {"lm": "logits", "model": "loss"}.get(options.loss, ""))
    except TensileError:
        raise
    except Exception:
        return None
    finally:
        state.restore()
    return OutputSpec(tuple(tensor.shape), tensor.dtype)


# ---- the data -------------------------------------------------------------------------------------------------------


def fake_input(spec: InputSpec, batch: int) -> Tensor:
    """Return an input without data; to be called inside the fake mode."""
    return torch.empty((batch, *spec.shape), dtype=getattr(torch, spec.dtype))


def random_tensor(spec: InputSpec, batch: int, generator: torch.Generator) -> Tensor:
    shape, dtype = (batch, *spec.shape), getattr(torch, spec.dtype)
    if spec.dtype == "bool":
        return torch.randint(2, shape, generator=generator).to(torch.bool)
    if spec.below is not None:
        return torch.randint(spec.below, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def make_batch(options: BenchOptions, output: OutputSpec | None, number: int) -> Batch:
    """Generate batch `number` of the run; its targets follow from the loss and from the model's output."""
    generator = torch.Generator().manual_seed((options.seed * 1_000_003 + number) % 2**63)
    inputs = tuple(random_tensor(spec, options.batch, generator) for spec in options.inputs)
    return Batch(inputs, make_targets(options, output, inputs, generator))


def make_targets(
    options: BenchOptions, output: OutputSpec | None, inputs: tuple[Tensor, ...], generator: torch.Generator | None
) -> tuple[Tensor, ...]:
    """Generate the targets of one batch, without data if `generator` is None (inside a fake mode).

    `output` is None if the model's output is not known; capture then reports the cause.
    """
    if options.loss == "model":
        return ()
    if options.loss == "lm":
        return (inputs[0].clone(),)
    if options.loss == "cross_entropy":
        shape = class_target_shape(options, output)
        if generator is None:
            return (torch.empty(shape, dtype=torch.int64),)
        return (torch.randint(options.classes or 1, shape, generator=generator),)
    shape, dtype = output or OutputSpec((options.batch,), torch.float32)
    if generator is None:
        return (torch.empty(shape, dtype=dtype),)
    if options.loss == "bce":
        return (torch.randint(2, shape, generator=generator).to(dtype),)
    return (torch.randn(shape, generator=generator).to(dtype),)


def class_target_shape(options: BenchOptions, output: OutputSpec | None) -> tuple[int, ...]:
    """Return the shape of the target classes.

    There is one class for each sample, or for each position of an output with more dimensions.
    """
    if output is None:
        return (options.batch,)
    if classes_last(output.shape, options.classes or 0):
        return output.shape[:-1]
    return (output.shape[0], *output.shape[2:]) if len(output.shape) > 1 else ()


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A training step ready to be measured.

    `vanilla` is captured as PyTorch executes it, `early` with early updates (the same object if no policy requests
    them); `capture_ms` is the time of one capture.
    """

    options: BenchOptions
    model: nn.Module
    spec: StepSpec
    output: OutputSpec | None
    vanilla: Captured
    early: Captured
    capture_ms: float

    def fresh_model(self) -> nn.Module:
        """Return a new instance with the initial weights.

        Its state_dict holds all buffers, so that they can be compared.
        """
        model = build_model(self.options)
        with torch.no_grad():
            for new, initial in zip(_tensors(model), _tensors(self.model), strict=True):
                new.copy_(initial)
        for module in model.modules():
            module._non_persistent_buffers_set.clear()
        return model

    def batches(self, count: int) -> list[Batch]:
        return [make_batch(self.options, self.output, number) for number in range(count)]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def prepare(
    options: BenchOptions, model: nn.Module, device: torch.device, rules: AllocatorRules = DEFAULT_RULES
) -> Workload:
    """Capture the training step of `model` for `device`, executing nothing. Raises OptionError and CaptureError.

    `rules` are those of the device's allocator."""
    spec = make_spec(options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = output_spec(model, options, spec, mode)
        inputs = tuple(fake_input(spec, options.batch) for spec in options.inputs)
        targets = make_targets(options, output, inputs, None)
    started = time.perf_counter()
    vanilla = _with_rules(capture(model, inputs, targets, spec, device=device), rules)
    capture_ms = (time.perf_counter() - started) * 1e3
    early = vanilla
    if options.early_update:
        early = _with_rules(capture(model, inputs, targets, spec, True, device), rules)
    return Workload(options, model, spec, output, vanilla, early, capture_ms)


def _with_rules(captured: Captured, rules: AllocatorRules) -> Captured:
    return replace(captured, trace=captured.trace.with_allocator(rules))


def weightless_model(options: BenchOptions) -> nn.Module:
    """Build the model on memory that is never written, so that it occupies none.

    Used for simulations, whose model may be larger than this machine's memory.
    """
    with torch.device("meta"):
        model = build_model(options)
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta:
                    registry[name] = tensors.setdefault(id(tensor), _empty_like(tensor))
    return model


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout on the CPU, in memory that the system reserves only when it is written."""
    size = max(1, tensor.untyped_storage().nbytes())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
