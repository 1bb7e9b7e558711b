"""A benchmark's table, and what it says about the machine and the versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pg_tensile
from pg_tensile.errors import TensileError
from pg_tensile.memory_limit import memory_bytes
from pg_tensile.planning.device.profile import GB, DeviceProfile
from pg_tensile.text import NONE, binary_size, milliseconds
from pg_tensile.tools.bench.options import VANILLA, BenchOptions
from pg_tensile.tools.bench.row import Row

ROOT = Path(__file__).resolve().parents[3]


class Report(NamedTuple):
    """A row for each policy, and the texts above and below the table."""

    rows: list[Row]
    title: str
    notes: list[str]


def rates(
    vanilla_peak: int, peak: int, vanilla_ms: float, ms: float
) -> tuple[float | None, float | None, float | None]:
    """Return (msr, eor, cbr), each None instead of a division by zero."""
    msr = (vanilla_peak - peak) / vanilla_peak if vanilla_peak else None
    eor = ms / vanilla_ms if vanilla_ms else None
    return msr, eor, None if msr is None or not eor else msr / eor


def message_of(error: BaseException) -> str:
    """Return an error's message as one line."""
    if isinstance(error, TensileError):
        return error.message
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def title_of(options: BenchOptions) -> str:
    name = options.model.rpartition(":")[2]
    policies = [choice for choice in options.policies if choice.name != VANILLA and not choice.is_peer]
    early = ", early updates" if policies and all(choice.early_update for choice in policies) else ""
    return f"{name}, batch {options.batch}, {options.optimizer}{early}, on {options.device}"


def budget_note(rows: Sequence[Row]) -> list[str]:
    """Return a line that names the budgets and the policies without one; empty if no policy has a budget."""
    budgets = dict.fromkeys((row.budget, row.budget_bytes) for row in rows if row.budget_bytes is not None)
    free = [row.title for row in rows if row.budget_bytes is None]
    named = [
        f"{text} are {binary_size(nbytes)}" if str(text).endswith("%") else binary_size(nbytes)
        for text, nbytes in budgets
    ]
    return [f"budget: {', '.join(named)}" + f"; not for {', '.join(free)}" * bool(free)] if budgets else []


def links(profile: DeviceProfile) -> str:
    """Format the bandwidth of a link."""
    out, inward = profile.out_bytes_per_s / GB, profile.in_bytes_per_s / GB
    return f"{out:.3g} GB/s each way" if out == inward else f"{out:.3g} GB/s out, {inward:.3g} GB/s in"


# ---- versions and machine -------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    return {
        "pg_tensile": pg_tensile.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision(),
    }


def revision() -> str | None:
    """Return the clone's commit, with + if code differs from it; None outside a clone.

    Results and pages do not count as code, because a benchmark writes them while it runs.
    """
    git = ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}"]
    commands = (
        ["rev-parse", "--short=12", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs"],
    )
    try:
        done = [subprocess.run([*git, *words], capture_output=True, text=True, timeout=10) for words in commands]
    except (OSError, subprocess.TimeoutExpired):
        return None
    if any(process.returncode for process in done):
        return None
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine that runs the benchmark."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    description: dict[str, Any] = {
        "name": platform.node(),
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
    }
    if device is not None and device.type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
        description["cuda"] = torch.version.cuda
    return description


# ---- the table ------------------------------------------------------------------------------------------------------

HEADINGS = (
    "policy",
    "step ms",
    "min … max",
    "EOR",
    "peak",
    "MSR",
    "CBR",
    "stall ms",
    "moved",
    "recomputes",
    "sim ms",
    "results",
)
# width of the terminal from which on these columns are shown
WIDTHS = {"min … max": 118, "CBR": 98, "recomputes": 98, "sim ms": 118}


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def verdict(row: Row) -> Text:
    if row.error is not None:
        return Text("failed", "red")
    if row.bit_identical is None:
        return Text("not run", "dim")
    return Text("identical", "green") if row.bit_identical else Text("DIFFER", "bold red")


def cells(row: Row) -> dict[str, str | Text]:
    moved = None if row.bytes_out is None or row.bytes_in is None else row.bytes_out + row.bytes_in
    span = NONE if row.step_ms_min is None else f"{milliseconds(row.step_ms_min)} … {milliseconds(row.step_ms_max)}"
    simulated = row.device.startswith("sim:")
    values = (
        *(row.title, milliseconds(row.simulated_ms if simulated else row.step_ms_median), span),
        *(ratio(row.eor), binary_size(row.peak_bytes), NONE if row.msr is None else f"{row.msr:.1%}", ratio(row.cbr)),
        *(milliseconds(row.stall_ms), binary_size(moved), NONE if row.recomputes is None else f"{row.recomputes:,}"),
        *(milliseconds(row.simulated_ms), verdict(row)),
    )
    return dict(zip(HEADINGS, values, strict=True))


def reference_cells(name: str, ms: float | None, peak: int | None, vanilla_ms: float | None) -> dict[str, str | Text]:
    """Return a line for a reference outside the run's policies.

    References are eager PyTorch, and vanilla if `none` was not requested.
    """
    eor = ms / vanilla_ms if ms and vanilla_ms else None
    return {"policy": Text(name, "italic"), "step ms": milliseconds(ms), "EOR": ratio(eor), "peak": binary_size(peak)}


def print_table(rows: Sequence[Row], title: str, notes: Sequence[str], console: Console) -> None:
    """Print the rows below eager PyTorch and vanilla, then every error and every note on a line of its own."""
    shown = [name for name in HEADINGS if console.width >= WIDTHS.get(name, 0)]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 0, 0, 1)
    for name in shown:
        is_text, wraps = name in ("policy", "results"), name == "policy"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not wraps, overflow="fold")
    lines = [cells(row) for row in rows]
    first = rows[0]
    if all(row.policy != VANILLA for row in rows):
        vanilla = reference_cells(
            "vanilla", first.vanilla_step_ms_median, first.vanilla_peak_bytes, first.vanilla_step_ms_median
        )
        lines.insert(0, vanilla)
    if first.eager_step_ms_median is not None:
        eager = reference_cells(
            "eager", first.eager_step_ms_median, first.eager_peak_bytes, first.vanilla_step_ms_median
        )
        lines.insert(0, eager)
    for line in lines:
        table.add_row(*(line.get(name, "") for name in shown))
    console.print(table)
    for row in rows:
        if row.error is not None:
            console.print(Text(f"{row.title}: {row.error}", "red"))
    for note in notes:
        console.print(Text(note, "dim"))


def table_console(width: int = 100) -> Console:
    """Return a console as wide as the terminal, or of `width` columns if the output goes elsewhere."""
    return Console() if sys.stdout.isatty() else Console(width=width)
