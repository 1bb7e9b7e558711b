"""The compiled extension, loaded once per process."""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

from tests.emulated.emulated.build import build

_NAME = "_native"


def _load() -> Any:
    loaded = sys.modules.get(_NAME)
    if loaded is None:
        loader = ExtensionFileLoader(_NAME, str(build()))
        spec = spec_from_loader(_NAME, loader)
        assert spec is not None
        loaded = module_from_spec(spec)
        loader.exec_module(loaded)
        sys.modules[_NAME] = loaded
    return loaded


native = _load()
