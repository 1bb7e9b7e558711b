"""Stacked recurrent layers with dropout as one-layer calls with dropout between them.

The function is the same. cuDNN draws the dropout inside a stack from a state of its own, which is a part of neither
plans nor checkpoints; dropout between calls draws from PyTorch's generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor

FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of torch._VF, where PyTorch's modules look them up at each call


@contextmanager
def stacks_split() -> Iterator[None]:
    """Make PyTorch's recurrent modules call `split` in this thread, if they train several layers with dropout."""
    thread = threading.get_ident()
    originals = {name: getattr(_VF, name) for name in FUNCTIONS}

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            layers, dropout, training = args[4:7] if isinstance(args[3], bool) else args[5:8]
            splits = threading.get_ident() == thread and layers > 1 and dropout > 0 and training
            return split(function, *args) if splits else function(*args)

        return call

    for name, original in originals.items():
        setattr(_VF, name, replacement(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(_VF, name, original)


def split(function: Callable[..., Any], sequence: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of `function`, one of `FUNCTIONS`: the sequence and the last states of all layers.

    The arguments are its own: padded sequences with their states, or the elements of packed ones, batch sizes and
    states; then weights, has_biases, num_layers, dropout, train and bidirectional, for padded ones batch_first."""
    sizes, rest = ((), args) if isinstance(args[2], bool) else (args[:1], args[1:])
    states, weights, has_biases, layers, dropout, training, bidirectional, *layout = rest
    of_layer, directions = len(weights) // layers, 2 if bidirectional else 1
    last_states = []
    for layer in range(layers):
        if layer:
            sequence = torch.dropout(sequence, dropout, training)
        used = slice(layer * directions, (layer + 1) * directions)
        start = states[used] if isinstance(states, Tensor) else [state[used] for state in states]
        own = weights[layer * of_layer : (layer + 1) * of_layer]
        sequence, *last = function(sequence, *sizes, start, own, has_biases, 1, 0.0, training, bidirectional, *layout)
        last_states.append(last)
    return sequence, *(torch.cat(kind) for kind in zip(*last_states, strict=True))
