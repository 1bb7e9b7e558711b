"""Prediction within a memory budget, for models whose weights exceed the device (SwapAdvisor, section 6.3).

A `Served` model is captured as a forward graph for each batch size that is requested, planned within the device's
budget and executed under these plans. Between two predictions its weights are in the boundary state of the plan: some
stay on the device, all others are in host memory, into which they were loaded. No weight changes, so a weight that is
streamed through the device is swapped in and then released without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pg_tensile.errors import ArchitectureError, CaptureError, ModelRefusedError
from pg_tensile.execution.capture import Captured, capture_inference
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.global_state import alone
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.streaming import streamed
from pg_tensile.planning.trace.trace import Trace


def plan_within(trace: Trace, profile: DeviceProfile, budget_bytes: int | None) -> Candidate:
    """Return the plan whose repeated iteration the simulator finds fastest within the budget.

    It is the vanilla plan if everything fits or `budget_bytes` is None, else the faster one of `joint`'s and the
    streaming plan. Raises ModelRefusedError with the least bytes for which there is a plan."""
    planner = JobPlanner(trace, profile)
    if budget_bytes is None or planner.vanilla.device_peak_bytes <= budget_bytes:
        return planner.vanilla
    if planner.least_bytes > budget_bytes:
        raise ModelRefusedError(planner.least_bytes, budget_bytes, planner.largest_operator())
    streaming, joint = streamed(planner, budget_bytes), planner.within(budget_bytes)
    return joint if streaming is None or joint.us <= streaming.us else streaming


class _Planned(NamedTuple):
    """The graph of one batch size, and the plan under which it is executed."""

    captured: Captured
    candidate: Candidate


class Served:
    """A model that predicts on `device` within its budget, in batches of at most `most_rows` rows.

    `model` takes tensors [rows, …] and returns one tensor [rows, …], each row of which depends only on the same row of
    its inputs; it must not be used elsewhere until `close`. `example`: tensors like its inputs, with any number of
    rows. The caller keeps and closes `device`, but its whole budget is used here. Raises ModelRefusedError if there is
    no plan for a single row, CaptureError if the model cannot be a static graph, DeviceError.

    >>> with closing(HostDevice(profile, 60_000_000)) as device, closing(Served(model, [image], device)) as served:
    ...     outputs = served.predict([image])
    """

    def __init__(self, model: nn.Module, example: Sequence[Tensor], device: Device, most_rows: int = 1) -> None:
        self._model = model
        self._row = [(tensor.shape[1:], tensor.dtype) for tensor in example]
        self._device = device
        self._most_rows = 1
        self._planned: dict[int, _Planned] = {}
        self._graphs: dict[int, Graph] = {}
        self._executor: Executor | None = None
        with torch.inference_mode(False), torch.no_grad():
            self._add(1)
        self._most_rows = max(1, min(most_rows, self._rows_that_may_fit()))

    # ---- predicting ----

    def predict(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the model's output [rows, …], in host memory.

        The rows are executed in batches whose size is a power of two: the smallest that holds all remaining rows or, if
        that is too large for the budget or `most_rows`, the largest possible. The last batch is padded with zeros. The
        bits are those of the unplanned model on such a batch. Raises the errors of operators and, for a new batch size,
        those of the constructor; the model stays usable."""
        with torch.inference_mode(False), torch.no_grad():
            rows, start = len(inputs[0]), 0
            parts: list[Tensor] = []
            while start < rows or not parts:
                size = self._batch_rows(rows - start)
                parts.append(self._execute([tensor[start : start + size] for tensor in inputs], size))
                start += size
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _execute(self, inputs: list[Tensor], size: int) -> Tensor:
        """Return the output of at most `size` rows, padded to `size` rows for the execution."""
        assert self._executor is not None
        rows = len(inputs[0])
        if rows < size:
            inputs = [torch.cat([part, part.new_zeros((size - rows, *part.shape[1:]))]) for part in inputs]
        output: Tensor = self._executor.evaluate(inputs, graph=self._graphs[size]).outputs[0]
        try:
            return output[:rows].to("cpu")
        except RuntimeError:
            self._device.synchronize()  # raises the device's error if it has failed
            raise

    def _batch_rows(self, rows: int) -> int:
        """Return the size of the next batch if `rows` rows are left; its graph is captured on first use."""
        while True:
            size = min(1 << max(rows - 1, 0).bit_length(), _power_of_two(self._most_rows))
            if size in self._graphs:
                return size
            try:
                self._add(size)
            except ModelRefusedError:  # its workspaces are larger than estimated
                self._most_rows = size // 2

    # ---- batch sizes ----

    def _add(self, rows: int) -> None:
        """Add a batch size: capture its graph and measure its workspaces while nothing else is on the device.

        The existing sizes stay usable if that fails."""
        self._put_away()
        try:
            self._planned[rows] = self._plan(rows)
        finally:
            self._take_up()

    def _plan(self, rows: int) -> _Planned:
        with alone():
            captured = self._measured(rows)
        return _Planned(captured, plan_within(captured.trace, self._device.profile, self._device.budget_bytes))

    def _measured(self, rows: int) -> Captured:
        """Return the graph of a batch size, with the workspaces of its operators."""
        example = [torch.empty((rows, *shape), dtype=dtype) for shape, dtype in self._row]
        captured = capture_inference(self._model, example, self._device.torch_device)
        _check_output(captured, rows)
        budget = self._device.budget_bytes
        # every operator is measured, even those that exceed the budget, so that a refusal states a sufficient budget
        limit = self._device.profile.memory_bytes if budget is None else max(budget, least_bytes(captured.trace))
        return probe(captured, self._device, limit)

    def _take_up(self) -> None:
        for rows, (captured, candidate) in self._planned.items():
            if self._executor is None:
                self._executor = Executor(captured, self._model, self._device, candidate.plan)
                self._graphs[rows] = self._executor.graphs[0]
            else:
                self._graphs[rows] = self._executor.add(captured, candidate.plan)

    def _put_away(self) -> None:
        self._graphs.clear()
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _rows_that_may_fit(self) -> int:
        """Return an estimate of the rows with which the working set of every operator fits the budget.

        It is derived from the graph of a single row, whose tensors that are not persistent grow with the rows."""
        trace, budget = self._planned[1].captured.trace, self._device.budget_bytes
        if budget is None:
            budget = self._device.profile.memory_bytes
        size = trace.tensor_bytes[trace.access_tensor]
        grows = ~trace.persistent[trace.access_tensor]
        fixed, growing = (
            np.bincount(trace.access_operator, np.where(which, size, 0), trace.operator_count)
            for which in (~grows, grows)
        )
        return int(((budget - fixed - trace.workspace_bytes) // np.maximum(growing, 1)).min())

    # ---- memory and plans ----

    @property
    def budget_bytes(self) -> int | None:
        return self._device.budget_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now, without workspaces."""
        return 0 if self._executor is None else self._executor.device_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest device memory (bytes) of a prediction since the last new batch size, workspaces included."""
        return 0 if self._executor is None else self._executor.counters.device_peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the plans require."""
        return 0 if self._executor is None else self._executor.host_bytes

    @property
    def candidates(self) -> dict[int, Candidate]:
        """Plan of each batch size used so far, with the simulator's results."""
        return {rows: planned.candidate for rows, planned in self._planned.items()}

    def trace(self, rows: int = 1) -> Trace:
        """Return the trace of a batch size used so far."""
        return self._planned[rows].captured.trace

    def close(self) -> None:
        """Return the model to the caller, with its weights where they were before. Idempotent."""
        with torch.inference_mode(False), torch.no_grad():
            self._put_away()
        self._planned.clear()


class FlatModel(nn.Module):
    """A model of `Features`, called with their tensors one by one (`Features.flat`)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Tensor:
        try:
            outputs: Tensor = self.model(Features.from_flat(tensors))
            return outputs
        except ArchitectureError as error:  # of a user's model: capturing explains its cause
            raise error.__cause__ or error from None


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def _check_output(captured: Captured, rows: int) -> None:
    shapes = [captured.values[slot].shape for slot in captured.outputs]
    if len(shapes) != 1 or shapes[0][:1] != (rows,):
        returned = ", ".join(str(list(shape)) for shape in shapes)
        raise CaptureError(f"the model returns {returned} for {rows} rows", hint="Return one tensor [rows, …].")
