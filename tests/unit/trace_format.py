"""Checks of Chrome's "Trace Event Format": events that its readers drop or draw wrongly fail.

Readers count nanoseconds in whole numbers; on a thread, slices may contain each other and never cross; the two ends of
an arrow share id, category and name, and each lies in a slice of its thread.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

KEYS = {  # of each phase: what it has, besides what all have
    "M": {"args"},
    "X": {"cat", "dur", "args"},
    "i": {"cat", "s", "args"},
    "C": {"args"},
    "s": {"cat", "id"},
    "f": {"cat", "id", "bp"},
}
ALL = {"ph", "pid", "tid", "name", "ts"}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def read(text: str) -> dict[str, Any]:
    """Parse a document and check it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert document.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    named: set[tuple[int, int]] = set()
    for event in events:
        check_event(event)
        if event["name"] == "thread_name" and event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
    assert {(event["pid"], event["tid"]) for event in events} <= named
    slices = by_thread(events)
    for own in slices.values():
        check_nesting(own)
    check_arrows(events, slices)
    return document


def check_event(event: Event) -> None:
    phase = event["ph"]
    assert event.keys() == ALL | KEYS[phase], event
    assert all(type(event[key]) is int and 0 < event[key] < 1 << 31 for key in ("pid", "tid")), event
    assert isinstance(event["name"], str) and event["name"], event
    for key in ("ts", "dur"):
        if key in event:
            assert math.isfinite(event[key]) and event[key] >= 0, event
            assert (event[key] * 1000).is_integer() if isinstance(event[key], float) else True, event
    if phase == "M":
        assert event["args"].keys() == {METADATA[event["name"]]}, event
    if phase == "C":
        assert event["args"] and all(type(number) in (int, float) for number in event["args"].values()), event
    if phase == "i":
        assert event["s"] == "t", event
    if phase == "f":
        assert event["bp"] == "e", event


def nanoseconds(us: float) -> int:
    return int(us * 1000)


def by_thread(events: list[Event]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return beginning and end of each slice in ns, by process and thread, in the order of the file."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            threads[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    return threads


def check_nesting(slices: list[tuple[int, int]]) -> None:
    open_until: list[int] = []
    for begin, end in sorted(slices, key=lambda slice: (slice[0], -slice[1])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"the slice from {begin} to {end} ns crosses another one"
        open_until.append(end)


def check_arrows(events: list[Event], slices: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    begun: dict[int, Event] = {}
    ended = set()
    for event in events:
        if event["ph"] in ("s", "f"):
            time_ns = nanoseconds(event["ts"])
            own = slices[event["pid"], event["tid"]]
            assert any(begin <= time_ns <= end for begin, end in own), f"an arrow ends in no slice: {event}"
        if event["ph"] == "s":
            assert event["id"] not in begun
            begun[event["id"]] = event
        if event["ph"] == "f":
            start = begun[event["id"]]
            assert (start["cat"], start["name"]) == (event["cat"], event["name"])
            assert start["ts"] <= event["ts"] and event["id"] not in ended
            ended.add(event["id"])
    assert begun.keys() == ended


def of(document: dict[str, Any], phase: str, lane: str | None = None) -> list[Event]:
    """Return the events of a phase in a lane."""
    events = document["traceEvents"]
    threads = {
        event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"
    }
    return [event for event in events if event["ph"] == phase and (lane is None or event["tid"] == threads[lane])]
