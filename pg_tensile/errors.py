"""The errors of the library: each says in one sentence what is wrong, and a hint says what to do.

The library knows no SQLSTATE; `pyworker/child.py` maps these classes to them.
"""

from __future__ import annotations


class TensileError(Exception):
    """Base of all errors a user can cause. `message` is one lower-case sentence, `hint` says what to do about it,
    `detail` gives the numbers; both may be None."""

    def __init__(self, message: str, hint: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail


class DataError(TensileError):
    """The query's rows cannot be trained on or predicted with."""


class SpoolError(TensileError):
    """The packed files that hold data larger than the dataset cache cannot be written."""


class ArchitectureError(TensileError):
    """A model cannot be built from its architecture, or does not do what its architecture promises."""


class CheckpointError(TensileError):
    """A checkpoint or a file of weights does not fit the model it belongs to."""


class DeviceError(TensileError):
    """The device asked for does not exist or cannot be used."""


class TrainingError(TensileError):
    """Training cannot go on. `step` counts optimizer steps over all epochs from 1."""

    def __init__(
        self, message: str, hint: str | None = None, detail: str | None = None, step: int | None = None
    ) -> None:
        super().__init__(message, hint, detail)
        self.step = step


class NotFiniteError(TrainingError):
    """A loss or a weight became infinite or not a number."""


class OptionError(TensileError):
    """An option of a job or of the command line is missing, wrong or contradicts another."""


class MeasurementError(TensileError):
    """Operators cannot be measured."""


class LinkError(DeviceError):
    """A copy between device and host memory failed, or the link is closed."""


class OutOfDeviceMemoryError(DeviceError):
    """An operator needs more memory than the device or the budget has. All sizes are bytes; `budget` is None when the
    hardware's memory was used up, `requested` is what the operator creates plus its workspace."""

    def __init__(self, operator: str, requested: int, in_use: int, budget: int | None) -> None:
        limit = "the device's memory" if budget is None else f"the budget of {budget:,} bytes"
        super().__init__(
            f"{operator} needs {requested:,} bytes besides the {in_use:,} in use: together more than {limit}",
            hint="Use a policy that saves memory, a larger budget or a smaller batch.",
            detail=f"requested {requested}, in use {in_use}, budget {budget}",
        )
        self.operator = operator
        self.requested = requested
        self.in_use = in_use
        self.budget = budget


class ExecutorError(TensileError):
    """An executor cannot do what it was asked for in the state that it is in."""


class UnknownPolicyError(TensileError):
    """No policy has that name."""


class SimulationError(TensileError):
    """Jobs cannot be simulated as asked."""


class BudgetError(TensileError):
    """No plan keeps jobs within a budget. `smallest_bytes`: the least with which one was found; `operator`: what needs
    the most memory in the job that does not fit."""

    def __init__(self, budget_bytes: int, smallest_bytes: int, operator: str) -> None:
        super().__init__(
            f"no plan needs less than {smallest_bytes:,} bytes of device memory; the budget is {budget_bytes:,}",
            hint="Use a larger budget, a smaller batch or fewer jobs at once.",
            detail=f"the most memory is needed by {operator}",
        )
        self.smallest_bytes = smallest_bytes
        self.operator = operator


class BatchSizeError(TensileError):
    """No batch size can be trained with. `batch_size`: the smallest that was tried; `least_bytes`: what it needs at
    least, 0 if memory is not the reason; `reason`: what is, or what needs the most of it."""

    def __init__(self, batch_size: int, least_bytes: int, budget_bytes: int | None, reason: str = "") -> None:
        limit = "the device has less" if budget_bytes is None else f"the budget is {budget_bytes:,}"
        needs = f"needs at least {least_bytes:,} bytes of device memory; {limit}"
        super().__init__(
            f"no batch size fits: a batch of {batch_size} {needs if least_bytes else 'cannot be trained'}",
            hint="Use a larger memory budget or a smaller model." if least_bytes else "Give a batch size.",
            detail=reason or None,
        )
        self.batch_size = batch_size
        self.least_bytes = least_bytes
        self.budget_bytes = budget_bytes


class MemoryRefusedError(TensileError):
    """A job needs more device memory than it may have. All sizes are bytes; `operator`: what needs the most of it."""

    def __init__(self, least_bytes: int, budget_bytes: int, operator: str | None, hint: str | None = None) -> None:
        message = f"the job needs at least {least_bytes:,} bytes of device memory, but may have {budget_bytes:,}"
        super().__init__(message, hint, operator and f"the most memory is needed by {operator}")
        self.least_bytes = least_bytes
        self.budget_bytes = budget_bytes


class CodecError(TensileError):
    """A codec that does not exist or is not installed, a chunk it cannot code, or bytes it did not write."""


class ModelRefusedError(TensileError):
    """A model that is to predict needs more device memory than it may have. All sizes are bytes; `operator`: what needs
    the most of it."""

    def __init__(self, least_bytes: int, budget_bytes: int, operator: str) -> None:
        super().__init__(
            f"the model needs at least {least_bytes:,} bytes of device memory, but may have {budget_bytes:,}",
            hint="Use a larger memory budget.",
            detail=f"the most memory is needed by {operator}",
        )
        self.least_bytes = least_bytes
        self.budget_bytes = budget_bytes


class TraceError(TensileError):
    """A trace contradicts itself, or its bytes are not a trace."""


class PlanError(TensileError):
    """Rows or bytes that are not a plan of any trace."""


class InvalidPlanError(PlanError):
    """A plan that cannot be executed on its trace: `operator` is the first that breaks (-1: none does, the plan as a
    whole is wrong), `tensor` and `event` (its place in the plan) are what it breaks on; -1: none."""

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        detail: str | None = None,
        operator: int = -1,
        tensor: int = -1,
        event: int = -1,
    ) -> None:
        super().__init__(message, hint, detail)
        self.operator = operator
        self.tensor = tensor
        self.event = event


class CaptureError(TensileError):
    """A training step that cannot be captured as a static graph. `source` is the line of the model that is the reason
    ("model.py:41"), None where it is not known."""

    def __init__(
        self, message: str, hint: str | None = None, detail: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message if source is None else f"{message} ({source})", hint, detail)
        self.source = source


class SearchError(TensileError):
    """A search for a better plan cannot be made as asked."""
