"""Python state that a call of a model can change: saved before capturing and restored after it, even on errors."""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}  # their objects keep no state between calls


class ModelState:
    """Attributes of a model's modules, and the containers, objects and generators reachable from them."""

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Container, Container]] = []  # each with its copy
        self._generators: list[tuple[Any, Any]] = []  # each with its state
        self._walk([vars(module) for module in model.modules()])

    def _walk(self, reached: list[Any]) -> None:
        seen: set[int] = set()
        while reached:
            item = reached.pop()
            if isinstance(item, LEAVES) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, (dict, list, set, deque)):
                if type(item) in CONTAINERS:  # subclasses may not support being refilled
                    self._containers.append((item, item.copy()))
                reached.extend(item.values() if isinstance(item, dict) else item)
            elif isinstance(item, (tuple, frozenset)):
                reached.extend(item)
            elif (state := _generator_state(item)) is not None:
                self._generators.append((item, state))
            elif isinstance(item, nn.Module) or type(item).__module__.partition(".")[0] not in LIBRARIES:
                reached.append(getattr(item, "__dict__", None))

    def substitute(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Replace the tensors with these ids by others, in every dictionary and list."""
        for container, _ in self._containers:
            if isinstance(container, (dict, list)):
                for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
                    if isinstance(item, torch.Tensor) and id(item) in tensors:
                        container[key] = tensors[id(item)]

    def draws(self) -> bool:
        """Return whether a generator that the model holds was drawn from."""
        return any(not _same(_generator_state(generator), state) for generator, state in self._generators)

    def restore(self) -> None:
        for container, copy in self._containers:
            if _identities(container) != _identities(copy):
                container.clear()
                if isinstance(container, (dict, set)):
                    container.update(copy)
                else:
                    container.extend(copy)
        for generator, state in self._generators:
            _set_generator_state(generator, state)


def _identities(container: Container) -> Any:
    """Return the items of a container by identity, in order if it has one."""
    if isinstance(container, dict):
        return [(key, id(item)) for key, item in container.items()]
    return container if isinstance(container, set) else [id(item) for item in container]


def _generator_state(item: Any) -> Any:
    """Return the state of a random number generator, or None for any other object."""
    if isinstance(item, random.Random):
        return item.getstate()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    if isinstance(item, np.random.RandomState):
        return item.get_state(legacy=False)
    return item.get_state() if isinstance(item, torch.Generator) else None


def _set_generator_state(item: Any, state: Any) -> None:
    if isinstance(item, random.Random):
        item.setstate(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    else:
        item.set_state(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, (np.ndarray, torch.Tensor)) else bool(a == b)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and PyTorch at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    devices = module.get_rng_state_all() if module is not None and module.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if module is not None and devices is not None:
            module.set_rng_state_all(devices)


@contextmanager
def logs_silenced() -> Iterator[None]:
    """Silence PyTorch's log of every error of a fake kernel; the error is raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def checkpoints_bypassed() -> Iterator[None]:
    """Make `torch.utils.checkpoint`, under any imported name, run its function once and save its activations.

    Plans decide what is recomputed, and a captured recomputation would draw different random numbers."""
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    originals = {name: getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)}
    for name, bypass in zip(names, (ReentrantBypass, _bypass), strict=True):
        if name in originals:
            setattr(checkpoint, name, bypass)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpoint, name, original)


class ReentrantBypass:
    """Replacement of CheckpointFunction.

    Like the original, it disables gradients unless a tensor among its arguments requires one."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        needed = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return function(*args)


def _bypass(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace the generator that surrounds a non-reentrant checkpointed function."""
    yield
