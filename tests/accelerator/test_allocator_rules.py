"""The rules of the allocator at hand are those that plans count with, or are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pg_tensile.execution.measuring.allocator import _sizes, allocator_rules
from pg_tensile.execution.runtime.allocator_limit import allocator_caution
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from tests.accelerator.target import DEVICE, TYPE

MIB = 1 << 20
emulated = pytest.mark.skipif(
    TYPE != "emulated" or not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="the settings of the allocator cannot be changed and told",
)


@pytest.fixture
def here(emulator: None) -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def settings() -> Iterator[Callable[[str], None]]:
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


def test_the_allocator_follows_the_rules_and_all_memory_is_given_back(here: torch.device) -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved(here)
    assert allocator_rules(here) == DEFAULT_RULES
    assert torch.accelerator.memory_reserved(here) == before


@emulated
def test_their_sizes_can_be_read_from_the_statistics(here: torch.device, control) -> None:
    control.expandable_segments(True)
    assert _sizes(here) == DEFAULT_RULES


@emulated
def test_larger_pages_are_found(here: torch.device, settings: Callable[[str], None]) -> None:
    try:
        settings("large_segment_size_mb:64")
    except ValueError:
        pytest.skip("this PyTorch has pages of one size")
    try:
        assert allocator_rules(here) == AllocatorRules(large_page_bytes=64 * MIB)
    finally:
        settings("large_segment_size_mb:20")  # which would stay


@emulated
def test_segments_that_do_not_grow_follow_no_such_rules(here: torch.device, settings: Callable[[str], None]) -> None:
    settings("expandable_segments:False")
    assert not allocator_rules(here).is_followed


@emulated
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("expandable_segments:False", "expandable_segments:False"),
        ("roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments:True", "roundup_power2_divisions:"),
        ("max_split_size_mb:100,garbage_collection_threshold:0.5", "max_split_size_mb:100, garbage_collection"),
    ],
)
def test_settings_that_plans_do_not_count_with_are_told(settings: Callable[[str], None], text: str, told: str) -> None:
    settings(text)
    caution = allocator_caution(DEFAULT_RULES)
    assert caution is not None and f"is set to {told}" in caution


@emulated
def test_other_settings_are_no_reason_to_be_cautious(settings: Callable[[str], None]) -> None:
    settings("expandable_segments:True,pinned_use_background_threads:True")
    assert allocator_caution(DEFAULT_RULES) is None
    assert "does not take memory as plans expect" in (allocator_caution(AllocatorRules(is_followed=False)) or "")
