"""Cost models of all-reduces: bounds, latency terms, and what they have in common."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.planning.latency.collectives import (
    ETHERNET_10,
    LINKS,
    NVLINK_4,
    PCIE_4,
    Link,
    hierarchical_us,
    ring_us,
    tree_us,
)

LINK = st.sampled_from(list(LINKS.values()))
BYTES = st.floats(0, 1e11)
RANKS = st.integers(1, 4096)
MODELS = (ring_us, tree_us)
ROUNDED = 1 + 1e-12


def bound_us(nbytes: float, ranks: int, link: Link) -> float:
    """Return the least time of an all-reduce: 2 (N − 1) / N times the bytes pass each rank's link."""
    return 2 * (ranks - 1) / ranks * nbytes / link.bytes_per_s * 1e6


@given(nbytes=BYTES, ranks=RANKS, link=LINK)
def test_no_algorithm_is_faster_than_the_links(nbytes: float, ranks: int, link: Link) -> None:
    for model in MODELS:
        assert model(nbytes, ranks, link) * ROUNDED >= bound_us(nbytes, ranks, link)


@given(nbytes=BYTES, ranks=RANKS, link=LINK)
def test_a_ring_takes_the_bound_and_a_latency_for_each_message(nbytes: float, ranks: int, link: Link) -> None:
    expected = bound_us(nbytes, ranks, link) + 2 * (ranks - 1) * link.latency_us
    assert math.isclose(ring_us(nbytes, ranks, link), expected, rel_tol=1e-9)


@given(power=st.integers(1, 12), link=LINK)
def test_the_latency_of_trees_grows_with_their_depth(power: int, link: Link) -> None:
    assert math.isclose(tree_us(0, 2**power, link), 2 * power * link.latency_us)


@given(nbytes=BYTES, more=BYTES, ranks=RANKS, link=LINK)
def test_more_bytes_take_longer(nbytes: float, more: float, ranks: int, link: Link) -> None:
    for model in MODELS:
        assert model(nbytes, ranks, link) <= model(nbytes + more, ranks, link) * ROUNDED


@given(nbytes=BYTES, ranks=RANKS, more=RANKS, link=LINK)
def test_more_ranks_take_longer(nbytes: float, ranks: int, more: int, link: Link) -> None:
    for model in MODELS:
        assert model(nbytes, ranks, link) <= model(nbytes, ranks + more, link) * ROUNDED


@given(nbytes=st.floats(1, 1e11), ranks=st.integers(2, 4096), packets=st.integers(1, 1 << 20), link=LINK)
def test_no_number_of_packets_is_better(nbytes: float, ranks: int, packets: int, link: Link) -> None:
    steps = math.ceil(math.log2(ranks)) - 1 + packets
    assert tree_us(nbytes, ranks, link) <= 2 * steps * link.us(nbytes / packets) * ROUNDED


@given(nbytes=BYTES, devices=st.integers(1, 16), machines=st.integers(1, 512), within=LINK, between=LINK)
def test_a_hierarchy_of_one_kind_is_flat(
    nbytes: float, devices: int, machines: int, within: Link, between: Link
) -> None:
    assert hierarchical_us(nbytes, 1, devices, within, between) == ring_us(nbytes, devices, within)
    flat = min(model(nbytes, machines, between) for model in MODELS)
    assert hierarchical_us(nbytes, machines, 1, within, between) == flat


@given(nbytes=BYTES, devices=st.integers(1, 16), machines=st.integers(1, 512), more=st.integers(1, 512))
def test_more_machines_take_longer(nbytes: float, devices: int, machines: int, more: int) -> None:
    few = hierarchical_us(nbytes, machines, devices, NVLINK_4, ETHERNET_10)
    assert few <= hierarchical_us(nbytes, machines + more, devices, NVLINK_4, ETHERNET_10) * ROUNDED


@pytest.mark.parametrize(("ranks", "faster"), [(2, ring_us), (512, tree_us)])
def test_trees_are_for_many_ranks(ranks: int, faster: object) -> None:
    """A bucket of 4 MiB, as steps of several ranks have."""
    assert min(MODELS, key=lambda model: model(4 << 20, ranks, PCIE_4)) is faster
