"""Calls in a process in which Triton interprets kernels.

Triton looks at TRITON_INTERPRET when it is imported, and a process has one Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


@contextmanager
def interpreting() -> Iterator[Callable[..., object]]:
    """Start the process and yield a function `call(function, *arguments)` that returns or raises as the call does.

    The function and its module are imported there anew; arguments and results are pickled.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
