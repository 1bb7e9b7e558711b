"""Which of NVML's processes this one is, and what its context takes, with a stand-in for the driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
import torch

from pg_tensile.execution.backends import nvml
from pg_tensile.execution.backends.nvml import Situation, context_bytes, identified
from tests.nvml import UUID, StandInNvml

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)
OWN = 4711  # NVML's number of this process


class Taking:
    """The memory of this process, in bytes, and others that follow it."""

    def __init__(self) -> None:
        self.bytes = 300 * MIB
        self.rounds = 0

    @contextmanager
    def __call__(self, blocks: int) -> Iterator[int]:
        self.rounds += blocks > 0
        taken = -(-blocks // 2) * 2 * MIB
        self.bytes += taken
        yield taken
        self.bytes -= taken


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Taking:
    """Let the process take memory of its own, in a container: its number is not NVML's."""
    taking = Taking()
    monkeypatch.setattr(nvml, "_taking", lambda device, blocks: taking(blocks))
    monkeypatch.setattr(nvml, "_uuid", lambda device: UUID)
    monkeypatch.setattr(nvml, "_in_initial_namespace", lambda: False)
    monkeypatch.setattr(nvml, "_numbers", {})
    monkeypatch.setattr(nvml, "_contexts", {})
    return taking


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandInNvml], StandInNvml]:
    def install(stand_in: StandInNvml) -> StandInNvml:
        monkeypatch.setitem(sys.modules, "pynvml", stand_in)
        return stand_in

    return install


def test_outside_a_container_the_number_of_the_process_is_enough(taking, install, monkeypatch) -> None:
    monkeypatch.setattr(nvml, "_in_initial_namespace", lambda: True)
    stand_in = install(StandInNvml({1: lambda: 5 * MIB, os.getpid(): lambda: 7 * MIB}))
    assert nvml.process_bytes(DEVICE, 0) == 7 * MIB
    assert taking.rounds == 0 and stand_in.opened == 0


def test_in_a_container_the_process_is_known_by_what_it_takes(taking, install) -> None:
    """Its own number may be that of another process there."""
    growing = count(100 * MIB, 2 * MIB)
    others = {1: lambda: 5 * MIB, os.getpid(): lambda: 900 * MIB, 2: lambda: next(growing), 3: lambda: None}
    install(StandInNvml({**others, OWN: lambda: taking.bytes}))
    assert nvml.process_bytes(DEVICE, 0) == 300 * MIB
    taking.bytes += 50 * MIB
    assert nvml.process_bytes(DEVICE, 0) == 350 * MIB
    assert taking.rounds == 2  # it remembers its number


def test_the_load_of_others_is_known_once_the_process_is(taking, install) -> None:
    stand_in = install(StandInNvml({1: lambda: 5 * MIB, OWN: lambda: taking.bytes}))
    stand_in.utilisation = {1: 30, OWN: 60}
    assert nvml.load_of_others(DEVICE) == 0
    nvml.process_bytes(DEVICE, 0)
    assert nvml.load_of_others(DEVICE) == 0.3


def test_two_processes_that_grow_alike_are_not_told_apart(taking, install) -> None:
    install(StandInNvml({OWN: lambda: taking.bytes, 2: lambda: taking.bytes + MIB}))
    assert nvml.process_bytes(DEVICE, 0) is None
    assert nvml._numbers == {}


def test_one_amount_may_be_anothers_by_chance(taking) -> None:
    """The second one tells them apart."""
    other = iter([100 * MIB, 100 * MIB, 100 * MIB, 100 * MIB])

    def read() -> dict[int, int]:
        follows = taking.bytes if taking.rounds == 1 else 300 * MIB
        return {OWN: taking.bytes, 2: follows, 3: next(other)}

    assert identified(read, taking) == OWN


@pytest.mark.parametrize("taken", [0, -2 * MIB])
def test_without_memory_to_take_nothing_is_known(taken: int) -> None:
    @contextmanager
    def taking(blocks: int) -> Iterator[int]:
        yield taken

    assert identified(lambda: {OWN: 5 * MIB}, taking) is None


def test_where_no_process_has_a_count_nothing_is_taken(taking, install) -> None:
    """As with MIG."""
    install(StandInNvml({1: lambda: None, OWN: lambda: None}))
    assert nvml.process_bytes(DEVICE, 0) is None
    assert taking.rounds == 0


def test_after_an_error_of_the_driver_nothing_is_known(taking, install, monkeypatch) -> None:
    stand_in = install(StandInNvml({}))

    def fail(uuid: str) -> str:
        raise stand_in.NVMLError("not supported")

    monkeypatch.setattr(stand_in, "nvmlDeviceGetHandleByUUID", fail)
    assert nvml.process_bytes(DEVICE, 0) is None
    assert stand_in.opened == 0


# ---- the context -----------------------------------------------------------------------------------------------------


class Device:
    """Memory of a device, before and after a context was created; `others` is read anew."""

    def __init__(
        self, others: Callable[[], dict[int, int | None]], own: bool = False, context: int = 400 * MIB
    ) -> None:
        self.others, self.own, self.context = others, own, context
        self.created = False

    def read(self) -> Situation:
        counts = self.others() | ({OWN: None} if self.own and self.created else {})
        others = sum(used or 0 for used in counts.values())
        return Situation(others + (self.context + 2 * MIB if self.created else 0), counts)

    def create(self) -> int:
        self.created = True
        return 2 * MIB


@pytest.mark.parametrize("own", [False, True])
def test_the_growth_of_the_device_is_the_context(own: bool) -> None:
    """Whether or not NVML lists the process."""
    device = Device(lambda: {1: 100 * MIB}, own)
    assert context_bytes(device.read, device.create) == 400 * MIB


def growing(sizes: Iterator[int]) -> dict[int, int | None]:
    return {1: next(sizes)}


def growing_once(device: Callable[[], Device]) -> dict[int, int | None]:
    return {1: 100 * MIB + (MIB if device().created else 0)}


@pytest.mark.parametrize(
    "device",
    [
        Device(lambda: {1: 100 * MIB}, context=MIB),  # it was there before
        Device(lambda: {1: None}),  # what the other one takes is not known
        Device(partial(growing, count(100 * MIB))),  # it grows all the time
    ],
)
def test_what_may_be_the_work_of_others_is_no_context(device: Device) -> None:
    assert context_bytes(device.read, device.create) is None


def test_a_process_that_grew_or_came_meanwhile_leaves_the_context_unknown() -> None:
    grown = Device(lambda: growing_once(lambda: grown))
    assert context_bytes(grown.read, grown.create) is None
    came = Device(lambda: {1: MIB, **({2: MIB} if came.created else {})}, own=True)
    assert context_bytes(came.read, came.create) is None
    ended = Device(lambda: {} if ended.created else {1: MIB})
    assert context_bytes(ended.read, ended.create) is None


def test_where_only_the_context_is_known_code_and_tensors_count_too(taking, install, monkeypatch) -> None:
    install(StandInNvml({}))
    monkeypatch.setitem(nvml._contexts, DEVICE, 400 * MIB)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 22 * MIB)
    assert nvml.process_bytes(DEVICE, 256 * MIB) == (400 + 256 + 22) * MIB
