"""The sections of `make bench-papers` in the document: their words, columns and cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.command import Row
from benchmarks.experiments import accudnn, cswap, slower, swapadvisor, together_bounds
from benchmarks.experiments.cases import BATCHES
from benchmarks.experiments.paper import Published
from benchmarks.experiments.suite import method, published
from pg_tensile.planning.device.profile import GB

ERROR = 0.15  # median, relative, of the simulated cold start's predictions
Cells = Callable[[Row], tuple[str, ...]]


class Section(NamedTuple):
    """One table of the document.

    `words`: how the work and the platform differ from the paper's, and what follows. `columns`: those of a table with a
    row for each network and method, which has what is saved at which EOR in place of `cells`. `program`: the module
    with the cases of a section that is no experiment.
    """

    name: str
    words: str
    headings: tuple[str, ...]
    cells: Cells | None
    columns: tuple[str, ...] = ()
    program: Any = None


def papers_row(row: Row) -> Published | None:
    """Return the paper's result beside which a row stands: for `joint`, TENSILE's."""
    phase = {"policy": "tensile", "label": "tensile"} if row["policy"] == "joint" else {}
    return published(row | phase)


def single_cells(row: Row) -> tuple[str, ...]:
    return (
        *common_cells(row),
        bound_cell(row),
        f"{row['stall_ms']:.0f}",
        f"{row['recomputes']:,}",
        *papers_cells(row),
    )


def together_cells(row: Row) -> tuple[str, ...]:
    return (*common_cells(row), bound_cell(row), f"{row['stall_ms']:.0f}", *papers_cells(row))


def bound_cell(row: Row) -> str:
    return f"{row['least_eor']:.3f}" if row.get("least_eor") else ""


def first_cells(row: Row) -> tuple[str, ...]:
    papers = papers_row(row)
    predicted = papers.prediction_eor if papers is not None and row["policy"] == "tensile" else None
    return (
        *(row["case"], f"`{method(row)}`", f"{row['msr']:.1%}", f"{row['first_eor']:.3f}"),
        f"{row['planning_ms'] / 1e3:.2f}",
        f"{papers.eor:.3f}" if papers is not None and row["policy"] != "joint" else "",
        f"{papers.eor - predicted:.3f}" if papers is not None and predicted is not None else "",
    )


def common_cells(row: Row) -> tuple[str, ...]:
    return (row["case"], f"`{method(row)}`", f"{row['msr']:.1%}", f"{row['eor']:.3f}", f"{row['cbr']:.3f}")


def papers_cells(row: Row) -> tuple[str, ...]:
    papers = None if row["policy"] == "joint" else papers_row(row)
    if papers is None or papers.msr is None:
        return ("", "", "")
    return (f"{papers.msr:.1%}", f"{papers.eor:.3f}", f"{papers.cbr:.3f}")


def slower_cells(row: Row) -> tuple[str, ...]:
    return (row["case"], f"{row['times']}", f"{row['msr']:.1%}", f"{row['papers_msr']:.1%}", *enough_cells(row))


def enough_cells(row: Row) -> tuple[str, ...]:
    """Describe what all rows of a network share, in the first of them."""
    if row["times"] != slower.TIMES[0]:
        return ("", "", "")
    papers_ms = row["papers_step_ms"]
    return (
        f"{row['enough']:.1f}" if row["enough"] else f"more than {slower.MOST:.0f}",
        f"{row['step_ms']:.0f}",
        f"{papers_ms:,.0f}" if papers_ms else "",
    )


def swapadvisor_cells(row: Row) -> tuple[str, ...]:
    return (
        *(row["case"], f"`{row['policy']}`", f"{row['operators']:,}", f"{row['vanilla_bytes'] / GB:.0f}"),
        *(
            row["papers_gb"],
            f"{row['ideal']:.1%}",
            f"{row['bound']:.1%}",
            row["papers_ideal"],
            f"{row['planning_s']:.0f}",
        ),
    )


def accudnn_cells(row: Row) -> tuple[str, ...]:
    papers = row["papers_batch"]
    return (
        *(row["case"], f"`{row['policy']}`", f"{row['batch']:,}", f"{row['batch'] / row['none_batch']:.2f}"),
        f"{row['rate']:,.0f}" if row["rate"] else "",
        f"{papers:,}" if papers else "",
        f"{papers / row['caffe_batch']:.2f}" if papers else "",
        f"{row['papers_rate']}" if papers else "",
    )


def cswap_cells(row: Row) -> tuple[str, ...]:
    minutes, papers = row["minutes"], row["papers_layers"]
    return (
        *(row["case"], f"{row['epoch']}", f"{row['zero_share']:.0%}"),
        *(f"{minutes[method]:,.0f}" for method in ("vdnn", "vdnn++", "sc", "cswap", "orac")),
        *(f"{minutes['cswap'] / minutes['vdnn']:.2f}", f"{len(row['compressed'])} of {row['layers']}"),
        f"{papers} of 12" if papers else "",
    )


def bounds_cells(row: Row) -> tuple[str, ...]:
    return (row["case"], f"{row['jobs']}", *(f"{eor:.3f}" for eor in together_bounds.table_eors(row)))


PROGRAM_TITLES = {
    "slower": "How slow the paper's operators are",
    "swapadvisor": "SwapAdvisor's models",
    "accudnn": "AccUDNN's batches",
    "cswap": "CSWAP's epochs",
    "bounds": "Bounds for several jobs",
}
SINGLE = ("", "method", "saved", "EOR", "CBR", "bound", "stall, ms", "recomputed")
TOGETHER = ("", "method", "saved", "EOR", "CBR", "bound", "stall, ms")
PAPERS = ("paper: saved", "EOR", "CBR")
JOBS = ("1", "2", "3", "4")  # of the same network

SECTIONS = (
    Section(
        "table3",
        """
Each policy with a budget saves what the paper's TENSILE saved on the network. `vdnn` has no budget, and `tensile`
without one is TENSILE as in the paper: it swaps as long as nothing waits, and recomputes nothing. It saves less here
than in the paper, because the link has less time while an operator runs (see below, how slow the paper's operators
are). With the budget it recomputes, at a fraction of the extra time of the paper's TENSILE. VGG-16's peak is the update
of its first fully connected layer, which `tensile` cannot lower in the order of the paper's graph, with all updates at
the end; early updates (`early`) release each gradient as soon as it is used. Memory is that of all tensors: weights,
gradients, both moments of AdamW, activations; workspaces of libraries are not known without a GPU. `vdnn` moves the
inputs of all convolutions, and saves more than the paper's `vdnn` on all networks but VGG-16; the paper does not say
which inputs its own moves. A plan that exceeds the budget is a row with its reason.
""",
        (*SINGLE, *PAPERS),
        single_cells,
    ),
    Section(
        "table1",
        f"""
A plan made with predicted latencies (`roofline`) and one with the right ones, each at what the paper's saves in that
phase. The predictions are wrong by {ERROR:.0%} in the median, about as [cold start](cold.md) found those of models to
be. The paper's EOR in its cold start includes the time of its predictions, which alone takes longer there than many
steps take here. The simulator has only the plan, and says what wrong latencies cost, so both phases are much closer to
each other than in the paper. DenseNet-121's updated plan is the one place where the paper's EOR is lower: its platform
hides the copies of what is recomputed here. The bound does not rule it out here.
""",
        (*SINGLE, *PAPERS),
        single_cells,
    ),
    Section(
        "table2",
        """
The first iteration under a plan made with predicted latencies, and under swapping on demand (`lru`), which is
Capuchin's first iteration. In the simulator a first iteration differs from later ones in nothing but the plan: nothing
is loaded, compiled or chosen. "Without prediction" is the paper's EOR less the part that it gives for its predictions;
ours of `tensile` is near it. Swapping on demand costs less than in the paper, which does not say in how little memory
its first iteration ran; here it is that of the other rows. Planning takes the seconds given on one core.
""",
        ("", "method", "saved", "first iteration, EOR", "planning, s", "paper", "without prediction"),
        first_cells,
    ),
    Section(
        "table4",
        """
All five networks at once, each with a batch of 16; the paper does not give its batch. The device computes for the five
jobs in turns, so without a plan each takes five times as long as alone, and the link has five times as long for each
job's transfers, but carries those of five jobs. Saved is the sum of the jobs' peaks, as if all were at their peaks at
the same time, which the paper's need not be. `capuchin` does not break down as in the paper: it has each job's share of
the budget, and plans with the latencies of the jobs in turns.
""",
        (*TOGETHER, *PAPERS),
        together_cells,
    ),
    Section(
        "fig6",
        """
One to four jobs with the same network at once, as in the table before: what is saved, at which EOR, and after ≥ the
bound for the graph without early updates (see below, bounds for several jobs). The paper's figure
has no numbers in its text, which says that with more jobs vDNN's EOR falls, Capuchin's rises dramatically, and
TENSILE's stays much more stable. `vdnn` and `tensile` do the same here; `capuchin`'s EOR rises up to three jobs on
all networks but VGG-16, and with four on DenseNet-121 only. With several jobs, plans with early updates are mostly
behind those without: they swap more and recompute less, and in the simulator transfers of other jobs come first now and
then. `joint` leaves slack on the link for that. On the same graph it is ahead of `tensile` everywhere; with early
updates it is ahead of `tensile` without them except with two ResNet-50, and equal with four DenseNet-121.
""",
        ("", "method", *(f"{count} at once" for count in JOBS)),
        None,
        JOBS,
    ),
    Section(
        "fig7",
        """
Policies without a budget, which choose what they save: `tensile` what hides behind operators, `joint` what costs at
most 2 % of the time. The paper's text says that savings and CBR rise with the batch, except for DenseNet with 32 and
64. Here only VGG-16's rise clearly. For the others, the time of operators and the bytes of activations grow alike, so
that the share that hides changes little; early updates gain less with larger batches, as gradients become a smaller
part.
""",
        ("", "method", *(f"batch {size}" for size in BATCHES)),
        None,
        tuple(f"batch {size}" for size in BATCHES),
    ),
    Section(
        "slower",
        """
TENSILE as in the paper (one lane, no budget) on a device whose link is the same, and whose operators take several times
as long. *Enough* is the multiple from which it saves as much as the paper's. The paper's platform was slower than that:
the time of its predictions, and the part of the first iteration that this is, imply how long that iteration took
without a plan. So the link of that platform had time for all that was saved.
""",
        ("", "times as slow", "saved", "paper", "enough", "step here, ms", "the paper's first, ms"),
        slower_cells,
        program=slower,
    ),
    Section(
        "swapadvisor",
        """
The five models of SwapAdvisor's table 1 with its largest batches, on the profile of a V100 with 16 GiB: the time with
unlimited memory over that of the policy, beside what the paper's text says. `lru:prefetch` is the paper's baseline,
ODSwap: the decisions of swapping on demand, whose copies are known beforehand and overlap with operators. *Bound* is
the share that no plan for the plan's own order can exceed.

The order of operators decides for RNN-8-8K, as in the paper: each time step needs all weights, and only `swapadvisor`
reorders. The paper's baseline has MXNet's order, which it calls random; ours is PyTorch's, which computes a direction
of a layer of BRNN-4-8K as a whole, so that swapping on demand loses far less there. The paper does not give the length
of its sequences, 16 here, nor its optimizer, SGD here, and its framework keeps more tensors than our executor, so that
our memory is smaller. Nor does it give NASNet-25's filters and images, here those of NASNet-A (6 @ 4032), with which
the memory is near the paper's. The paper's own does worst on Inception-4 and NASNet-25, because tensors of many sizes
share pools of memory. Here no memory is lost to pools, and NASNet-25, with most operators, has the least time for the
search: it stops after its first individuals. On these two SwapAdvisor is 20 to 150 % faster than ODSwap in the paper,
and in that range here.
""",
        ("", "method", "operators", "GB", "paper's GB", "of ideal", "bound", "paper", "planning, s"),
        swapadvisor_cells,
        program=swapadvisor,
    ),
    Section(
        "accudnn",
        f"""
AccUDNN's table 1 on the profile of an M40: the largest batch within 12 GB at which a step takes at most
{accudnn.COST - 1:.0%} longer than without a limit. The paper's base is Caffe, which keeps all feature maps; ours
(`none`) releases every tensor after its last use, so it holds larger batches from the start, and the plans add less to
it. Images/s are the roofline's, about twice the paper's for ResNets. The extra time of `accudnn` does not grow evenly
with the batch, so some larger ones may hold, too. GoogLeNet is without its auxiliary classifiers.
""",
        ("", "method", "batch", "over `none`", "images/s", "paper's batch", "over Caffe", "images/s"),
        accudnn_cells,
        program=accudnn,
    ),
    Section(
        "cswap",
        f"""
Minutes of an epoch of ImageNet under vDNN's plan, as zeros become more, on the profile of the paper's V100 with the
bandwidths that it measured: without compression (`vdnn`), compressed on the host after the swap (`vdnn++`), by the GPU
always (`sc`) or where the paper's cost model says that it pays (`cswap`), and with coding that takes no time (`orac`).
The paper has no figure of times by epoch: its Figure 6 has speeds over the training, by which CSWAP takes 20.3 % less
time than vDNN in the mean of six networks on this GPU, and its Figures 8 and 9 the layers that CSWAP compresses.

The paper's text gives the zeros of three of VGG-16's layers; all others follow ReLU4 (50 to 80 %) or MAX4 (below 45 %).
Coding takes the 44 ms for 500 MB that it reports at 50 % zeros, at any share. It does not give the speed of `vdnn++` on
the host; here it is {1 / cswap.HOST_US / 1e3:.0f} GB/s, that of our codec on a core. On average the paper's CSWAP is
190 % faster than its `vdnn++`, on CIFAR-10. VGG-16's operators take longer on this profile than the transfers of most
layers, which then hide, so that CSWAP compresses fewer layers than in the paper; which they are is as in the paper, the
largest first, never MAX4, ReLU7 or ReLU8. Most of what AlexNet moves are the images, which have no zeros. Plain20 is
not among the networks, because the paper does not say what it is made of.
""",
        (
            *("", "epoch", "zeros", "`vdnn`", "`vdnn++`", "`sc`", "`cswap`", "`orac`"),
            *("`cswap` / `vdnn`", "compressed", "paper"),
        ),
        cswap_cells,
        program=cswap,
    ),
    Section(
        "bounds",
        """
The EOR below which no plans for several jobs with the same network can be, if together they save at least the share
given, for the graph without early updates. It is the bound for one job, minimised over all divisions of the memory. The
operators of a job take as many times as long as there are jobs, as in the tables above, but each job has the whole
link, so that the bounds fall with the number of jobs, and say little beyond two.
""",
        ("", "jobs", *(f"{share:.0%} saved" for share in together_bounds.SAVED)),
        bounds_cells,
        program=together_bounds,
    ),
)
