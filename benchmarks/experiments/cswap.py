"""Epochs under vDNN, vDNN++, static compression and CSWAP (CSWAP, section V-A), simulated at the paper's sizes.

ImageNet on the profile of the paper's V100, with its batches and the bandwidths that it measured. All methods execute
vDNN's plan, which moves the inputs of convolutions; they differ in what they compress:

- vdnn: nothing;
- vdnn++: on the host, after the swap, what is more than 60 % zeros, so that the link moves all bytes, and its next
  transfer waits for the host's processors;
- sc: every output of ReLU and max pooling, by the GPU (static compression, which is cDMA by kernels);
- cswap: those for which the cost model (equations 1 to 4) says that it pays in that epoch;
- orac: as cswap, with coding that takes no time.

Coding and moving take turns, as in the paper, where our executor codes one chunk while it moves another.

*Zeros* follow what the paper's text says of its Figure 1, VGG-16 in its first 50 epochs: ReLU4's share rises from 50 to
80 %, ReLU7's rises in the first ten epochs and falls by 20 points afterwards, and MAX4's is always below 45 %; all are
from 20 to 80 %. Layers and networks of which it says nothing follow ReLU4 or MAX4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.gpus import V100
from benchmarks.experiments.networks import ALEXNET, MOBILENET, RESNET50, SQUEEZENET, VGG16, Network, named
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.compression.sparsity import Statistics, coded_bytes
from pg_tensile.planning.device.profile import GB
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.policies import vdnn
from pg_tensile.planning.policies.compression.cost import Window, swap_cost_us, windows
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Phase, Trace
from pg_tensile.tools.bench.planned import predicted
from pg_tensile.tools.bench.simulated import captured
from pg_tensile.tools.cli.bench import parse

# section V-A: effective bandwidths, from the device and to it
LINK = V100.with_link(11.7 * GB, 10.6 * GB, V100.duplex_factor)
BATCHES = {ALEXNET: 512, VGG16: 128, MOBILENET: 128, RESNET50: 64, SQUEEZENET: 512}  # table III, V100, ImageNet
IMAGES = 1_400_000  # of an epoch, section V
EPOCHS = (0, 5, 10, 20, 30, 40, 48)
LAST = 50
GPU_US = 44e3 / 2 / 500e6  # for each byte, one way: section IV-D, both ways of 500 MB take 44 ms
HOST_SHARE = 0.6  # of zeros, above which vDNN++ compresses
HOST_US = 1e6 / (4 * GB)  # for each byte, one way; the paper gives none: our codec on one core
LAYERS = {0: 5, 48: 9}  # of VGG-16 that the paper's CSWAP compresses in an epoch, Figure 9
RELU, POOLING = "relu", "max_pool"
CLOSE = 0.01  # the cost model counts all of the coding, of which a part hides behind operators in the simulator


class Layer(NamedTuple):
    """A swapped output of ReLU or max pooling, numbered by kind in the order of forward, as in the paper."""

    tensor: int
    kind: str
    number: int


def layers_of(trace: Trace, plan: Plan) -> list[Layer]:
    """Return the sparse tensors that the plan swaps. A tensor is what the last operator in forward makes of it."""
    columns, counts, found = Columns(trace), {RELU: 0, POOLING: 0}, []
    swapped = dict.fromkeys(plan.rows["tensor"][plan.rows["kind"] == EventKind.SWAP_OUT].tolist())
    makers = {tensor: max(o for o in columns.makers[tensor] if trace.phase[o] == Phase.FORWARD) for tensor in swapped}
    for tensor in sorted(swapped, key=lambda tensor: makers[tensor]):
        for kind in counts:
            if kind in trace.target[makers[tensor]]:
                counts[kind] += 1
                found.append(Layer(tensor, kind, counts[kind]))
    return found


def zero_share(network: str, layer: Layer, epoch: int) -> float:
    """Return the share of zeros that the paper's text says, or that of ReLU4 or MAX4 where it says nothing."""
    if layer.kind == POOLING:
        return 0.44
    if (network, layer.number) == (VGG16.title, 7):
        return 0.6 + 0.2 * epoch / 10 if epoch < 10 else 0.8 - 0.2 * (epoch - 10) / (LAST - 10)
    return 0.5 + 0.3 * epoch / LAST


def on_device(trace: Trace, shares: Mapping[int, float], us_per_byte: float) -> Coding:
    """Return the coding of ZVC on the GPU; coding precedes or follows the transfer as a whole (`waking_us`)."""
    coding = Coding.none(trace.tensor_bytes)
    for tensor, share in shares.items():
        size = int(trace.tensor_bytes[tensor])
        coding.codec[tensor] = Codec.ZVC
        coding.moved_bytes[tensor] = coded_bytes(Codec.ZVC, size, 4, Statistics(share, share * (1 - share)))
        coding.waking_us[tensor] = us_per_byte * size
    return coding


def on_host(trace: Trace, shares: Mapping[int, float]) -> Coding:
    """Return the coding of vDNN++: all bytes move, and the host's processors take their time before the next."""
    coding = Coding.none(trace.tensor_bytes)
    for tensor, share in shares.items():
        if share > HOST_SHARE:
            coding.codec[tensor] = Codec.ZVC
            coding.waking_us[tensor] = HOST_US * trace.tensor_bytes[tensor]
    return coding


class Step:
    """A network's step under vDNN's plan."""

    def __init__(self, network: Network, batch: int) -> None:
        options = parse(["bench", *network.arguments(batch), "--optimizer", "momentum"])
        self.title = network.title
        self.trace = roofline.timed(captured(options).vanilla.trace, LINK)
        self.plan = vdnn.plan({0: self.trace}, LINK, None)[0]
        self.layers = layers_of(self.trace, self.plan)
        timeline = predicted(self.trace, self.plan, LINK)
        self.windows: dict[int, list[Window]] = {}
        for window in windows(self.trace, self.plan, timeline, LINK):
            self.windows.setdefault(window.tensor, []).append(window)

    def us(self, coding: Coding | None) -> float:
        """Return the µs of a step with these codecs."""
        trace = self.trace.with_coding(coding)
        return predicted(trace, with_codecs(trace, self.plan), LINK).iteration_us

    def chosen(self, shares: Mapping[int, float]) -> Coding:
        """Return the coding of the tensors that it pays for (section IV-B)."""
        everything = on_device(self.trace, shares, GPU_US)
        coded, chosen = self.trace.with_coding(everything), Coding.none(self.trace.tensor_bytes)
        for tensor in shares:
            costs = (
                sum(swap_cost_us(coded, window, codec, LINK) for window in self.windows[tensor])
                for codec in (Codec.ZVC, Codec.NONE)
            )
            if next(costs) < next(costs):
                chosen.take(tensor, everything)
        return chosen

    def epoch(self, epoch: int) -> Row:
        """Return the ms of a step of the epoch by method, and what CSWAP compresses."""
        shares = {layer.tensor: zero_share(self.title, layer, epoch) for layer in self.layers}
        chosen = self.chosen(shares)
        compressed = {tensor: shares[tensor] for tensor in np.flatnonzero(chosen.codec).tolist()}
        codings = {
            "vdnn": None,
            "vdnn++": on_host(self.trace, shares),
            "sc": on_device(self.trace, shares, GPU_US),
            "cswap": chosen,
            "orac": on_device(self.trace, compressed, 0.0),
        }
        sizes = self.trace.tensor_bytes[list(shares)]
        return {
            "step_ms": {method: self.us(coding) / 1e3 for method, coding in codings.items()},
            "layers": len(self.layers),
            "compressed": [f"{layer.kind}{layer.number}" for layer in self.layers if layer.tensor in compressed],
            "zero_share": float(np.average(list(shares.values()), weights=sizes)),
        }


def rows_of(network: Network, batch: int) -> Iterator[Row]:
    """Yield a row for each of EPOCHS."""
    step = Step(network, batch)
    vanilla_ms = float(step.trace.latency_us.sum()) / 1e3
    for epoch in EPOCHS:
        found = step.epoch(epoch)
        yield {
            "experiment": "cswap",
            "case": network.title,
            "batch": batch,
            "epoch": epoch,
            "vanilla_ms": vanilla_ms,
            **found,
            "papers_layers": LAYERS.get(epoch) if network == VGG16 else None,
            "minutes": {method: ms * IMAGES / batch / 60e3 for method, ms in found["step_ms"].items()},
        }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check the order of the methods, and that CSWAP compresses more when there are more zeros."""
    checked = []
    for row in rows:
        ms = row["step_ms"]
        for less, more in (("orac", "cswap"), ("cswap", "vdnn"), ("cswap", "sc"), ("vdnn", "vdnn++")):
            what, holds = f"{row['case']}, epoch {row['epoch']}: {less}", ms[less] <= ms[more] * (1 + CLOSE)
            checked.append(Check("cswap", what, f"{ms[less]:.1f} ms", f"≤ {ms[more]:.1f} ms ({more})", holds))
    for case in dict.fromkeys(row["case"] for row in rows):
        counts = [len(row["compressed"]) for row in rows if row["case"] == case]
        first, last = counts[0], counts[-1]
        checked.append(Check("cswap", f"{case}: compressed at the end", f"{last}", f"≥ {first}", last >= first))
    return checked


TITLES = [network.title for network in BATCHES]


def measure(title: str) -> Iterator[Row]:
    """Yield the rows of a network."""
    network = named(BATCHES, title)
    return rows_of(network, BATCHES[network])
