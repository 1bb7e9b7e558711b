"""PyTorch's compiler (torch._dynamo), left out of processes that compile nothing.

Fake tensors read its settings, optimizers exempt their methods from it and break its graphs before and after a step,
and process groups clear a cache of it. For any of these, PyTorch imports the whole package: most of a second, and as
much memory as many models need. `defer` puts a module in its place that executes the package as soon as anything else
in it is needed, for instance by torch.compile.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class _Deferred(ModuleType):
    """The package before its code is executed. It has no `__path__`, so importing any other part of it executes it."""

    _lock = threading.RLock()
    _began = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        with self._lock:
            if not self._began and isinstance(self, _Deferred):  # else executed, or by this thread at the moment
                self._began = True
                for replaced in _REPLACED:
                    del self.__dict__[replaced]
                assert self.__spec__ is not None and self.__spec__.loader is not None
                self.__path__ = self.__spec__.submodule_search_locations or []
                self.__spec__.loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}") from None


def _exempt(function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
    """Return the function: as long as nothing is compiled, nothing needs to be exempted."""
    return function


def _break(message: str = "") -> None:
    """Do nothing: as long as nothing is compiled, there is no graph to break."""


class _Rules:
    """torch._dynamo.trace_rules: a new process group clears their cache, in which there is nothing yet."""

    def clear_lru_cache(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{NAME}.trace_rules"), name)


_REPLACED = {"disable": _exempt, "graph_break": _break, "trace_rules": _Rules()}


def defer() -> None:
    """Put off the execution of torch._dynamo; does nothing if it is imported already."""
    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    module = _Deferred(NAME)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__package__, module.__path__ = NAME, spec.submodule_search_locations or []
    module.__dict__.update(_REPLACED)
    sys.modules[NAME] = module
    torch._dynamo = module  # type: ignore[assignment,unused-ignore]
    importlib.import_module(f"{NAME}.config")  # the settings, which need nothing else
    del module.__path__


def is_loaded() -> bool:
    """Return whether the package is imported and executed."""
    return NAME in sys.modules and not isinstance(sys.modules[NAME], _Deferred)
