"""Errors of the library: each states in one sentence what is wrong, and a hint states what to do about it.

The library uses no SQLSTATEs; `pyworker/child.py` maps these classes to them.
"""

from __future__ import annotations

from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)


class TensileError(Exception):
    """Base class of all errors that a user can cause.

    `message` is one lower-case sentence, `hint` says what to do about it, `detail` gives the numbers. `hint` and
    `detail` may be None.
    """

    def __init__(self, message: str, hint: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy the error, which may come from another process, without the arguments of its class."""
        return _copied, (type(self), self.args, self.__dict__)


def _copied(kind: type[TensileError], args: tuple[object, ...], state: dict[str, Any]) -> TensileError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def noted(error: Error) -> Error:
    """Return the error, with its detail and hint added as notes, which Python prints below the message."""
    if getattr(error, "__notes__", None):
        return error
    for word in ("detail", "hint"):
        if text := getattr(error, word, None):
            error.add_note(f"{word}: {text}")
    return error


class DataError(TensileError):
    """The query's rows cannot be trained on or predicted with."""


class SpoolError(TensileError):
    """The packed files that hold data larger than the dataset cache cannot be written."""


class ArchitectureError(TensileError):
    """A model cannot be built from its architecture, or does not do what its architecture promises."""


class CheckpointError(TensileError):
    """A checkpoint or a file of weights does not fit the model it belongs to."""


class ModelFileError(TensileError):
    """A model file is damaged, or the model that it describes cannot have been trained."""


class ExportError(TensileError):
    """A model cannot be written in the requested format."""


class DeviceError(TensileError):
    """The requested device does not exist or cannot be used."""


class TrainingError(TensileError):
    """Training cannot continue. `step` is the number of the optimizer step, counted over all epochs from 1, or None."""

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
    """Operators cannot be measured, or stored latencies or latency models are invalid."""


class DeviceFaultError(DeviceError):
    """The device has failed: what this process had on it is lost, and another process has to continue."""


class LinkError(DeviceError):
    """A copy between device and host memory failed, or the link is closed."""


class OutOfDeviceMemoryError(DeviceError):
    """An operator needs more memory than the device or the budget provides.

    All sizes are bytes. `requested` is what the operator creates plus its workspace; `budget` is None if the hardware's
    memory was exhausted.
    """

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
    """An executor cannot perform the requested operation in its current state."""


class UnknownPolicyError(TensileError):
    """No policy has that name."""


class SimulationError(TensileError):
    """Jobs cannot be simulated with the given arguments."""


class BudgetError(TensileError):
    """No plan keeps the jobs within a budget.

    `smallest_bytes` is the smallest budget for which a plan was found; `operator` is the one that needs the most memory
    in the job that does not fit.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int, operator: str) -> None:
        super().__init__(
            f"no plan needs less than {smallest_bytes:,} bytes of device memory; the budget is {budget_bytes:,}",
            hint="Use a larger budget, a smaller batch or fewer jobs at once.",
            detail=f"the most memory is needed by {operator}",
        )
        self.smallest_bytes = smallest_bytes
        self.operator = operator


class BatchSizeError(TensileError):
    """No batch size can be used for training.

    `batch_size` is the smallest that was tried and `least_bytes` the least memory that it needs, 0 if memory is not the
    cause. `reason` describes the cause, for example what needs the most memory.
    """

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
    """A job needs more device memory than it may use.

    All sizes are bytes; `operator` is the one that needs the most memory, or None. `max_slowdown`: the job's, if it
    needs as much because of that.
    """

    def __init__(
        self,
        least_bytes: int,
        budget_bytes: int,
        operator: str | None,
        hint: str | None = None,
        max_slowdown: float | None = None,
    ) -> None:
        message = f"the job needs at least {least_bytes:,} bytes of device memory, but may have {budget_bytes:,}"
        if max_slowdown is not None:
            message += f" (for its max_slowdown of {max_slowdown:g})"
        super().__init__(message, hint, operator and f"the most memory is needed by {operator}")
        self.least_bytes = least_bytes
        self.budget_bytes = budget_bytes


class CodecError(TensileError):
    """A codec does not exist or is not installed, cannot code a chunk, or cannot decode the bytes given to it."""


class ModelRefusedError(TensileError):
    """A model for predictions needs more device memory than it may use.

    All sizes are bytes; `operator` is the one that needs the most memory.
    """

    def __init__(self, least_bytes: int, budget_bytes: int, operator: str) -> None:
        super().__init__(
            f"the model needs at least {least_bytes:,} bytes of device memory, but may have {budget_bytes:,}",
            hint="Use a larger memory budget.",
            detail=f"the most memory is needed by {operator}",
        )
        self.least_bytes = least_bytes
        self.budget_bytes = budget_bytes


class TraceError(TensileError):
    """A trace is inconsistent, or its bytes are not a trace."""


class PlanError(TensileError):
    """Rows or bytes are not a plan of any trace."""


class InvalidPlanError(PlanError):
    """A plan cannot be executed on its trace.

    `operator` is the first at which the plan fails, −1 if the plan as a whole is wrong. `tensor` and `event` (its index
    in the plan) are what it fails on, −1 where that does not apply.
    """

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
    """A training step cannot be captured as a static graph.

    `source` is the line of the model that is the cause ("model.py:41"), or None if it is not known.
    """

    def __init__(
        self, message: str, hint: str | None = None, detail: str | None = None, source: str | None = None
    ) -> None:
        super().__init__(message if source is None else f"{message} ({source})", hint, detail)
        self.source = source


class PlanSearchError(TensileError):
    """A search for a better plan cannot be run with the given arguments."""
