"""What `pg-tensile bench` is asked to do: sizes, input specifications, budgets. Needs no torch.

Every parse function raises OptionError, whose message says what is wrong and whose hint shows what is right.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from pg_tensile.errors import OptionError

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
LOSSES = ("cross_entropy", "mse", "bce", "lm", "model")
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}  # others: 1
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LARGEST = 2**62


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: integers from 0 to `below` − 1; `shape` is that of one sample, the batch comes first."""

    dtype: str
    shape: tuple[int, ...] = ()
    below: int | None = None

    def nbytes(self, batch: int) -> int:
        return math.prod((batch, *self.shape)) * BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Budget:
    """Bytes of device memory, or a share of the vanilla peak."""

    amount: float
    percent: bool

    def nbytes(self, vanilla_peak_bytes: int) -> int:
        return int(vanilla_peak_bytes * self.amount / 100) if self.percent else int(self.amount)


@dataclass(frozen=True)
class DeviceChoice:
    """`kind` host, cuda or sim; `index` of the CUDA device; `profile` to simulate."""

    kind: str
    index: int = 0
    profile: str = ""

    def __str__(self) -> str:
        return {"host": "host", "cuda": f"cuda:{self.index}", "sim": f"sim:{self.profile}"}[self.kind]


@dataclass(frozen=True)
class BenchOptions:
    """One run of the benchmark. Bandwidth in GB/s (10⁹ bytes); None where the run decides."""

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
    early_update: bool
    policies: tuple[str, ...]
    device: DeviceChoice
    link_gbps: float | None
    budget: Budget | None
    iterations: int
    rounds: int
    warmup: int
    seed: int
    threads: int
    json_path: str | None = None


def parse_input(text: str) -> InputSpec:
    """`float32:3x224x224`, `int64<30522:128` (integers below 30522, 128 of them), `bool:10`, `float32` (one number)."""
    match = re.fullmatch(r"([a-z0-9]+)(?:<(\d{1,18}))?(?::([0-9]{1,18}(?:x[0-9]{1,18})*))?", text.strip())
    if not match:
        raise OptionError(f'"{text}" is not an input', "Write TYPE:SHAPE, as float32:3x224x224 or int64<30522:128.")
    dtype, below, dims = match.groups()
    if dtype not in (*FLOATS, *INTEGERS, "bool"):
        known = ", ".join((*FLOATS, *INTEGERS, "bool"))
        raise OptionError(f'"{dtype}" in the input "{text}" is not a type', f"Types: {known}.")
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


def parse_kwargs(text: str) -> dict[str, Any]:
    """The keyword arguments of the model's callable: a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"this is not JSON: {error}", """Write an object, as '{"in_size": [64, 64]}'.""") from None
    if not isinstance(value, dict):
        hint = """Write an object, as '{"in_size": [64, 64]}'."""
        raise OptionError(f"this is a JSON {type(value).__name__}, not an object", hint)
    return value


def parse_budget(text: str) -> Budget:
    """`70%` of the vanilla peak, `4GiB`, `500MB`, `1000000`."""
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
    """`host`, `cuda`, `cuda:1`, `sim:PROFILE`. Whether the profile exists is checked where it is looked up."""
    kind, _, rest = text.strip().partition(":")
    if kind == "host" and not rest and ":" not in text:
        return DeviceChoice("host")
    if kind == "cuda" and (":" not in text or re.fullmatch(r"\d{1,4}", rest)):
        return DeviceChoice("cuda", int(rest or 0))
    if kind == "sim" and rest:
        return DeviceChoice("sim", profile=rest)
    raise OptionError(f'"{text}" is not a device', "Write host, cuda, cuda:N or sim:PROFILE, as sim:RTX_A6000.")


def parse_policies(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f'"{unknown[0]}" is not a policy' if unknown else "no policy is named"
        raise OptionError(what, f"Policies: {', '.join(known)}.")
    return names


def parse_number(text: str, above: float | None, what: str) -> float:
    """A finite number: above `above`, or from 0 on where that is None."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        raise OptionError(f'"{text}" is not {what}')
    return value


def parse_count(text: str, low: int, high: int = 2**31 - 1) -> int:
    """A whole number from `low` to `high`."""
    if not re.fullmatch(r"\d{1,20}", text.strip()) or not low <= int(text) <= high:
        raise OptionError(f'"{text}" is not a whole number from {low} to {high}')
    return int(text)
