"""Sizes of an allocator's blocks and pages, and what a plan takes with them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from pg_tensile.errors import DeviceError
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, MARGIN_BYTES, AllocatorRules
from pg_tensile.planning.device.profile import A100_40GB, DeviceProfile
from pg_tensile.planning.plan.allocator import Allocator

MIB = 1 << 20


def test_larger_pages_take_more_of_the_device() -> None:
    taken = []
    for rules in (DEFAULT_RULES, AllocatorRules(large_page_bytes=64 * MIB)):
        allocator = Allocator(rules=rules)
        allocator.allocate(30 * MIB)
        allocator.allocate(1000)
        taken.append(allocator.device_bytes)
    assert taken == [42 * MIB, 66 * MIB]


def test_blocks_are_rounded_and_divided_by_the_rules() -> None:
    allocator = Allocator(rules=AllocatorRules(block_bytes=1024, small_bytes=2 * MIB))
    assert allocator.allocate(1) == (0, 0, 1024)
    assert allocator.allocate(2 * MIB) == (0, 1024, 2 * MIB)
    assert allocator.allocate(2 * MIB + 1) == (1, 0, 2 * MIB + 1024)


def test_the_margin_has_room_for_larger_pages() -> None:
    assert DEFAULT_RULES.margin_bytes == MARGIN_BYTES
    assert AllocatorRules(large_page_bytes=2 * MIB).margin_bytes == MARGIN_BYTES
    assert AllocatorRules(large_page_bytes=40 * MIB).margin_bytes == MARGIN_BYTES + 60 * MIB


@pytest.mark.parametrize(
    "sizes", [{"block_bytes": 0}, {"block_bytes": -512}, {"large_page_bytes": 1 << 50}, {"small_page_bytes": 1000}]
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(DeviceError, match="an allocator's"):
        AllocatorRules(**sizes)  # type: ignore[arg-type]


def test_they_are_stored_with_the_profile_of_a_device() -> None:
    profile = replace(A100_40GB, allocator=AllocatorRules(large_page_bytes=40 * MIB))
    assert DeviceProfile.from_json(asdict(profile)) == profile
    earlier = asdict(A100_40GB)
    del earlier["allocator"]
    assert DeviceProfile.from_json(earlier) == A100_40GB
    with pytest.raises(DeviceError, match="cannot be used"):
        DeviceProfile.from_json(asdict(profile) | {"allocator": {"block_bytes": 0}})
