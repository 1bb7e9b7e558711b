"""PyTorch's own means of saving memory, for comparison with policies: they take turns in the same rounds.

Each is eager PyTorch's step (`EagerStepper`) with one thing changed:

| name | what is changed |
| --- | --- |
| `peer:checkpoint` | `torch.utils.checkpoint` around each block (see `blocks`): its activations are recomputed |
| `peer:save_on_cpu` | `torch.autograd.graph.save_on_cpu`: saved tensors wait for the backward pass in host memory |
| `peer:memory_budget=X` | `torch.compile` with `activation_memory_budget` X: the partitioner chooses recomputations |
| `peer:unified_memory` | CUDA's managed memory (`torch.cuda._use_uvm`), which the driver pages in and out |

They have no plan and no budget. Their peaks are defined like those of policies: `peak_bytes` is the maximum over the
operators of the storages on the device right after the operator, `device_peak_bytes` adds the operator's workspace.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from pg_tensile.errors import DeviceError, MeasurementError
from pg_tensile.execution.raw_bytes import raw_bytes
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.measure import Meter, StorageObserver
from pg_tensile.execution.runtime.record import Counters
from pg_tensile.tools.bench.contenders import EagerStepper, same_bits
from pg_tensile.tools.bench.options import CHECKPOINT, MEMORY_BUDGET, SAVE_ON_CPU, UNIFIED_MEMORY, PolicyChoice
from pg_tensile.tools.bench.workload import Batch, Workload


def start_peer(choice: PolicyChoice, workload: Workload, device: Device) -> EagerStepper:
    """Start a run of one of options.PEERS.

    Raises DeviceError or MeasurementError if that is impossible; like any other exception, it becomes the row's error.
    """
    return STEPPERS[choice.name](workload, device, **dict(choice.keywords))


# ---- checkpointing --------------------------------------------------------------------------------------------------


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the parts that are checkpointed: the members of the model's longest sequence.

    `nn.Sequential` (subclasses too) and `nn.ModuleList` are sequences; their members are the modules in them, and those
    of sequences inside them. The longest one (the first of equal ones) has the units of all stages of a pytorchcv
    network, the layers of a transformer. Raises MeasurementError if no sequence has two members.
    """
    sequences = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    longest = max((list(members(module)) for module in sequences), key=len, default=[])
    if len(longest) < 2:
        hint = "Blocks are the members of the longest nn.Sequential or nn.ModuleList, which this model does not have."
        raise MeasurementError("the model has no sequence of blocks to checkpoint", hint)
    return longest


def members(sequence: nn.Module) -> Iterator[nn.Module]:
    for child in sequence.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from members(child)
        else:
            yield child


class CheckpointStepper(EagerStepper):
    """Eager PyTorch that keeps only the inputs of each block.

    Not reentrant; random operators repeat the numbers they drew, for which PyTorch keeps the generators' states in host
    memory. The batch norms of a block are executed again, so their running statistics are updated twice a step, and
    differ.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        super().__init__(workload, device.torch_device)
        for block in blocks(self._step.model):
            again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=True)
            block.forward = again


# ---- saving on the host ---------------------------------------------------------------------------------------------


class SaveOnCpuStepper(EagerStepper):
    """Eager PyTorch that keeps saved tensors in host memory.

    On CUDA it is PyTorch's `save_on_cpu(pin_memory=True)`: each tensor that autograd saves, parameters too, is copied
    to host memory, and back when the backward pass needs it, on the compute stream, which waits.

    On the host `save_on_cpu` copies nothing, as everything is on the CPU. There `HostSaver` does what `save_on_cpu`
    does on CUDA: the same tensors, made contiguous in the same way, are copied to memory that is not the device's, over
    the link that policies pay for, and the compute waits for every copy.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        super().__init__(workload, device.torch_device)
        self._saver = HostSaver(device) if device.torch_device.type == "cpu" else None

    def step(self, batch: Batch) -> Tensor:
        with save_on_cpu(pin_memory=True) if self._saver is None else self._saver.hooks():
            loss = super().step(batch)
        if self._saver is not None:
            self._saver.counters.iterations += 1
        return loss

    def count(self) -> None:
        if self._saver is not None:
            self._saver.counters = Counters()

    def totals(self) -> Counters | None:
        return None if self._saver is None else self._saver.counters


class Packed(NamedTuple):
    """A saved tensor in host memory (uint8[n])."""

    copy: Tensor
    shape: torch.Size
    dtype: torch.dtype


class HostSaver:
    """`save_on_cpu` for the host device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.counters = Counters()

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Packed:
        source = tensor.detach().contiguous()
        with _disable_current_modes():  # observers of device memory must not see host memory
            raw = raw_bytes(source)
            copy = self._device.host_memory(raw.numel())
            self._move(self._device.copy_out, raw, copy)
        self.counters.bytes_out += raw.numel()
        return Packed(copy, tensor.shape, tensor.dtype)

    def _unpack(self, packed: Packed) -> Tensor:
        target = torch.empty(packed.shape, dtype=packed.dtype)
        with _disable_current_modes():
            self._move(self._device.copy_in, packed.copy, raw_bytes(target))
        self.counters.bytes_in += packed.copy.numel()
        return target

    def _move(self, copy: Callable[[Tensor, Tensor], Any], source: Tensor, target: Tensor) -> None:
        began = time.perf_counter()
        self._device.wait(copy(source, target))
        self.counters.stall_us += (time.perf_counter() - began) * 1e6


# ---- the partitioner's budget ---------------------------------------------------------------------------------------


class MemoryBudgetStepper(EagerStepper):
    """The model compiled with `activation_memory_budget`.

    `share`: part of the activations that the partitioner would keep by default; 0 keeps only the inputs. The backend is
    inductor on CUDA, its cache empty; on the host aot_eager, which executes the partitioned graphs operator by
    operator. The first step of a run compiles. What PyTorch cannot compile is executed eagerly; if that is the whole
    model, it is an error.
    """

    def __init__(self, workload: Workload, device: Device, share: float) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # takes a second, paid only by those who compile

        torch.compiler.reset()
        super().__init__(workload, device.torch_device)
        self._share = share
        self._graphs = 0
        self._cache = contextlib.ExitStack()
        on_cuda = device.torch_device.type == "cuda"
        self._backend = lookup_backend("inductor" if on_cuda else "aot_eager")
        if on_cuda:
            from torch._inductor.utils import fresh_cache

            self._cache.enter_context(fresh_cache())
        self._step.model.compile(backend=self._compile, dynamic=False)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self._graphs += 1
        return self._backend(graph, inputs)

    def step(self, batch: Batch) -> Tensor:
        with functorch_config.patch(activation_memory_budget=self._share):
            loss = super().step(batch)
        if not self._graphs:
            raise MeasurementError("torch.compile found nothing in the model that it can compile")
        return loss

    def close(self) -> None:
        super().close()
        torch.compiler.reset()
        self._cache.close()


# ---- unified memory -------------------------------------------------------------------------------------------------


class UnifiedMemoryStepper(EagerStepper):
    """Eager PyTorch with everything in CUDA's managed memory, which may exceed the device's.

    It takes as much as eager PyTorch; the driver decides how much of it is on the device, and no allocator records it.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        if device.torch_device.type != "cuda":
            raise DeviceError("unified memory is CUDA's, and this device is the host", "Choose --device cuda.")
        managed = getattr(torch.cuda, "_use_uvm", None)
        if managed is None:
            raise DeviceError(f"PyTorch {torch.__version__} has no unified memory")
        self._managed = contextlib.ExitStack()
        self._managed.enter_context(managed(device.torch_device))
        self._managed.enter_context(torch.autograd.set_multithreading_enabled(False))  # of this thread only
        try:
            super().__init__(workload, device.torch_device)
        except BaseException:
            self._managed.close()
            raise

    def close(self) -> None:
        super().close()
        self._managed.close()


STEPPERS: Mapping[str, Callable[..., EagerStepper]] = {
    CHECKPOINT: CheckpointStepper,
    SAVE_ON_CPU: SaveOnCpuStepper,
    MEMORY_BUDGET: MemoryBudgetStepper,
    UNIFIED_MEMORY: UnifiedMemoryStepper,
}


# ---- what a step takes ----------------------------------------------------------------------------------------------


class Peaks(NamedTuple):
    """Peaks of one step in bytes: the storages after an operator, and the same with that operator's workspace."""

    peak_bytes: int
    device_peak_bytes: int


class PeakObserver(StorageObserver):
    """Observer of the storages on one type of device, and of the allocator inside each operator."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._type = device.type
        self._meter = meter
        self._before: list[int] = []
        super().__init__()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code is executed and observed in this mode.

        Otherwise PyTorch falls back to eager.
        """
        return True

    def watch(self, tensors: Iterable[Tensor]) -> None:
        super().watch(tensor for tensor in tensors if tensor.device.type == self._type)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._before.append(self.live_bytes())
        self._meter.start()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._meter.stop()

    def peaks(self) -> Peaks:
        """Return the peaks; to be called once, after the step."""
        inside = max(before + int(high) for before, high in zip(self._before, self._meter.read(), strict=True))
        peak = max(seen.bytes for seen in self.seen)
        return Peaks(peak, max(peak, inside))


def measure_peaks(stepper: EagerStepper, batch: Batch, device: Device) -> Peaks:
    """Execute one more step and return its peaks."""
    if isinstance(stepper, MemoryBudgetStepper) and device.torch_device.type == "cuda":
        return _compiled_peaks(stepper, batch, device.torch_device)
    meter = device.allocator()
    with meter, PeakObserver(device.torch_device, meter) as observer:
        observer.watch([*stepper.persistent(), *batch.inputs, *batch.targets])
        stepper.step(batch)
        stepper.synchronize()
    return observer.peaks()


def _compiled_peaks(stepper: EagerStepper, batch: Batch, device: torch.device) -> Peaks:
    """Return the peaks of inductor's code, whose operators cannot be observed: both are the allocator's peak."""
    stepper.forget_gradients()  # as the step does first
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    stepper.step(batch)
    stepper.synchronize()
    more = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in stepper.persistent()}
    peak = sum(storages.values()) + more
    return Peaks(peak, peak)


# ---- whether the gradients are right --------------------------------------------------------------------------------


def gradient_difference(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two elements, as a multiple of the largest element expected.

    0 if all bits are equal, about 1e-7 for float32 rounded differently. It is not relative to each element, because
    many are zero but for rounding. Infinite if one side has a gradient or a NaN that the other lacks.
    """
    if gradients.keys() != expected.keys():
        return float("inf")
    largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
    differing = [name for name, gradient in expected.items() if not same_bits(gradients[name], gradient)]
    if not differing:
        return 0.0
    furthest = max(float((gradients[name].double() - expected[name].double()).abs().max()) for name in differing)
    relative = furthest / largest if largest else float("inf")
    return relative if relative == relative else float("inf")
