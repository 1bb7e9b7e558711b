"""The six parts, ordered by what they are worth, and their steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.experiments.networks import (
    BERT,
    DECODER,
    GPT2,
    RESNET50,
    SMALL_BERT,
    SMALL_DECODER,
    SMALL_GPT2,
    SMALL_RESNET,
    TABULAR,
    TINY,
    VGG16,
    VIT,
    Network,
    named,
)
from scripts.cluster import REPOSITORY
from scripts.first_gpu_run.checks import Checks, plans, racefree, sharing, tests, transformers
from scripts.first_gpu_run.steps import ROWS, Step

MEMORY_CAP = {"CUDNN_CONV_WSCAP_DBG": "256"}  # MiB of a convolution's workspace
FIXED_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
EIGHT_GB = "8GB"


class Where(NamedTuple):
    """Device of a run: a type of accelerators; `quick`: with small networks."""

    device: str
    quick: bool

    def environment(self) -> dict[str, str]:
        """Return the variables that name the device to tests and make the emulated one known."""
        variables = {"PG_TENSILE_ACCELERATOR": self.device}
        if self.device != "emulated":
            return variables
        folders = (str(REPOSITORY), str(REPOSITORY / "tests" / "emulated"), os.environ.get("PYTHONPATH", ""))
        return variables | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


class Part(NamedTuple):
    """One part. `checks` compares its outcomes with what a GPU has to show."""

    number: int
    title: str
    question: str
    steps: Callable[[Where], Sequence[Step]]
    checks: Checks = plans


# ---- kinds of steps --------------------------------------------------------------------------------------------------


def pytest(where: Where, name: str, limit_s: float, *words: str, tool: Sequence[str] = (), **variables: str) -> Step:
    plugin = ("-p", "scripts.first_gpu_run.each_test", "--each-test", ROWS)
    words = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *plugin, *words)
    return Step(name, words, limit_s, where.environment() | variables, tuple(tool))


def bench(
    where: Where,
    name: str,
    network: Network,
    limit_s: float,
    policies: str,
    *options: str,
    variables: Mapping[str, str] | None = None,
) -> Step:
    """Return a step of `pg-tensile bench`; its rounds take two thirds of the limit at most."""
    rounds = ("1", "2", "1") if where.quick else ("3", "5", "2")
    taken = zip(("--rounds", "--iterations", "--warmup"), rounds, strict=True)
    words = (
        *("pg_tensile", "bench", *network.arguments(), "--early-update", "--policies", policies, *options),
        *(word for pair in taken for word in pair),
        *("--seconds", f"{limit_s * 2 / 3:.0f}", "--device", where.device, "--json", ROWS),
    )
    return Step(name, words, limit_s, {**where.environment(), **(variables or {})})


def section(where: Where, name: str, command: str, title: str, limit_s: float) -> Step:
    """Return a step that measures a section of the benchmarks."""
    quick = ("--quick",) if where.quick else ()
    words = ("benchmarks", command, "--section", title, "--device", where.device, *quick, "--rows", ROWS)
    return Step(name, words, limit_s, where.environment())


# ---- the parts -------------------------------------------------------------------------------------------------------


def accelerator_tests(where: Where) -> list[Step]:
    folder = "tests/accelerator"
    each = ("--confcutdir", folder)
    times = "tests/accelerator/test_times.py"
    if where.device == "emulated":
        return [pytest(where, "tests", 500, "-n", "2", *each, folder)]
    # Times alone on the device, the others side by side: most of a test is the start of a process.
    return [
        pytest(where, "tests", 420, "-n", "4", "--dist", "loadfile", *each, folder, "--ignore", times),
        pytest(where, "times", 90, *each, times),
    ]


def transformer_steps(where: Where) -> list[Step]:
    half = ("--autocast", "bf16")
    networks = (
        GPT2._replace(title="GPT-2, 12 layers", kwargs='{"layers": 12}', batch=32, inputs=("int64<50257:256",)),
        BERT._replace(title="BERT, 12 layers", kwargs='{"layers": 12}', batch=128),
        VIT._replace(title="ViT, 12 layers", kwargs='{"layers": 12, "width": 768}', batch=128),
    )
    if where.quick:
        networks = (
            SMALL_GPT2._replace(title="small GPT-2", batch=4),
            SMALL_BERT._replace(title="small BERT", batch=4),
            VIT._replace(title="small ViT", kwargs='{"layers": 2, "width": 96}', batch=2),
        )
    within = ("--budget", "65%,50%,35%")
    ours = [
        bench(where, network.title, network, 120, "none,joint,peer:checkpoint", *half, *within) for network in networks
    ]
    compiled = [
        bench(where, f"{network.title}: compiled", network, 60, "none,peer:memory_budget=0.5", *half)
        for network in networks
    ]
    return [*ours, *compiled]


def server_steps(where: Where) -> list[Step]:
    tests = "tests/server/test_accelerator.py"
    return [
        section(where, "jobs", "server", "sharing", 400),
        pytest(where, "tests", 300, "--timeout", "280", *(("-k", "killed or budget") if where.quick else ()), tests),
    ]


def convolution_steps(where: Where) -> list[Step]:
    networks = (VGG16._replace(batch=64), RESNET50._replace(batch=128))
    if where.quick:
        networks = (named(TINY, "CNN, batch norm")._replace(batch=8), SMALL_RESNET)
    variants: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("", {}),
        (", workspaces ≤ 256 MiB", MEMORY_CAP),
        (", segments of fixed sizes", FIXED_SEGMENTS),
    )
    return [
        bench(where, f"{network.title}{words}", network, 100, "none,joint", "--budget", "65%,50%", variables=variables)
        for words, variables in variants
        for network in networks
    ]


def small_model_steps(where: Where) -> list[Step]:
    graphs = "none,joint:budget=100%,joint:budget=100%:device_graphs=true,joint:budget=60%:device_graphs=true"
    batch = 8 if where.quick else 64
    small = [named(TINY, title)._replace(batch=batch) for title in ("MLP", "CNN, batch norm", "attention")]
    coded = named(TINY, "deep CNN")._replace(batch=8 if where.quick else 512)
    tabular = TABULAR._replace(batch=64 if where.quick else 1024)
    measured = ("none", "--optimizer", "adamw")
    return [
        section(where, "predictions", "plans", "devices", 90),
        *(bench(where, f"device graphs: {network.title}", network, 60, graphs) for network in small),
        bench(where, "tabular", tabular, 45, *measured),
        bench(where._replace(device="host"), "tabular on the CPU", tabular, 45, *measured),
        bench(where, "swaps", coded, 60, "none,joint,swap_all", "--budget", "60%"),
        bench(where, "compressed swaps", coded, 75, "none,joint,swap_all", "--budget", "60%", "--compression", "auto"),
    ]


def sanitizer_steps(where: Where) -> list[Step]:
    """Return PyTorch's sanitizer on the device's tests, CUDA's on the codecs, and a fine-tuning within 8 GB."""
    whole = DECODER[1]._replace(title="GPT-2, all weights", inputs=("int64<50258:128",), batch=128)
    network, budget = (SMALL_DECODER, "50%") if where.quick else (whole, EIGHT_GB)
    tuned = bench(where, network.title, network, 150, "none,joint", "--budget", budget, "--autocast", "bf16")
    folder = "tests/accelerator"
    confined, device = ("--confcutdir", folder), f"{folder}/test_device.py"
    if where.device == "emulated":  # it has a detector of its own, and no kernels
        interpreted = pytest(where, "codecs, interpreted", 200, "-m", "not long", "tests/kernels/test_interpreted.py")
        return [pytest(where, "the emulator's detector", 150, *confined, device), interpreted, tuned]
    racecheck = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9")
    return [
        pytest(where, "PyTorch's sanitizer", 150, *confined, device, TORCH_CUDA_SANITIZER="1"),
        pytest(where, "racecheck", 200, *confined, f"{folder}/test_codecs.py", tool=racecheck),
        tuned,
    ]


PARTS = (
    Part(1, "Tests", "Do all tests of the accelerator pass?", accelerator_tests, tests),
    Part(
        2,
        "Transformers in bfloat16",
        "How fast is a step within 65, 50 and 35 % of the memory, beside checkpointing and PyTorch's compiler?",
        transformer_steps,
        transformers,
    ),
    Part(
        3, "Jobs in a server", "Do jobs share the device's memory and time as the ledger says?", server_steps, sharing
    ),
    Part(4, "Convolutions", "What do workspaces and the allocator's segments cost?", convolution_steps),
    Part(
        5,
        "Small models",
        "Do device graphs, predictions, tables and compressed swaps gain anything on the device?",
        small_model_steps,
    ),
    Part(6, "Sanitizers", "Are there races, and does a fine-tuning keep to 8 GB?", sanitizer_steps, racefree),
)
