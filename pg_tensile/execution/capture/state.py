"""What a call of a model can change in Python: kept before capturing and put back after it, whatever happens."""

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
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}  # whose objects keep nothing from call to call


class ModelState:
    """The attributes of a model's modules, and the containers, objects and generators that they lead to."""

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Container, Container]] = []  # with a copy
        self._generators: list[tuple[Any, Any]] = []  # with its state
        self._walk([vars(module) for module in model.modules()])

    def _walk(self, reached: list[Any]) -> None:
        seen: set[int] = set()
        while reached:
            item = reached.pop()
            if isinstance(item, LEAVES) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, (dict, list, set, deque)):
                if type(item) in CONTAINERS:  # others may not let themselves be filled again
                    self._containers.append((item, item.copy()))
                reached.extend(item.values() if isinstance(item, dict) else item)
            elif isinstance(item, (tuple, frozenset)):
                reached.extend(item)
            elif (state := _generator_state(item)) is not None:
                self._generators.append((item, state))
            elif isinstance(item, nn.Module) or type(item).__module__.partition(".")[0] not in LIBRARIES:
                reached.append(getattr(item, "__dict__", None))

    def substitute(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Puts other tensors in the places of those with these ids, in every dictionary and list."""
        for container, _ in self._containers:
            if isinstance(container, (dict, list)):
                for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
                    if isinstance(item, torch.Tensor) and id(item) in tensors:
                        container[key] = tensors[id(item)]

    def draws(self) -> bool:
        """Whether a generator that the model keeps was drawn from."""
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
    """What is in a container, by identity and, if it has one, in its order."""
    if isinstance(container, dict):
        return [(key, id(item)) for key, item in container.items()]
    return container if isinstance(container, set) else [id(item) for item in container]


def _generator_state(item: Any) -> Any:
    """The state of a random number generator, None for anything else."""
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
    """The global generators of Python, NumPy and PyTorch end as they began."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


@contextmanager
def logs_silenced() -> Iterator[None]:
    """PyTorch logs a traceback for every error of a fake kernel; we raise it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def checkpoints_bypassed() -> Iterator[None]:
    """`torch.utils.checkpoint`, by whatever name it was imported, runs its function once and keeps what it needs: what
    is recomputed is a plan's business, and a captured recomputation would draw other random numbers."""
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
    """In the place of CheckpointFunction. It, too, lets no gradient in if no tensor among the arguments needs one."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        needed = any(isinstance(item, torch.Tensor) and item.requires_grad for item in args)
        with torch.set_grad_enabled(needed and torch.is_grad_enabled()):
            return function(*args)


def _bypass(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of the generator that surrounds a checkpointed function that is not reentrant."""
    yield
