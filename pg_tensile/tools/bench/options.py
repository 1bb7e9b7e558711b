"""Options of `pg-tensile bench`: sizes, input specifications, budgets, policies. Needs no torch.

Every parse function raises OptionError, whose message names the mistake and whose hint shows a correct value.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pg_tensile.errors import MeasurementError, OptionError
from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.latency import model_bytes
from pg_tensile.planning.latency.mlp import LatencyModels
from pg_tensile.planning.plan.plan import CODECS
from pg_tensile.tools.numbers import parse_number

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
LOSSES = ("cross_entropy", "mse", "bce", "lm", "model")
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}  # others: 1
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LARGEST = 2**62
VANILLA = "none"
PEER = "peer:"  # prefix of the names of PyTorch's own means of saving memory (peers.py)
PEERS = (CHECKPOINT, SAVE_ON_CPU, MEMORY_BUDGET, UNIFIED_MEMORY) = (
    "peer:checkpoint",
    "peer:save_on_cpu",
    "peer:memory_budget",
    "peer:unified_memory",
)
COMPRESSIONS = ("none", "auto", *CODECS[1:])
LATENCIES = (MEASURED, ROOFLINE, MODELS) = ("measured", "roofline", "models")  # sources of the latencies for plans
# Of every policy but vanilla
SETTINGS = ("early_update=true|false", f"latencies={'|'.join(LATENCIES)}", "device_graphs=true|false", "budget=B")


@dataclass(frozen=True)
class InputSpec:
    """One input of the model.

    `shape` is that of one sample; the batch dimension precedes it. Integers are drawn from 0 to `below` − 1.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    below: int | None = None

    def nbytes(self, batch: int) -> int:
        return math.prod((batch, *self.shape)) * BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Budget:
    """Bytes of device memory, or a percentage of the vanilla peak.

    A policy keeps the storages *and* the workspaces within it, so a share of 70 % saves at least 30 % of the peak (MSR
    0.3).
    """

    amount: float
    percent: bool

    def nbytes(self, vanilla_peak_bytes: int) -> int:
        return int(vanilla_peak_bytes * self.amount / 100) if self.percent else int(self.amount)

    def __str__(self) -> str:
        return f"{self.amount:.12g}%" if self.percent else str(int(self.amount))


@dataclass(frozen=True)
class PolicyChoice:
    """A policy to be measured.

    `label`: the policy as requested, without the budget; `keywords`: the policy's own keyword arguments; `latencies`:
    the source of the latencies that it plans with, one of LATENCIES ("" for a peer).
    """

    name: str
    label: str
    keywords: tuple[tuple[str, Any], ...] = ()
    budget: Budget | None = None
    early_update: bool = False
    device_graphs: bool = False  # iterations are replayed where they can be (runtime/replay.py)
    latencies: str = MEASURED

    @property
    def is_peer(self) -> bool:
        """True if the policy is one of PEERS, which have no plan."""
        return self.name in PEERS

    def __str__(self) -> str:
        return f"{self.label} at {self.budget}" if self.budget else self.label


@dataclass(frozen=True)
class DeviceChoice:
    """Device of a benchmark.

    `kind` is host, sim or a type of accelerators; `index` is that of the accelerator; `profile` is the one to simulate.
    """

    kind: str
    index: int = 0
    profile: str = ""

    def __str__(self) -> str:
        return {"host": "host", "sim": f"sim:{self.profile}"}.get(self.kind, f"{self.kind}:{self.index}")


@dataclass(frozen=True)
class BenchOptions:
    """Options of one benchmark run.

    Bandwidth in GB/s (10⁹ bytes); None means that the run decides.
    """

    model: str
    inputs: tuple[InputSpec, ...]
    kwargs: dict[str, Any]
    batch: int
    classes: int | None
    loss: str
    output_key: str | None
    optimizer: str
    learning_rate: float
    clip: float | None
    autocast: str | None
    accumulation: int
    policies: tuple[PolicyChoice, ...]
    device: DeviceChoice
    link_gbps: float | None
    iterations: int
    rounds: int
    warmup: int
    seed: int
    threads: int
    light: str | None = None  # why fewer steps are taken
    seconds: float | None = None  # for the rounds
    timeline: bool = False
    json_path: str | None = None
    latency_models: LatencyModels | None = None
    compression: str = "none"  # of swaps, one of COMPRESSIONS
    latency_error: float | None = None  # of the roofline on a simulated device; None means that it is exact

    @property
    def early_update(self) -> bool:
        """True if any policy uses the graph with early updates."""
        return any(choice.early_update for choice in self.policies)


def parse_input(text: str) -> InputSpec:
    """Parse an input of the model.

    Examples: `float32:3x224x224`, `int64<30522:128` (integers below 30522, 128 of them), `bool:10`, `float32` (one
    number).
    """
    match = re.fullmatch(r"([a-z0-9]+)(?:<(\d{1,18}))?(?::([0-9]{1,18}(?:x[0-9]{1,18})*))?", text.strip())
    if not match:
        raise OptionError(f'"{text}" is not an input', "Write TYPE:SHAPE, as float32:3x224x224 or int64<30522:128.")
    dtype, below, dims = match.groups()
    if dtype not in (*FLOATS, *INTEGERS, "bool"):
        types = ", ".join((*FLOATS, *INTEGERS, "bool"))
        raise OptionError(f'"{dtype}" in the input "{text}" is not a type', f"Types: {types}.")
    if (dtype in INTEGERS) != (below is not None):
        if below is None:
            raise OptionError(f'the input "{text}" needs a bound', f"Write {dtype}<N, as int64<30522:128.")
        raise OptionError(f'the input "{text}" cannot have a bound', "Only integers have one: int64<30522:128.")
    highest = 2 ** (8 * BYTES.get(dtype, 1) - (dtype != "uint8"))
    if below is not None and not 1 <= int(below) <= highest:
        raise OptionError(f'the bound in "{text}" is out of range', f"For {dtype} it is 1 to {highest}.")
    spec = InputSpec(dtype, tuple(int(dim) for dim in dims.split("x")) if dims else (), int(below) if below else None)
    if spec.nbytes(1) > LARGEST:
        raise OptionError(f'the input "{text}" is too large', "The shape is that of one sample, without the batch.")
    return spec


def parse_compression(text: str) -> str:
    """Parse a compression: `auto`, `none`, or a codec for all swaps."""
    name = text.strip().lower()
    if name not in COMPRESSIONS:
        raise OptionError(f'there is no compression "{text}"', f"Choose one of {', '.join(COMPRESSIONS)}.")
    return name


def parse_kwargs(text: str) -> dict[str, Any]:
    """Parse the keyword arguments of the model's callable, a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"this is not JSON: {error}", """Write an object, as '{"in_size": [64, 64]}'.""") from None
    if not isinstance(value, dict):
        hint = """Write an object, as '{"in_size": [64, 64]}'."""
        raise OptionError(f"this is a JSON {type(value).__name__}, not an object", hint)
    return value


def parse_budget(text: str) -> Budget:
    """Parse a budget: `70%` of the vanilla peak, `4GiB`, `500MB`, `1000000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|[a-zA-Z]*)", text.strip())
    if match and match[2] == "%":
        budget = Budget(float(match[1]), True)
    elif match and match[2].upper() in UNITS:
        budget = Budget(float(match[1]) * UNITS[match[2].upper()], False)
    else:
        raise OptionError(f'"{text}" is not a budget', "Write bytes (4GiB, 500MB, 1000000) or a share (70%).")
    if not 0 < budget.amount < LARGEST:
        raise OptionError(f'the budget "{text}" is out of range', "Write more than 0.")
    return budget


def parse_device(text: str) -> DeviceChoice:
    """Parse a device: `host`, `cuda`, `cuda:1`, `sim:PROFILE`.

    Whether the profile exists is checked where it is looked up.
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "host" and not rest and ":" not in text:
        return DeviceChoice("host")
    if kind in ACCELERATORS and (":" not in text or re.fullmatch(r"\d{1,4}", rest)):
        return DeviceChoice(kind, int(rest or 0))
    if kind == "sim" and rest:
        return DeviceChoice("sim", profile=rest)
    raise OptionError(f'"{text}" is not a device', "Write host, cuda, cuda:N or sim:PROFILE, as sim:RTX_A6000.")


def parse_budgets(text: str) -> tuple[Budget | None, ...]:
    """Parse budgets separated by commas, without duplicates; the word none becomes None, no budget."""
    budgets = (None if part.strip() == "none" else parse_budget(part) for part in text.split(","))
    return tuple(dict.fromkeys(budgets))


def parse_policies(
    text: str, policies: Mapping[str, Callable[..., Any]], budgets: tuple[Budget | None, ...], early_update: bool
) -> tuple[PolicyChoice, ...]:
    """Parse policies separated by commas, each combined with every budget, without duplicates.

    A policy may have settings, `joint:budget=50%:early_update=true`: a budget instead of `budgets`, early_update
    instead of `early_update`, latencies, device graphs, and keyword arguments of its own. Vanilla is the reference, so
    it has no budget unless it is the only policy. Peers (`peer:checkpoint`, `peer:memory_budget=0.5`) never have one.
    """
    choices: list[PolicyChoice] = []
    for part in (part.strip() for part in text.split(",")):
        if part.startswith(PEER):
            choices.append(parse_peer(part))
        elif part:
            choices += parse_policy(part, policies, budgets, early_update)
    if not choices:
        raise OptionError("no policy is named", f"Policies: {', '.join((*policies, *PEERS))}.")
    if any(choice.name != VANILLA for choice in choices):
        choices = [replace(choice, budget=None) if choice.name == VANILLA else choice for choice in choices]
    return tuple(dict.fromkeys(choices))


def parse_policy(
    text: str, policies: Mapping[str, Callable[..., Any]], budgets: tuple[Budget | None, ...], early_update: bool
) -> Iterable[PolicyChoice]:
    name, *settings = (part.strip() for part in text.split(":"))
    if name not in policies:
        raise OptionError(f'"{name}" is not a policy', f"Policies: {', '.join((*policies, *PEERS))}.")
    own = list(inspect.signature(policies[name]).parameters)[3:]  # after the traces, the profile and the budget
    choice = PolicyChoice(name, name, early_update=early_update and name != VANILLA)
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if key == "budget" and name != VANILLA:
            budgets = parse_budgets(value)
            continue
        choice = replace(choice, label=f"{choice.label}:{key}={value}")
        if key == "early_update" and name != VANILLA and value in ("true", "false"):
            choice = replace(choice, early_update=value == "true")
        elif key == "device_graphs" and name != VANILLA and value in ("true", "false"):
            choice = replace(choice, device_graphs=value == "true")
        elif key == "latencies" and name != VANILLA and value in LATENCIES:
            choice = replace(choice, latencies=value)
        elif key in own and value:
            choice = replace(choice, keywords=(*choice.keywords, (key, parse_value(value))))
        else:
            hint = f"Of {name}: " + ", ".join((*own, *SETTINGS)) + "." if name != VANILLA else "Vanilla has none."
            raise OptionError(f'"{setting}" is not a setting of the policy {name}', hint)
    return [replace(choice, budget=budget) for budget in budgets]


def parse_peer(text: str) -> PolicyChoice:
    """Parse one of PyTorch's own means: its name, and after = the share of the activations that memory_budget keeps."""
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in PEERS:
        raise OptionError(f'"{text}" is not one of PyTorch\'s own means', f"There are {', '.join(PEERS)}.")
    if (name == MEMORY_BUDGET) != ("=" in text):
        hint = f"Write {MEMORY_BUDGET}=0.5 for half of the activations; the others have no number."
        raise OptionError(f'"{text}" is not how one of PyTorch\'s own means is asked for', hint)
    if name != MEMORY_BUDGET:
        return PolicyChoice(name, name, latencies="")
    share = parse_number(value, None, "a share of the activations")
    if share > 1:
        raise OptionError(f'the share in "{text}" is more than 1', "Write 0 (keep nothing) to 1 (PyTorch's default).")
    return PolicyChoice(name, f"{name}={share:g}", (("share", share),), latencies="")


def parse_value(text: str) -> int | float | bool | str | None:
    """Parse the value of a policy's keyword argument: a number, true, false or null; anything else is text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, int | float | bool) else text


def parse_reason(text: str) -> str:
    """Parse why fewer steps are taken, which the rows repeat: any text but an empty one."""
    if not text.strip():
        hint = "Write why fewer steps are enough: --light 'the device is lent for ten minutes'."
        raise OptionError("the reason is missing", hint)
    return text.strip()


def parse_latency_models(path: str) -> LatencyModels:
    """Read latency models from a file, in the format of tensile.latency_models."""
    try:
        return model_bytes.decode(Path(path).read_bytes())
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except MeasurementError as error:
        raise OptionError(f"{path}: {error.message}", error.hint) from None
