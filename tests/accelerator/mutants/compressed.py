"""Scenarios of compressed copies: their streams, the thread that submits them, and the staging."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pg_tensile.errors import LinkError
from pg_tensile.execution.backends import backend_of
from pg_tensile.execution.runtime.compressed_copies import HostCopy, Look
from tests.accelerator.mutants.harness import (
    CHUNK,
    DEVICE,
    abandon,
    all_equal,
    encoding,
    onboard,
    opened,
    scenario,
    sparse,
)
from tests.accelerator.mutants.job import Prepared
from tests.emulated.emulated import control


@scenario
def coded(prepared: Prepared) -> object:
    """Chunks that shrink and one that does not, twice, a raw copy between them, and both at once in each direction."""
    with opened() as device:
        control.schedule("random", 2)
        with device.iteration():
            dense = torch.randn(CHUNK // 4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
            source, other = torch.cat([sparse(2), dense.view(torch.uint8), sparse(1.5)]), sparse(0.5, seed=1)
            expected, raw = source.clone(), device.host_memory(other.numel())
            places = [device.host_memory(source.numel()) for _ in range(2)]
            chunks, look = [encoding() for _ in range(2)], Look(4)
            outs = [device.copy_out(source, places[0], 0, chunks[0], look), device.copy_out(other, raw)]
            outs.append(device.copy_out(source, places[1], 0, chunks[1]))
            for out in outs:
                device.wait(out)
            source.zero_()
            backs = [torch.empty_like(source) for _ in places]
            ins = [device.copy_in(*ends) for ends in zip(places, backs, (0, 0), chunks, strict=True)]
            for transfer in ins:
                device.wait(transfer)
            equal = [torch.equal(back, expected) for back in backs]
        device.synchronize()
        assert equal == [True, True] and torch.equal(raw, other.cpu())
        assert torch.equal(HostCopy(places[0], chunks[0]).read(), expected.cpu())
        statistics = look.statistics()
        assert statistics is not None
        return statistics.zero_share, [chunk.coded_bytes for chunk in chunks[0].coded]


class Gate:
    """Coder that codes only while the host waits for a submission, or `open` is true; chunks of some numbers fail.

    They fail after their work was given to the device, which is still to be done then."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.open = False
        self.failing, self.count = failing, 0
        self._main = threading.get_ident()

    def __enter__(self) -> Gate:
        backend = backend_of("emulated")
        self._make = backend.coder

        def coder(device: torch.device) -> Any:
            made: Any = self._make(device)
            encode = made.encode

            def gated(*arguments: Any) -> Any:
                self.count += 1
                number = self.count
                while not self.open and not self._host_waits():
                    pass_on.wait(0.001)
                coded = encode(*arguments)
                if number in self.failing:
                    raise RuntimeError("this chunk cannot be coded")
                return coded

            pass_on = threading.Event()
            made.encode = gated
            return made

        backend.coder = coder  # type: ignore[method-assign]
        return self

    def _host_waits(self) -> bool:
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if frame.f_code.co_name == "join" and frame.f_code.co_filename.endswith(("coded_link.py", "threading.py")):
                return True
            frame = frame.f_back
        return False

    def __exit__(self, *exception: object) -> None:
        self.open = True
        backend_of("emulated").coder = self._make  # type: ignore[method-assign]


@scenario
def submitted_later(prepared: Prepared) -> None:
    """The thread submits a copy only when the host waits for that."""
    with Gate() as gate, opened() as device:
        memory = [device.host_memory(CHUNK) for _ in range(3)]
        control.schedule("late_copies", 0)
        with device.iteration():
            source = sparse(1)
            transfer = device.copy_out(source, memory[0], 0, encoding())
            device.wait(transfer)
            assert transfer.asked is not None and transfer.asked.ended, "waited for what was not submitted"
            source.zero_()
        with device.iteration():
            device.copy_out(sparse(1), memory[1], 0, encoding())
            device.synchronize()
            assert gate.count == 2 and control.pending() == 0, "synchronised before everything was submitted"


@scenario
def submitted_later_and_held(prepared: Prepared) -> None:
    """Plain copies behind one that the thread submits later, in an iteration that is given up."""
    with Gate(), opened() as device:
        memory = [device.host_memory(CHUNK) for _ in range(3)]
        kept: list[torch.Tensor] = []
        control.schedule("late_copies", 0)

        def work() -> None:
            first = device.copy_out(sparse(1), memory[0], 0, encoding())
            device.copy_out(onboard(4, CHUNK), memory[1])
            last = device.copy_out(onboard(5, CHUNK), memory[2])
            device.wait(first)
            while last.asked is None or not last.asked.ended:
                time.sleep(0.001)
            kept.extend(onboard(7, CHUNK) for _ in range(3))

        abandon(device, work)
        device.synchronize()
        assert all_equal(memory[1], 4) and all_equal(memory[2], 5)
        assert all(all_equal(tensor, 7) for tensor in kept)


@scenario
def staging(prepared: Prepared) -> None:
    """The staging goes while copies of an iteration that was given up are still to be made, in both directions."""
    with opened() as device:
        memory, chunks = device.host_memory(3 * CHUNK), encoding()
        with device.iteration():
            source = sparse(3)
            device.wait(device.copy_out(source, memory, 0, chunks))
        for way in ("out", "in"):
            control.schedule("late_copies", 0)
            target = torch.empty_like(source)

            def work(way: str = way, target: torch.Tensor = target) -> None:
                if way == "out":
                    device.copy_out(source, memory, 0, encoding())
                else:
                    device.copy_in(memory, target, 0, chunks)

            abandon(device, work)
            assert device._work.coded is not None
            for number in range(2):
                with device.iteration():
                    filled = [onboard(number, CHUNK) for _ in range(4)]
            assert device._work.coded is None, "the staging stays"
            assert all(all_equal(tensor, 1) for tensor in filled)
            device.synchronize()
            del filled
        assert torch.equal(target, source)


def fails(call: Callable[[], object]) -> None:
    """Check that a call reports the failure of a chunk."""
    try:
        call()
    except LinkError as error:
        assert "cannot be coded" in str(error)
    else:
        raise AssertionError("nothing reported the failure")


@scenario
def failing(prepared: Prepared) -> None:
    """A copy that fails is reported once, by the wait or by whoever synchronises, when all its work has ended."""
    with Gate(failing=(2, 5)) as gate, opened() as device:
        gate.open = True
        memory = device.host_memory(2 * CHUNK)
        control.schedule("late_copies", 0)
        with device.iteration():
            source = sparse(2)
            fails(partial(device.wait, device.copy_out(source, memory, 0, encoding())))
        device.synchronize()
        assert control.pending() == 0, "synchronised before the work of the copy that failed has ended"
        with device.iteration():
            device.wait(device.copy_out(source, memory, 0, encoding()))
            device.copy_out(source, memory, 0, encoding())
        fails(device.synchronize)
        device.synchronize()
        with device.iteration():
            device.wait(device.copy_out(source, memory, 0, encoding()))
        device.synchronize()


@scenario
def staging_after_a_failure(prepared: Prepared) -> None:
    """The staging goes while the coding stream still has work of a copy that failed."""
    with Gate(failing=(2,)) as gate, opened() as device:
        gate.open = True
        control.schedule("late_copies", 0)
        with device.iteration():
            source = sparse(2)
            fails(partial(device.wait, device.copy_out(source, device.host_memory(2 * CHUNK), 0, encoding())))
        for number in range(2):
            with device.iteration():
                filled = [onboard(number, CHUNK) for _ in range(4)]
        assert device._work.coded is None and all(all_equal(tensor, 1) for tensor in filled)
