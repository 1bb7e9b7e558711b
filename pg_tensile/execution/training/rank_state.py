"""What each rank of a run has for itself in the run's checkpoint: sums of the epoch, and states of generators.

A checkpoint has rank 0's under their plain names, as that of a single process, and those of rank r under `rank<r>.`.
Weights, the optimizer's state and the position of the run are the same on all ranks, so they are stored once.
"""

from __future__ import annotations

from typing import Any

from pg_tensile.execution.distributed.group import Group
from pg_tensile.execution.training.checkpoint import Checkpoint


def add_ranks(checkpoint: Checkpoint, own: Checkpoint, group: Group) -> None:
    """Add what each rank has for itself to the checkpoint; `own` is this rank's. All ranks call it together."""
    parts = group.collected((own.meta, own.tensors))
    for rank, (meta, tensors) in enumerate(parts):
        if rank == 0:
            checkpoint.meta |= meta
            checkpoint.tensors |= tensors
        else:
            checkpoint.put(f"rank{rank}", tensors)
    if group.size > 1:
        checkpoint.meta["ranks"] = [meta for meta, _ in parts[1:]]


def ranks_of(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return what each rank of the run that made the checkpoint had for itself, by rank."""
    others: list[dict[str, Any]] = checkpoint.meta.get("ranks", [])
    return [checkpoint, *(Checkpoint(meta, checkpoint.get(f"rank{rank}")) for rank, meta in enumerate(others, 1))]
