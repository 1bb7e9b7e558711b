"""`pg-tensile bench`: what it measures, what it writes, how it ends, and how it answers what cannot be."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import OptionError
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.planning import policies
from pg_tensile.planning.device import profile as profiles
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.tools.bench import compression, measured, options, planned
from pg_tensile.tools.bench.contender import NO_ROUND
from pg_tensile.tools.bench.contenders import same_bits
from pg_tensile.tools.bench.report import rates
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.cli.main import main
from tests.unit.executing import captured_net

COMMAND = Path(sys.prefix) / "bin" / "pg-tensile"
KEYS = """
    model policy device batch operators tensors vanilla_peak_bytes peak_bytes predicted_peak_bytes device_peak_bytes
    label keywords budget latencies early_update round_ms vanilla_first_step_ms
    workspace_peak_bytes floor_bytes budget_bytes host_arena_bytes msr eor cbr step_ms_median step_ms_min step_ms_max
    first_step_ms vanilla_step_ms_median eager_step_ms_median eager_peak_bytes stall_ms link_gbps bytes_out bytes_in
    passive_swap_ins recomputes planning_ms planned_ms latency_error capture_ms bit_identical seed threads versions
    step_ms scatter scatter_causes conditions out_gbps in_gbps overlap simulated_stall_ms simulated_transfer_ms
    simulated_overlap reserved_peak_bytes allocated_peak_bytes allocator_retries context_bytes rounds_taken light error
"""
MODELS = '''
"""Models of a user, in a file of theirs."""

import torch
from torch import nn

CALLS = []


class Net(nn.Module):
    def __init__(self, width=192, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(torch.relu_(self.norm(layer(x))))
        return self.head(x)


class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return super().forward(x)


class Changing(Net):
    """After some calls it computes something else, which no graph can know."""

    def forward(self, x):
        CALLS.append(1)
        return super().forward(x) * (1.0 if len(CALLS) < 6 else 2.0)


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(12, 3)

    def forward(self, ids, x, keep):
        joined = torch.cat([self.embedding(ids).mean(1), x.float()], 1)
        return {"classes": self.head(joined * keep[:, None]), "ids": ids}


class WithLoss(Net):
    def forward(self, x, target):
        return {"loss": nn.functional.cross_entropy(super().forward(x), target), "seen": x}


def number():
    return 3


def fails(**kwargs):
    raise ValueError("no such thing")
'''
NET = ("--model", "nets.py:Net", "--input", "float32:192", "--classes", "10", "--batch", "8")
SHORT = ("--rounds", "1", "--warmup", "0", "--iterations", "1", "--threads", "1")
ALL = ("--policies", "none,swap_all,recompute_all")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a file of models. What a run changes in the process is put back."""
    (tmp_path / "nets.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("nets", None)


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The installed command, in a folder that is not the clone."""
    return subprocess.run([COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=100)


def bench(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and rows, run in this process."""
    status = main(["bench", *SHORT, *arguments, "--json", str(folder / "rows.json")])
    return status, rows_of(folder)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "rows.json").read_text().splitlines()]


def complaints(printed: str) -> list[str]:
    """Lines that are not progress."""
    return [line for line in printed.splitlines() if not line.startswith(("measuring ", "capturing "))]


# ---- what it measures -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_measures_a_users_model_and_writes_a_row_for_each_policy(folder):
    rounds = ("--rounds", "2", "--iterations", "2", "--threads", "1", "--seed", "7")
    done = command("bench", *NET, *ALL, *rounds, "--json", "rows.json", folder=folder)
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder)
    assert [row["policy"] for row in rows] == ["none", "swap_all", "recompute_all"]
    none, swap_all, recompute_all = rows
    for row in rows:
        assert set(KEYS.split()) <= row.keys()
        assert row["error"] is None and row["bit_identical"] is True
        assert (row["model"], row["device"], row["batch"], row["seed"], row["threads"]) == (NET[1], "host", 8, 7, 1)
        assert row["peak_bytes"] == row["predicted_peak_bytes"]
        assert abs(row["device_peak_bytes"] / row["allocator_peak_bytes"] - 1) < 0.03
        assert row["floor_bytes"] <= row["device_peak_bytes"]
        assert row["msr"] == pytest.approx(1 - row["peak_bytes"] / none["peak_bytes"], abs=1e-5)
        assert row["eor"] == pytest.approx(row["step_ms_median"] / row["vanilla_step_ms_median"], abs=1e-4)
        assert row["cbr"] == pytest.approx(row["msr"] / row["eor"], abs=1e-5)
        assert 0 < row["step_ms_min"] <= row["step_ms_median"] <= row["step_ms_max"]
        assert row["passive_swap_ins"] == 0 and row["capture_ms"] > 0 and row["eager_peak_bytes"] > 0
        assert len(row["round_ms"]) == 2 and row["step_ms_median"] == pytest.approx(sum(row["round_ms"]) / 2, abs=1e-5)
        assert row["vanilla_first_step_ms"] == none["first_step_ms"] > 0
        assert [statistics.median(steps) for steps in row["step_ms"]] == pytest.approx(row["round_ms"], abs=1e-5)
        assert [len(steps) for steps in row["step_ms"]] == [2, 2] and len(row["conditions"]) == row["rounds_taken"] == 2
        assert bool(row["scatter_causes"]) == (row["scatter"] > 0.05)
        assert row["reserved_peak_bytes"] is row["context_bytes"] is row["light"] is None
        assert set(row["versions"]) == {"pg_tensile", "torch", "python", "revision"}
    assert none["eor"] == 1 and none["bytes_out"] == none["recomputes"] == 0
    assert swap_all["bytes_out"] > 0 and swap_all["bytes_in"] > 0 and swap_all["msr"] > 0.3
    assert swap_all["host_arena_bytes"] > 0 and swap_all["stall_ms"] > 0
    assert 0 < swap_all["out_gbps"] <= swap_all["link_gbps"] and 0 <= swap_all["overlap"] <= 1
    assert swap_all["simulated_stall_ms"] > 0 and swap_all["simulated_overlap"] < 1
    assert recompute_all["recomputes"] > 0 and recompute_all["bytes_out"] == 0


def test_the_table_fits_and_says_which_link_it_used(folder, capsys):
    status, _ = bench(folder, *NET, "--policies", "swap_all")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert status == 0 and max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[3:6]] == ["eager", "vanilla", "swap_all"]
    assert lines[5].endswith("identical")
    (link,) = [line for line in lines if line.startswith("link:")]
    assert "RTX A6000" in link and "GB/s" in link
    assert "round 1 of 1" in printed.err


def test_the_link_asked_for_is_used(folder, capsys):
    status, (row,) = bench(folder, *NET, "--policies", "swap_all", "--link", "0.1")
    assert status == 0 and row["link_gbps"] == pytest.approx(0.1)
    seconds = max(row["bytes_out"], row["bytes_in"]) / 0.1e9
    assert row["step_ms_median"] >= 900 * seconds


@pytest.mark.long
def test_a_language_model_with_tied_embeddings_and_dropout(folder):
    kwargs = '{"layers": 1, "width": 64, "vocabulary": 100, "positions": 16}'
    model = ("--model", "benchmarks.experiments.models:gpt2", "--kwargs", kwargs)
    data = ("--input", "int64<100:16", "--loss", "lm")
    status, rows = bench(folder, *model, *data, "--batch", "2", *ALL, "--early-update")
    assert status == 0 and [row["bit_identical"] for row in rows] == [True] * 3


def test_inputs_of_several_types_and_every_option_of_a_step(folder):
    inputs = ("--input", "int32<50:7", "--input", "bfloat16:4", "--input", "bool", "--output-key", "classes")
    step = ("--classes", "3", "--optimizer", "momentum", "--lr", "0.1", "--clip", "0.5", "--autocast")
    parts = ("--batch", "6", "--accumulation", "2")
    status, rows = bench(folder, "--model", "nets:Many", *inputs, *step, *parts, *ALL)
    assert status == 0 and [row["bit_identical"] for row in rows] == [True] * 3


@pytest.mark.parametrize("loss", ["mse", "bce", "model"])
def test_losses_without_classes(folder, loss):
    model = ("nets:WithLoss", "--input", "int64<10") if loss == "model" else ("nets:Net",)
    status, (row,) = bench(folder, "--model", model[0], "--input", "float32:192", *model[1:], "--loss", loss)
    assert status == 0 and row["bit_identical"] is True


def test_early_updates_leave_vanilla_as_it_is(folder):
    _, (none, swap_all) = bench(
        folder, *NET, "--policies", "none,swap_all", "--early-update", "--device", "sim:RTX_A6000"
    )
    _, (plain,) = bench(folder, *NET, "--device", "sim:RTX_A6000")
    assert none["peak_bytes"] == plain["peak_bytes"] == swap_all["vanilla_peak_bytes"]


@pytest.mark.long
def test_compressed_swaps_move_less_and_change_no_bit(folder, monkeypatch):
    """The same plan without, with a codec for all, and with what is advised; codecs are measured once, on one size.

    Takes seconds: codecs are measured.
    """
    calibrate = cache(partial(compression.calibrate, sizes=(1 << 18,), word_bytes=(4,)))
    monkeypatch.setattr(compression, "calibrate", calibrate)
    monkeypatch.setattr(measured, "CODEC_SECONDS", 0.1)
    rows = {}
    for asked in ("none", "zvc", "auto"):
        arguments = ("--model", "nets.py:Net", "--input", "float32:192", "--classes", "10", "--batch", "256")
        quick = ("--rounds", "1", "--iterations", "1", "--warmup", "0", "--light", "a test", "--link", "0.02")
        status, (row,) = bench(folder, *arguments, "--policies", "swap_all", "--compression", asked, *quick)
        assert status == 0 and row["bit_identical"] is True and row["compression"] == asked
        rows[asked] = row
    none, zvc, auto = rows.values()
    assert none["bytes_out"] == none["raw_bytes_out"] == zvc["raw_bytes_out"] and none["codecs"] == {}
    assert zvc["codecs"].keys() == {"zvc"} and zvc["bytes_out"] < none["bytes_out"]
    assert auto["codecs"] and auto["bytes_in"] < none["bytes_in"]
    assert zvc["transfer_ms"] < none["transfer_ms"] and zvc["simulated_ms"] < none["simulated_ms"]
    assert zvc["planned_ms"] < none["planned_ms"]


# ---- what is only simulated -----------------------------------------------------------------------------------------


def test_a_simulation_executes_nothing_and_may_be_larger_than_the_machine(folder):
    model = ("--model", "nets:Net", "--kwargs", '{"width": 300000}', "--input", "float32:300000")
    status, (none, recompute) = bench(folder, *model, "--device", "sim:RTX_A6000", "--policies", "none,recompute_all")
    assert status == 0
    assert none["peak_bytes"] == none["predicted_peak_bytes"] > 3 * 4 * 300_000**2
    assert (none["device"], none["link_gbps"], none["bit_identical"]) == ("sim:RTX_A6000", 25, None)
    assert none["eager_step_ms_median"] is None and none["step_ms_median"] == none["simulated_ms"] > 0
    assert none["planned_ms"] == none["simulated_ms"] and none["least_eor"] == pytest.approx(1)
    assert recompute["eor"] > 1


def test_a_budget_in_percent_is_of_the_vanilla_peak(folder):
    status, (none, swap_all) = bench(
        folder, *NET, "--device", "sim:GH200", "--policies", "none,swap_all", "--budget", "70%", "--link", "5"
    )
    assert status == 0 and none["budget_bytes"] is None  # what the others are compared with
    assert swap_all["budget_bytes"] == int(0.7 * none["peak_bytes"]) and swap_all["link_gbps"] == 5


def test_every_policy_is_measured_with_every_budget(folder, capsys):
    sgd = ("--optimizer", "sgd", "--batch", "64", "--device", "sim:RTX_A6000")
    status, rows = bench(folder, *NET, *sgd, "--policies", "none,joint", "--budget", "90%,1GiB,none")
    assert status == 0 and [row["budget"] for row in rows] == [None, "90%", str(1 << 30), None]
    none, tight, wide, free = rows
    assert [row["policy"] for row in rows[1:]] == ["joint"] * 3 and wide["budget_bytes"] == 1 << 30
    assert tight["device_peak_bytes"] <= tight["budget_bytes"] == int(0.9 * none["peak_bytes"])
    assert tight["msr"] >= 0.1 and free["budget_bytes"] is None
    printed = capsys.readouterr().out
    assert "joint at 90%" in printed and "not for none, joint" in printed


def test_settings_of_one_policy(folder, monkeypatch):
    asked = []

    def lanes(traces, profile, budget, lanes=2, name="x"):
        asked.append((budget, lanes, name, tuple(traces[0].latency_us)))
        return {0: Plan.build([])}

    monkeypatch.setitem(policies.POLICIES, "lanes", lanes)
    each = "none,lanes:lanes=1:early_update=true,lanes:name=y:budget=200%:latencies=roofline"
    status, (none, first, second) = bench(folder, *NET, "--policies", each, "--light", "a test")
    assert status == 0 and [row["bit_identical"] for row in (none, first, second)] == [True] * 3
    (budget, one, _, measured), (share, _, name, estimated) = asked
    assert (budget, one, share, name) == (None, 1, 2 * none["peak_bytes"], "y")
    asked_us = measured, estimated
    assert len(measured) == len(estimated) and measured != estimated
    assert first["label"] == "lanes:lanes=1:early_update=true" and first["keywords"] == {"lanes": 1}
    assert [row["early_update"] for row in (none, first, second)] == [False, True, False]
    assert (first["peak_bytes"], second["peak_bytes"]) == (first["predicted_peak_bytes"], none["peak_bytes"])
    assert [row["latencies"] for row in (first, second)] == ["measured", "roofline"]
    assert [row["planned_ms"] for row in (first, second)] == [pytest.approx(sum(us) / 1e3, abs=1e-5) for us in asked_us]


def test_the_least_eor_is_that_of_the_policys_own_graph():
    """Its operators may take another time than vanilla's."""
    captured, profile = captured_net(), profiles.RTX_A6000
    latency_us = roofline.estimate(captured.trace, profile)
    slow, fast = (replace(captured, trace=captured.trace.with_latencies(latency_us * factor)) for factor in (2, 1))
    policy = planned.PlannedPolicy(options.PolicyChoice("none", "none"), slow, None)
    workload: Any = SimpleNamespace(vanilla=fast, options=SimpleNamespace(timeline=False))
    row = Row("net", "none", "cpu", 4, device_peak_bytes=footprint(slow.trace).device_peak_bytes)
    assert planned.distance(row, workload, policy, profile).least_eor == pytest.approx(1)


def test_a_light_run_takes_fewer_steps_and_leaves_out_slow_policies(folder, monkeypatch):
    monkeypatch.setattr(measured, "CLOSE", 1.0)
    rounds = ("--rounds", "2", "--warmup", "0", "--iterations", "1", "--threads", "1", "--light", "a test")
    assert main(["bench", *NET, "--policies", "none,swap_all", *rounds, "--json", str(folder / "rows.json")]) == 0
    none, swapped = rows_of(folder)
    assert len(none["round_ms"]) == none["rounds_taken"] == 2 and len(swapped["round_ms"]) == 1
    assert none["light"] == "a test" and swapped["rounds_taken"] == 1
    for row in (none, swapped):
        assert row["device_peak_bytes"] >= row["peak_bytes"] and row["simulated_ms"] > 0
        assert row["allocator_peak_bytes"] is None


def test_the_rounds_that_a_limit_leaves_time_for():
    """The first round takes 4 s, the others 6 s each; the longest before is what the next is taken to last."""

    def taken(limit_s: float | None) -> list[int]:
        now = [100.0]
        numbers = []
        for number in measured.rounds_within(5, limit_s, lambda: now[0]):
            numbers.append(number)
            now[0] += 6.0 if number else 4.0
        return numbers

    assert taken(None) == [0, 1, 2, 3, 4]
    assert taken(0.5) == taken(7.9) == [0] and taken(8.0) == [0, 1]
    assert taken(15.9) == [0, 1] and taken(16.0) == [0, 1, 2]


def test_a_run_that_is_stopped_leaves_the_rows_of_its_rounds(folder, monkeypatch):
    """A signal ends it anywhere; here Ctrl-C does, in the second round."""
    seen = []
    take = measured.MeasuredBench.round

    def round(bench: measured.MeasuredBench, contender: Any) -> None:
        if contender.name == "eager":
            seen.append(rows_of(folder))
        if contender.turns and contender.name == "swap_all":
            raise KeyboardInterrupt
        take(bench, contender)

    monkeypatch.setattr(measured.MeasuredBench, "round", round)
    status, rows = bench(folder, *NET, "--policies", "none,swap_all", "--rounds", "3")
    before, *_ = seen
    assert status == 130
    assert [row["error"] for row in before] == [NO_ROUND] * 2 and before[1]["simulated_ms"] > 0
    for row in rows:
        assert row["error"] is None and row["bit_identical"] is True
        assert (row["rounds"], row["rounds_taken"]) == (3, 1) and len(row["step_ms"]) == 1


def test_seconds_end_the_rounds(folder, capsys):
    status, (row,) = bench(folder, *NET, "--rounds", "3", "--seconds", "1e-9")
    assert status == 0 and (row["rounds"], row["rounds_taken"]) == (3, 1)
    assert "enough for 1 of 3 rounds" in capsys.readouterr().out


def test_operators_are_timed_while_no_copy_of_the_state_exists(folder, monkeypatch):
    """Such a copy would take the memory that the timed steps have used, and the step that is observed would fault."""
    copies: list[weakref.ref[torch.Tensor]] = []
    observed = []

    def state(executor: Executor) -> Any:
        copied = state_dict(executor)
        copies.extend(map(weakref.ref, copied.model.values()))
        return copied

    def measure(executor: Executor, *arguments: Any, **keywords: Any) -> None:
        observed.append(any(copy() is not None for copy in copies))
        request(executor, *arguments, **keywords)

    state_dict, request = Executor.state_dict, Executor.measure
    monkeypatch.setattr(Executor, "state_dict", state)
    monkeypatch.setattr(Executor, "measure", measure)
    status, rows = bench(folder, *NET, "--policies", "none,swap_all")
    assert status == 0 and all(row["bit_identical"] for row in rows)
    assert copies and observed == [False] * 5  # three steps before the rounds, one of each policy in the round


# ---- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["host", "sim:RTX_A6000"])
def test_a_budget_that_is_too_small_is_an_error_in_the_row(folder, device):
    status, (row,) = bench(folder, *NET, "--budget", "50%", "--device", device)
    assert status == 1
    assert f"{row['budget_bytes']:,}" in row["error"]
    assert row["bit_identical"] is None and row["predicted_peak_bytes"] == row["vanilla_peak_bytes"]


def test_policies_that_fail_leave_the_others_alone(folder, monkeypatch, capsys):
    def raises(traces, profile, budget):
        raise ZeroDivisionError("a policy of somebody")

    def loses_data(traces, profile, budget):
        return {job: Plan.build([Event(EventKind.RELEASE, 0, 1, 1)]) for job in traces}

    monkeypatch.setitem(policies.POLICIES, "raises", raises)
    monkeypatch.setitem(policies.POLICIES, "loses_data", loses_data)
    status, (none, first, second) = bench(folder, *NET, "--policies", "none,raises,loses_data")
    assert status == 1
    assert none["error"] is None and none["bit_identical"] is True
    assert first["error"] == "ZeroDivisionError: a policy of somebody" and "tensor" in second["error"]
    printed = capsys.readouterr().out
    assert printed.count("failed") == 2 and "raises: ZeroDivisionError" in printed


def test_results_that_differ_from_eager_pytorchs_are_seen(folder, capsys):
    status, (row,) = bench(folder, "--model", "nets.py:Changing", *NET[2:], "--iterations", "3")
    assert status == 1 and row["bit_identical"] is False and row["error"] is None
    printed = capsys.readouterr().out
    assert "DIFFER" in printed and "differs from eager PyTorch in: loss of step" in printed


def test_a_model_that_cannot_be_captured_is_refused_with_its_line(folder):
    done = command("bench", "--model", "nets.py:Branch", *NET[2:], "--json", "rows.json", folder=folder)
    line = next(n for n, text in enumerate(MODELS.splitlines(), 1) if "if x.sum() > 0" in text)
    message, *rest = complaints(done.stderr)
    assert done.returncode == 1 and done.stdout == ""
    assert message.startswith("pg-tensile: ") and f"nets.py:{line}" in message
    assert rest[-1].startswith("hint: ") and "Traceback" not in done.stderr
    (row,) = rows_of(folder)
    assert row["policy"] == "none" and f"nets.py:{line}" in row["error"]


WRONG = {
    (): "--model",
    ("--model", "nets.py:Net"): "--input",
    (*NET, "--batch", "-1"): "--batch",
    (*NET, "--batch", "0", "--accumulation", "2"): "--accumulation",
    (*NET, "--batch", "0", "--policies", "joint", "--budget", "70%"): "share of the vanilla peak",
    (*NET, "--batch", "2.5"): "--batch",
    (*NET, "--policies", "none,foo"): '"foo" is not a policy',
    (*NET, "--policies", ","): "no policy",
    (*NET, "--policies", "joint:lanes=1"): '"lanes=1" is not a setting of the policy joint',
    (*NET, "--policies", "joint:early_update=1"): "early_update=true|false",
    (*NET, "--policies", "none:budget=50%"): "Vanilla has none",
    (*NET, "--policies", "joint:budget=half"): "not a budget",
    (*NET, "--budget", "50%,"): "not a budget",
    (*NET, "--device", "tpu"): "not a device",
    (*NET, "--device", "sim:TPU"): "no device profile",
    (*NET, "--budget", "much"): "not a budget",
    (*NET, "--budget", "0%"): "out of range",
    (*NET, "--link", "nan"): "--link",
    (*NET, "--compression", "gzip"): 'no compression "gzip"',
    (*NET, "--compression", "auto", "--device", "sim:RTX_A6000"): "values to compress",
    (*NET, "--lr", "-1"): "--lr",
    (*NET, "--light"): "--light",
    (*NET, "--light", " "): "--light: the reason is missing",
    (*NET, "--seconds", "0"): "--seconds",
    (*NET, "--kwargs", "[1]"): "not an object",
    (*NET, "--kwargs", "{"): "not JSON",
    (*NET, "--loss", "mse"): "--classes",
    (*NET, "--loss", "lm"): "--classes",
    (*NET, "--accumulation", "3"): "--accumulation",
    (*NET, "--json", "no/such/folder"): "--json",
    (*NET, "--output-key", "loss"): "a single tensor",
    (*NET, "--whatever"): "--whatever",
    (*NET[:2], "--input", "float33:3"): "float33",
    (*NET[:2], "--input", "int64:3"): "bound",
    (*NET[:2], "--input", "float32:192", "--loss", "cross_entropy"): "--classes",
    (*NET[:2], "--input", "float32:192", "--loss", "lm"): "token ids",
    (*NET[:2], "--input", "float32:1000000000000000x1000", "--batch", "2000"): "too large",
    ("--model", "nets.py:Nets", *NET[2:]): "nets.py:Nets",
    ("--model", "nets", *NET[2:]): "names no callable",
    ("--model", "no.such.module:f", *NET[2:]): "no.such.module",
    ("--model", "nets.py:number", *NET[2:]): "int instead of a module",
    ("--model", "nets.py:CALLS", *NET[2:]): "list",
    ("--model", "nets.py:fails", *NET[2:]): "no such thing",
    ("--model", "nets.py:Many", "--input", "int32<50:7", "--input", "float32:4", "--input", "bool"): "2 tensors",
}


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments[-2:]))
def test_wrong_options_are_answered_in_one_line(folder, capsys, arguments):
    assert main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    message, *rest = complaints(printed.err)
    assert message.startswith("pg-tensile: ") and WRONG[arguments] in "\n".join((message, *rest))
    assert all(line.startswith(("detail: ", "hint: ")) for line in rest) and printed.out == ""


def test_a_step_larger_than_the_machine_is_refused_before_it_is_executed(folder, capsys):
    assert main(["bench", *NET[:-1], "1000000000"]) == 1
    assert "more memory than this machine has" in capsys.readouterr().err


def test_a_cuda_device_that_is_not_there(folder, capsys):
    assert main(["bench", *NET, "--device", f"cuda:{torch.cuda.device_count()}"]) == 2
    assert "--device" in capsys.readouterr().err


# ---- its parts ------------------------------------------------------------------------------------------------------


@given(st.text() | st.from_regex(r"\A[a-z]{3,8}[0-9]{0,2}(<[0-9]*)?(:[0-9x]*)?\Z"))
def test_any_text_is_an_input_or_an_option_error(text):
    try:
        spec = options.parse_input(text)
    except OptionError as error:
        assert error.hint
    else:
        assert 0 <= spec.nbytes(1) <= options.LARGEST and (spec.below is None or spec.below > 0)


@given(st.text() | st.from_regex(r"\A(joint|none)(:[a-z_]+=[0-9a-z%.]*)*(,joint)?\Z"))
def test_any_text_names_policies_or_is_an_option_error(text):
    try:
        found = options.parse_policies(text, policies.POLICIES, (None,), True)
    except OptionError as error:
        assert error.hint
    else:
        assert found and all(choice.early_update == (choice.name != "none") or ":" in choice.label for choice in found)


@given(st.text() | st.from_regex(r"\A[0-9.]*[%a-zA-Z]{0,3}\Z"))
def test_any_text_is_a_budget_or_an_option_error(text):
    try:
        budget = options.parse_budget(text)
    except OptionError as error:
        assert error.hint
    else:
        assert budget.nbytes(1000) >= 0


@pytest.mark.parametrize(
    "text, vanilla, expected",
    [("50%", 1001, 500), ("4GiB", 0, 4 << 30), ("1.5kb", 0, 1500), ("12", 0, 12), ("120 %", 100, 120)],
)
def test_budgets(text, vanilla, expected):
    assert options.parse_budget(text).nbytes(vanilla) == expected


def test_rates_of_nothing_are_unknown():
    assert rates(0, 0, 0.0, 0.0) == (None, None, None)
    assert rates(100, 40, 2.0, 3.0) == (pytest.approx(0.6), 1.5, pytest.approx(0.4))


def test_a_row_is_json_whatever_is_in_it():
    odd = {"x": math.nan, "of": [1.0, math.inf]}
    row = Row("m", "none", "host", 1, msr=math.nan, eor=math.inf, error='a "quoted"\nerror', keywords=odd)
    found = json.loads(row.to_json())
    assert found["keywords"] == {"x": None, "of": [1.0, None]}
    assert found["msr"] is None and found["eor"] is None and found["error"] == 'a "quoted"\nerror'
    assert "\n" not in row.to_json() and set(KEYS.split()) <= {field.name for field in fields(Row)}


def test_bits_are_equal_where_a_nan_equals_a_nan():
    one = torch.tensor([0.0, math.nan, 1.0])
    assert same_bits(one, one.clone()) and not same_bits(one, torch.tensor([-0.0, math.nan, 1.0]))
    assert not same_bits(one, None) and not same_bits(one, one.double()) and not same_bits(one, one[:2])
    assert same_bits(torch.tensor(2), torch.tensor(2)) and same_bits(torch.empty(0), torch.empty(0))
