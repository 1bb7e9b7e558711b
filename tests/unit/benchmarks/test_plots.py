"""Figures of benchmarks: what is in them, which files they become, and what rows and folders may be like."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.cases import EXPERIMENTS, FULL, parsed
from benchmarks.figures import plots, style
from benchmarks.figures.points import front, method, right
from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.options import PEERS
from tests.examples import examples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOSTILE = (
    "$\\frac{1}{$_^",
    'a/b\\c %d {} & <tag> -- "quoted" \'',
    "a very long title " * 20,
    "W" * 300,
    "lines\nand\ttabs\x07",
    "",
)


def row(label: str = "joint", msr: float | None = 0.4, eor: float | None = 1.1, **more: Any) -> dict[str, Any]:
    policy = label.partition("=")[0] if label.startswith("peer:") else label.partition(":")[0]
    found = {"experiment": "table3", "case": "ResNet-50", "policy": policy, "label": label, "budget": None}
    numbers = {"msr": msr, "eor": eor, "bit_identical": True, "gradient_difference": None, "error": None}
    return found | numbers | {"vanilla_peak_bytes": 100_000_000} | more


NONE = row("none", 0.0, 1.0)
TIMELINE = {"ms": [0.0, 10.0, 30.0, 40.0], "bytes": [20_000_000, 100_000_000, 50_000_000, 50_000_000]}
SAVING = {"ms": [0.0, 12.0, 44.0], "bytes": [20_000_000, 60_000_000, 60_000_000]}


@pytest.fixture
def drawn() -> Iterator[Any]:
    """Draws by one of the functions that make a figure, with the styles of the rows."""
    with plots.drawing():
        yield lambda make, rows, *more: make(rows, style.styles(rows), *more)


def markers(axes: Axes) -> dict[tuple[float, float], tuple[str, str, str]]:
    """Marker, colour and face of the points of a panel."""
    from matplotlib.colors import to_hex

    return {
        points(line)[0]: (
            str(line.get_marker()),
            to_hex(line.get_markeredgecolor()),
            to_hex(line.get_markerfacecolor()),
        )
        for line in axes.lines
        if line.get_marker() != "None"
    }


def legend(figure: Figure) -> list[str]:
    (found,) = figure.legends
    return [text.get_text() for text in found.get_texts()]


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


# ---- the front ----


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6))))
def test_the_front_is_what_nothing_beats(found):
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[0] >= other[0] and one[1] <= other[1] and one != other

    assert front(found) == sorted({each for each in found if not any(beats(other, each) for other in found)})


def test_the_front_is_a_step_line_over_what_is_right(drawn):
    rows = [NONE, row("joint", 0.2, 1.05), row("joint", 0.5, 1.4), row("vdnn", 0.3, 2.0), row("lru", 0.6, 3.0)]
    wrong = row("peer:checkpoint", 0.7, 1.01, bit_identical=False, gradient_difference=0.5)
    (axes,) = drawn(plots.pareto, [*rows, wrong]).axes
    (line,) = [line for line in axes.lines if line.get_drawstyle() == "steps-pre"]
    assert points(line) == [(0, 1), (20, 1.05), (50, 1.4), (60, 3)]
    alone = drawn(plots.pareto, [wrong]).axes[0].lines
    assert all(line.get_drawstyle() == "default" for line in alone)


# ---- rows ----


def test_what_has_no_numbers_is_left_out(drawn):
    bad = [
        row("vdnn", None, 2.0),
        row("capuchin", 0.3, None),
        row("lru", 0.3, 2.0, error="it would not fit"),
        row("tensile", float("nan"), 2.0),
        row("tensile", 0.3, float("inf")),
        row("joint", True, 1.0),
        row("swap_all", 0.3, 0.0),
        {"experiment": "table3", "policy": "none", "label": "none", "error": "did not start"},
    ]
    (axes,) = drawn(plots.pareto, [NONE, row(), *bad]).axes
    assert markers(axes).keys() == {(0, 1), (40, 1.1)}
    assert drawn(plots.pareto, bad) is None


@pytest.mark.parametrize("experiment", ["table3", "fig6", "fig7"])
def test_no_data_no_figure(experiment, tmp_path):
    case = {"table3": "x", "fig6": "2 × x", "fig7": "x, batch 2"}[experiment]
    rows = [row("none", 0.0, 1.0), row(msr=None), row(timeline={"ms": [], "bytes": []}, error="no")]
    assert plots.draw([each | {"experiment": experiment, "case": case} for each in rows], tmp_path) == []
    assert plots.draw([], tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_rows_of_a_plain_benchmark_are_drawn_too(tmp_path):
    rows = [{"model": "net:Net", "policy": name, "msr": 0.1, "eor": 1.0} for name in ("none", "joint")]
    assert {path.name for path in plots.draw(rows, tmp_path)} == {"pareto-bench.svg"}


@pytest.mark.parametrize(
    ("label", "values", "is_right"),
    [
        ("joint", {"bit_identical": True}, True),
        ("joint", {"bit_identical": None}, True),  # nothing was executed
        ("joint", {"bit_identical": False}, False),
        ("joint", {"bit_identical": False, "gradient_difference": 0.0}, False),
        ("peer:checkpoint", {"bit_identical": True, "gradient_difference": 0.0}, True),
        ("peer:memory_budget=0.5", {"bit_identical": False, "gradient_difference": 1e-6}, True),
        ("peer:memory_budget=0.5", {"bit_identical": False, "gradient_difference": 1.1e-3}, False),
        ("peer:memory_budget=0.5", {"bit_identical": False, "gradient_difference": None}, False),
    ],
)
def test_policies_are_right_to_the_bit_and_peers_within_a_thousandth(label, values, is_right):
    assert right(row(label, 0.3, 1.3, **values)) is is_right


def test_wrong_results_are_hollow(drawn):
    wrong = row("vdnn", 0.3, 1.3, case="1 × net", bit_identical=False)
    for figure, found in (
        (series := drawn(plots.series, [row(case="1 × net"), wrong], plots.SERIES["fig6"]), markers(series.axes[1])),
        (pareto := drawn(plots.pareto, [row(case="1 × net"), wrong]), markers(pareto.axes[0])),
    ):
        assert [face == "#ffffff" for _, _, face in found.values()] == [False, True]
        assert "hollow: wrong results" in legend(figure)
    assert "hollow: wrong results" not in legend(drawn(plots.pareto, [row()]))


# ---- methods ----


def test_each_method_of_the_experiments_has_its_own_style():
    cases = [case for experiment in EXPERIMENTS.values() for case in experiment.cases(FULL)]
    labels = {choice.label for case in cases for choice in parsed(case.policies)} | {*PEERS}
    known = style.styles([row(label) for label in sorted(labels)])
    assert {method(row(label)) for label in labels} == set(known) and len(known) > 15
    assert len({look[:2] for look in known.values()}) == len(known)
    assert len({look[:2] for look in style.STYLES.values()}) == len(style.STYLES)
    assert all(look.marker in style.MARKERS and look.colour != "#ffffff" for look in style.STYLES.values())


def test_other_methods_get_what_is_free():
    known = style.styles([row("joint:tries=3"), row("joint"), row("new"), row("new:x=1"), row("other"), row("lru:x=1")])
    assert next(iter(known)) == "joint" and len(set(known.values())) == 6
    others = {look[:2] for name, look in known.items() if name != "joint"}
    assert len(others) == 5 and not others & {look[:2] for look in style.STYLES.values()}
    assert known["joint:tries=3"].colour == known["joint"].colour and known["lru:x=1"].colour == style.ORANGE


def test_a_method_looks_the_same_everywhere(drawn):
    several = drawn(plots.pareto, [row("vdnn", 0.1, 2.0), row("lru", 0.3, 1.2)]).axes[0]
    alone = drawn(plots.pareto, [row("lru", 0.3, 1.2)]).axes[0]
    fig7 = drawn(plots.series, [row("lru", 0.3, 1.2, case="net, batch 30")], plots.SERIES["fig7"]).axes[0]
    assert markers(several)[30, 1.2] == markers(alone)[30, 1.2] == markers(fig7)[30, 30]


def test_budgets_of_a_method_are_joined(drawn):
    rows = [row("joint", saved, eor, budget=str(saved)) for saved, eor in ((0.5, 1.3), (0.2, 1.0), (0.4, 1.2))]
    peers = [row(f"peer:memory_budget={share}", 1 - share, 2 - share) for share in (0.25, 0.75)]
    (axes,) = drawn(plots.pareto, [*rows, *peers]).axes
    lines = [points(line) for line in axes.lines if line.get_marker() == "None" and line.get_drawstyle() == "default"]
    assert lines == [[(20, 1), (40, 1.2), (50, 1.3)], [(25, 1.25), (75, 1.75)]]


def test_methods_are_named_for_people(drawn):
    labels = ["none", "vdnn:which=all", "joint:early_update=true", "peer:memory_budget=0.5", "optimum:limit_s=20"]
    figure = drawn(plots.pareto, [row(label) for label in labels])
    names = [
        "vanilla",
        "optimum",
        "joint, early updates",
        "vdnn, all layers",
        "memory_budget (PyTorch)",
        "Pareto front",
    ]
    assert legend(figure) == names


@pytest.mark.parametrize(("largest", "scale"), [(3.9, "linear"), (900.0, "log")])
def test_times_far_apart_are_on_a_logarithmic_scale(largest, scale, drawn):
    figure = drawn(plots.pareto, [NONE, row("lru", 0.2, largest), row("joint", case="other")])
    figure.draw_without_rendering()
    assert {axes.get_yscale() for axes in figure.axes} == {scale}
    texts = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert 3 <= len(texts) <= 10 and all(float(text) > 0 for text in texts)


# ---- memory ----


def test_memory_has_vanilla_filled_and_the_budget_dashed(drawn):
    from matplotlib.collections import PolyCollection

    rows = [NONE | {"timeline": TIMELINE}, row(budget="60%", timeline=SAVING), row("vdnn"), row("lru", timeline=None)]
    figure = drawn(plots.memory, rows)
    (axes,) = figure.axes
    (area,) = [each for each in axes.collections if isinstance(each, PolyCollection)]
    assert area.get_datalim(axes.transData).bounds == pytest.approx((0, 0, 40, 100))
    curve, budget = axes.lines
    assert points(curve) == [(0, 20), (12, 60), (44, 60)] and curve.get_drawstyle() == "steps-post"
    assert set(budget.get_ydata()) == {60} and budget.get_linestyle() == "--"
    assert legend(figure) == ["vanilla", "joint", "budget"] and axes.get_title() == "ResNet-50 at 60%"
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("time in the iteration, ms", "device memory, MB")
    assert axes.get_ylim()[0] == axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > 44


def test_of_several_budgets_the_smallest_is_shown_that_most_methods_have(drawn):
    rows = [NONE | {"timeline": TIMELINE}, row("vdnn", timeline=SAVING), row("lru", timeline=SAVING, case="b")]
    rows += [
        row(label, budget=budget, timeline=SAVING) for label in ("joint", "lru") for budget in ("50%", "5%", "80%")
    ]
    figure = drawn(plots.memory, [*rows, row("tensile", budget="2%", timeline=SAVING)])
    assert [axes.get_title() for axes in figure.axes] == ["ResNet-50 at 5%", "b"]
    assert [len(axes.collections) for axes in figure.axes] == [1, 0]
    dashed = [points(line)[0][1] for line in figure.axes[0].lines if line.get_color() == style.BLACK]
    assert set(dashed) == {5} and len(figure.axes[0].lines) == 5
    assert legend(figure) == ["vanilla", "joint", "vdnn", "lru", "budget"]


def test_of_slow_iterations_the_beginning_is_shown(drawn):
    slow = {"ms": [0.0, 81.0], "bytes": [1, 1]}
    figure = drawn(plots.memory, [NONE | {"timeline": TIMELINE}, row(timeline=slow), row("lru", timeline=SAVING)])
    assert figure.get_supxlabel() == "time in the iteration, ms, up to 2 times vanilla's"
    assert 80 <= figure.axes[0].get_xlim()[1] < 84


# ---- series ----


def test_figure_6_is_against_the_number_of_workloads(drawn):
    rows = [
        row(label, saved / 100, eor, case=f"{count} × {network}", budget="57%")
        for network in ("ResNet-50", "VGG-16")
        for count, saved, eor in ((2, 45, 1.2), (1, 43, 1.1), (4, 40, 1.4))
        for label in ("joint", "none")
    ]
    figure = drawn(plots.series, [*rows, row(case="mixed")], plots.SERIES["fig6"])
    assert [axes.get_title() for axes in figure.axes] == ["ResNet-50", "VGG-16", "", ""]
    saved, eor = (43.0, 45.0, 40.0), (1.1, 1.2, 1.4)
    for axes, expected in zip(figure.axes, (saved, saved, eor, eor), strict=True):
        assert points(axes.lines[1]) == list(zip([1, 2, 4], map(pytest.approx, expected), strict=True))
        assert axes.get_xticks().tolist() == [1, 2, 4]
    assert legend(figure) == ["joint", "vanilla"]


def test_figure_7_is_against_the_batch_size(drawn):
    rows = [row("tensile", 0.1 * batch, 1.0 + batch, case=f"A, batch 2, batch {batch}") for batch in (4, 8, 2)]
    figure = drawn(plots.series, [*rows, row("lru", 0.1, 1.0, case="A, batch 2, batch 16")], plots.SERIES["fig7"])
    saved, eor = figure.axes
    assert saved.get_title() == "A, batch 2" and saved.get_xscale() == eor.get_xscale() == "log"
    assert points(eor.lines[1]) == [(2, 3), (4, 5), (8, 9)] and eor.get_yscale() == "log"
    assert eor.get_xticks().tolist() == [2, 4, 8, 16]


def test_each_budget_has_a_line_of_its_own_in_a_series(drawn):
    rows = [
        row(msr=share, eor=5.0, case=f"{count} × A", budget=str(share)) for share in (0.25, 0.5) for count in (1, 2)
    ]
    saved, eor = drawn(plots.series, rows, plots.SERIES["fig6"]).axes
    lines = [points(line) for line in saved.lines if line.get_marker() == "None"][1:]
    assert lines == [[(1, 25), (2, 25)], [(1, 50), (2, 50)]]
    assert eor.get_yscale() == "log"  # vanilla is at 1


def test_long_titles_are_cut_and_control_characters_are_spaces():
    assert style.fitted("ResNet-50", 20) == "ResNet-50" and style.fitted("$x_1$\n\x00", 20) == "$x_1$"
    first, second = style.fitted("word " * 50, 20).split("\n")
    assert len(first) <= 20 and len(second) <= 20 and second.endswith("…")


# ---- files ----


def everything() -> list[dict[str, Any]]:
    rows = [NONE | {"timeline": TIMELINE}, row(budget="60%", timeline=SAVING), row("vdnn", 0.2, 2.0)]
    rows += [row(msr=0.1 * count, experiment="fig6", case=f"{count} × $net$ a/b") for count in (1, 2)]
    rows += [row(experiment="fig7", case=f"{title}, batch 4") for title in HOSTILE[:4]]
    return json.loads(json.dumps([*rows, row(experiment="../own/$1", case=HOSTILE[1])]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The figures of everything, in a folder that was not there."""
    return plots.draw(everything(), tmp_path_factory.mktemp("plots") / "new" / "folder")


def test_all_figures_are_written(written):
    names = ["pareto-table3", "memory-table3", "fig6", "fig7", "pareto-..-own-1"]
    assert [path.name for path in written] == [f"{name}.svg" for name in names]
    assert set(written) == set(written[0].parent.iterdir())
    for path in written:
        assert ElementTree.parse(path).getroot().attrib["width"] == "648pt"
        assert "<dc:date>" not in path.read_text()


@pytest.mark.long
def test_the_same_rows_are_the_same_bytes_whatever_the_settings_outside(written, tmp_path):
    """All figures are drawn again."""
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "lines.color": "red", "text.usetex": True}):
        before = dict(matplotlib.rcParams)
        again = plots.draw(everything(), tmp_path / "again")
        assert dict(matplotlib.rcParams) == before
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


def test_an_importing_program_keeps_its_matplotlib():
    """Neither torch nor matplotlib comes with the module; drawing imports no pyplot, chooses no backend."""
    program = """
import sys, tempfile
from benchmarks.figures import plots, style
assert not {"torch", "matplotlib"} & set(sys.modules)
with tempfile.TemporaryDirectory() as folder:
    assert plots.draw([{"policy": "joint", "msr": 0.1, "eor": 1.1}], folder)
import matplotlib
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
assert matplotlib.get_backend(auto_select=False) is None
"""
    root = Path(plots.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for attempt in (plots.check, lambda folder: plots.draw([row()], folder)):
        with pytest.raises(OptionError, match="cannot write figures") as refused:
            attempt(tmp_path / "file")
        assert refused.value.hint
    with pytest.raises(OptionError, match="cannot write figures"):
        plots.check("/proc")
    plots.check(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "pareto-table3.svg").mkdir()
    with pytest.raises(OptionError, match="directory"):
        plots.draw([row()], tmp_path)


def test_without_matplotlib_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for attempt in (plots.check, lambda folder: plots.draw([row()], folder)):
        with pytest.raises(OptionError, match="matplotlib") as refused:
            attempt(tmp_path)
        assert "pip install" in str(refused.value.hint)
