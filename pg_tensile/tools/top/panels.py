"""The parts of the view around the tables: header, devices, the strip about the selected job, footer."""

from __future__ import annotations

import time

from rich.cells import cell_len
from rich.text import Text

from pg_tensile.text import count, loss, percent, printable, short, short_duration, short_size
from pg_tensile.tools.top import table
from pg_tensile.tools.top.cells import fit, join, parts_bar, wrap
from pg_tensile.tools.top.snapshot import Device, Job, Tuning
from pg_tensile.tools.top.state import ViewState

STRIP = 3  # lines of the strip, below its rule
NAME = 10  # cells for the name of a device
BAR = 60  # cells of a bar, at most
KEYS = {
    "jobs": ["q quit", "? help", "↑↓ select", "Enter details", "c cancel", "s order"],
    "details": ["q quit", "Esc back", "↑↓ scroll", "c cancel"],
    "help": ["q quit", "Esc back", "↑↓ scroll"],
}


def header(state: ViewState, width: int) -> list[Text]:
    """Return the header line, and the alarm and the line about drift below it, if any."""
    clock = time.strftime("%H:%M:%S", time.localtime(state.snapshot.at))
    right = f"{len(state.running)} running, {len(state.queue)} waiting  {clock}"
    title = fit(f"pg-tensile top  {state.where}", width - len(right) - 2)
    alarm = wrap(state.alarm, width, 2) if state.alarm else []
    lines = [Text.assemble((title, "bold"), "  ", right), *(Text(text, style="bold red") for text in alarm)]
    return [*lines, Text(drift(state, width), style="yellow")] if state.snapshot.drifted else lines


def drift(state: ViewState, width: int) -> str:
    """Return the line about models whose predicted rows have drifted from their training rows, the worst first."""
    found = [f"{item.model} {item.psi:.2f} of {item.column_name}" for item in state.snapshot.drifted]
    return join([f"drift: {printable(found[0])}", *map(printable, found[1:])], width)


def footer(state: ViewState, width: int) -> Text:
    if state.note:
        return Text(fit(state.note, width).rstrip(), style="bold yellow")
    return Text(join(KEYS[state.page], width), style="dim")


def rule(title: str, right: str, width: int) -> Text:
    """Return a horizontal rule, with a title at its left and `right` at its right end."""
    begin, end = f"── {printable(title)} ", f" {right} ──" if right else ""
    begin = fit(begin, min(cell_len(begin), width))
    return Text(begin + "─" * (width - cell_len(begin) - len(end)) + end, style="dim")


# ---- devices --------------------------------------------------------------------------------------------------------


def devices(state: ViewState, width: int, height: int | None) -> list[Text]:
    """Return two lines for each device, or one if the terminal is low; on at most a quarter of its height."""
    listed = state.snapshot.devices
    if not listed:
        return [Text("no device is in use yet", style="dim")]
    both = height is None or 2 * len(listed) <= height // 5
    most = len(listed) if height is None else max(1, height // 4)
    lines: list[Text] = []
    for device in listed[:most]:
        lines.append(_memory(device, width))
        if both:
            lines.append(_link(state, device, width))
    if len(listed) > most:
        lines[-1] = Text(f"and {len(listed) - most + 1} more devices", style="dim")
    return lines


def _memory(device: Device, width: int) -> Text:
    granted, budget = device.granted_bytes, device.budget_bytes
    text = f" {short_size(granted)} of {short_size(budget)} granted"
    room, drawn = width - NAME - 1 - len(text), ""
    if room >= 8:
        drawn = parts_bar([(granted, "█"), (device.inference_bytes, "▒")], budget or 0, min(room, BAR))
    over = budget is not None and granted + device.inference_bytes > budget
    return Text.assemble((fit(device.name, NAME), "bold"), " ", (drawn, "green"), (text, "red" if over else ""))


def _link(state: ViewState, device: Device, width: int) -> Text:
    moved = state.history.link_bytes_per_s(state.snapshot, device.name)
    out, back, link = device.out_bytes_per_s, device.in_bytes_per_s, None
    if out is not None and back is not None:
        mine = "" if state.snapshot.sees_all else " by your jobs"
        link = f"link {short_size(out)}/s out, {short_size(back)}/s in"
        if moved is not None:
            link = f"link {short_size(moved)}/s{mine}, {percent(moved / (out + back))} of {short_size(out + back)}/s"
    parts = [
        f"{device.jobs} job{'' if device.jobs == 1 else 's'}",
        f"{device.flowing_jobs} share {short_size(device.flowing_bytes)} that flow" if device.flowing_jobs else None,
        link,
        None if device.utilisation is None else f"others' load {percent(device.utilisation)}",
        f"predictor {short_size(device.inference_bytes)}" if device.inference_bytes else None,
        f"{short_size(device.in_use_bytes)} kept between steps" if device.in_use_bytes else None,
    ]
    return Text(" " * (NAME + 1) + join(parts, width - NAME - 1), style="dim")


# ---- tunings --------------------------------------------------------------------------------------------------------


def tunings(state: ViewState, width: int, height: int | None) -> list[Text]:
    """Return a line for each open tuning, on at most an eighth of the terminal's height."""
    listed = state.snapshot.tunings
    most = len(listed) if height is None else max(1, height // 8)
    lines = [Text(join(_course(state, tuning), width)) for tuning in listed[:most]]
    if len(listed) > most:
        lines[-1] = Text(f"and {len(listed) - most + 1} more tunings", style="dim")
    return lines


def _course(state: ViewState, tuning: Tuning) -> list[str | None]:
    best = None
    if tuning.best_trial is not None:
        best = f"best {tuning.metric} {loss(tuning.best_value)} of trial {tuning.best_trial}"
    return [
        f"tuning {tuning.tuning} {printable(tuning.model)}: {tuning.ended} of {tuning.trials} trials",
        "comparing" if tuning.state == "comparing" else f"{tuning.running} running",
        f"{tuning.pruned} pruned" if tuning.pruned else None,
        best,
        None if tuning.started_at is None else f"for {short_duration(state.snapshot.at - tuning.started_at)}",
    ]


# ---- the selected job -----------------------------------------------------------------------------------------------


def strip(state: ViewState, width: int) -> list[Text]:
    """Return a rule and STRIP lines about the selected job; nothing if no job is selected."""
    chosen = [job for job in state.jobs if job.job == state.selected]
    if not chosen:
        return []
    job = chosen[0]
    if job.waits:
        texts = wrap(f"{job.state}: {table.reason(state.snapshot, job) or 'no reason is known'}", width, STRIP)
    else:
        texts = [join(parts, width) for parts in (_pace(state, job), _bytes(job), _costs(state, job))]
    texts += [""] * (STRIP - len(texts))
    return [rule(f"job {job.job} {job.model}", "", width), *(Text(fit(text, width).rstrip()) for text in texts)]


def _pace(state: ViewState, job: Job) -> list[str | None]:
    return [
        job.phase or job.state,
        None if job.epoch is None else f"epoch {count(job.epoch)} of {count(job.epochs)}",
        None if not job.steps else f"step {count(job.step)} of {count(job.steps)}",
        None if job.loss is None else f"loss {loss(job.loss)}",
        None if job.samples_per_s is None else f"{short(job.samples_per_s)} samples/s",
        _time_left(job),
        None if job.started_at is None else f"for {short_duration(state.snapshot.at - job.started_at)}",
    ]


def _time_left(job: Job) -> str | None:
    if job.time_left_s is None:
        return None
    least = f"{short_duration(job.least_time_left_s)} to " if job.may_stop_early else ""
    return f"{least}{short_duration(job.time_left_s)} left"


def _bytes(job: Job) -> list[str | None]:
    named = [
        ("planned", job.planned_bytes),
        ("granted", job.granted_bytes),
        ("peak", job.device_peak_bytes),
        ("kept", job.device_bytes),
        ("unplanned", job.vanilla_bytes),
    ]
    return [f"{name} {short_size(nbytes)}" for name, nbytes in named if nbytes is not None] or ["memory not known yet"]


def _promise(job: Job) -> str:
    """Return what the plan costs, and the most that it may."""
    if job.slowdown is None:
        return ""
    most = "" if job.max_slowdown is None else f" (at most {job.max_slowdown:g}x)"
    return f" costs {table.slowdown(job.slowdown)}{most}"


def _costs(state: ViewState, job: Job) -> list[str | None]:
    course = state.history.of(job)
    moved, stalled = course.swap_bytes_per_s, course.stall_share
    swap = "" if moved is None else f" ({short_size(moved)}/s)"
    stall = "" if stalled is None else f" ({percent(stalled)})"
    return [
        None if job.bytes_swapped is None else f"swapped {short_size(job.bytes_swapped)}{swap}",
        None if job.stall_s is None else f"stall {short_duration(job.stall_s)}{stall}",
        None if job.plan_generation is None else f"plan {job.plan_generation}{_promise(job)}",
        None if job.measured_slowdown is None else f"measured {table.slowdown(job.measured_slowdown)}",
        None if job.passive_swap_ins is None else f"passive {count(job.passive_swap_ins)}",
        job.policy,
        job.device and f"on {job.device}",
        f"of {job.owner}",
    ]
