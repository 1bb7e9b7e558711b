"""The page in a real Chromium: it draws without complaint and without the network, in every width and colour, shows its
facts, sorts, and lets a finger scroll."""

from __future__ import annotations

import json

import pytest

from pg_tensile.tools.report.page import render
from tests.unit.records import HOSTILE, NEVER_CAPTURED, facts_in, line, planned_of, record, relabelled, saving

DRAWN = "document.documentElement.dataset.charts"
CHARTS = {f"chart-{name}" for name in ("footprint", "lanes", "scatter", "errors", "loss", "accuracy", "plans")}
# For each chart: the size of its largest canvas, and how many different colours it has, looked at through all shadows
CANVASES = """(() => {
  const canvases = (node) => [...node.querySelectorAll("*")].flatMap((each) =>
    (each.tagName === "CANVAS" ? [each] : []).concat(each.shadowRoot ? canvases(each.shadowRoot) : []));
  return Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => {
    const found = canvases(chart).filter((each) => each.width && each.height);
    const colours = new Set();
    for (const each of found) {
      for (const pixel of new Uint32Array(
        each.getContext("2d").getImageData(0, 0, each.width, each.height).data.buffer)) {
        colours.add(pixel);
      }
    }
    const box = chart.getBoundingClientRect();
    const green = colours.has(0xff739e00);
    return [chart.id, {colours: colours.size, green, left: box.left, right: box.right, height: box.height}];
  }));
})()"""
FACTS = """[...document.querySelectorAll("[data-fact]")].map((each) => [each.dataset.fact, each.dataset.value])"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """A job with everything: a plan that swaps, metrics, latencies, a log and an error."""
    held = saving(policy="swap_all", share=1.0)
    log = [line(held.numbers | {"generation": number}, seconds=10.0 * number) for number in (1, 2, 3)]
    made = record(held, log=log, memory_budget=held.numbers["granted_bytes"] + (1 << 20), error="it broke")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(made), "utf-8")
    return path


def opened(browser, path, width=1280, scheme="light"):
    page = browser.page(width, 900, scheme)
    page.open(path, DRAWN)
    return page


@pytest.fixture(scope="module")
def pages(browser, page_file):
    return {"wide": opened(browser, page_file), "narrow": opened(browser, page_file, 390, "dark")}


@pytest.fixture
def wide(pages):
    """The page on a screen, for tests that leave it as it was."""
    pages["wide"].call("Page.bringToFront")
    return pages["wide"]


@pytest.fixture
def narrow(pages):
    """The page on a phone, in dark colours."""
    pages["narrow"].call("Page.bringToFront")
    return pages["narrow"]


def check_quiet(page, path):
    """Nothing was complained about, and nothing but the file itself was asked for."""
    assert page.complaints == []
    assert {url for url in page.requests if not url.startswith("data:")} <= {path.resolve().as_uri()}


@pytest.mark.parametrize(("name", "width"), [("wide", 1280), ("narrow", 390)])
def test_all_charts_are_drawn_and_fit(request, page_file, tmp_path, name, width):
    page = request.getfixturevalue(name)
    assert page.evaluate(DRAWN) == "drawn"
    charts = page.evaluate(CANVASES)
    assert charts.keys() == CHARTS
    for name, chart in charts.items():
        assert chart["colours"] > 8, f"{name} is empty: {chart}"
        assert 0 <= chart["left"] < chart["right"] <= width and chart["height"] > 150, (name, chart)
    assert charts["chart-lanes"]["green"], "no transfer is drawn"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    check_quiet(page, page_file)


def test_the_charts_follow_the_colours_that_the_user_prefers(wide, page_file):
    painted = """(() => {
      const axis = [...Bokeh.documents[0].all_models].find((each) => "axis_label_text_color" in each);
      const style = getComputedStyle(document.documentElement);
      const page = getComputedStyle(document.body).backgroundColor;
      return [axis.axis_label_text_color, style.getPropertyValue("--text").trim(), page];
    })()"""
    page = wide
    light = page.evaluate(painted)
    page.prefer("dark")
    page.wait("getComputedStyle(document.documentElement).getPropertyValue('--page').trim() === '#14171a'")
    page.wait(f"{painted}[0] !== {json.dumps(light[0])}")
    dark = page.evaluate(painted)
    assert light[0] == light[1] and dark[0] == dark[1]
    assert light[2] == "rgb(255, 255, 255)" and dark[2] == "rgb(20, 23, 26)"
    page.prefer("light")
    page.wait(f"{painted}[0] === {json.dumps(light[0])}")
    check_quiet(page, page_file)


def test_the_page_shows_its_facts(wide, page_file):
    page = wide
    facts = facts_in(page_file.read_text("utf-8"))
    shown = dict(page.evaluate(FACTS))
    assert len(shown) > 10
    for path, value in shown.items():
        section, name = path.split(".")
        expected = facts[section][name]
        assert (value if isinstance(expected, str) else json.loads(value)) == expected, path
    assert page.evaluate("document.title") == "Job 7: late"
    assert page.evaluate("JSON.parse(document.getElementById('facts').textContent).summary") == facts["summary"]


def test_zooming_one_chart_of_the_iteration_zooms_the_other(wide, page_file):
    page = wide
    figures = "Bokeh.documents[0].roots()"
    page.evaluate(f"void {figures}[0].x_range.setv({{start: 0.1, end: 0.2}})")
    assert (
        page.evaluate(f"{figures}.slice(0, 2).map((each) => [each.x_range.start, each.x_range.end])")
        == [[0.1, 0.2]] * 2
    )
    check_quiet(page, page_file)


def test_tables_sort_by_the_column_that_is_clicked(wide):
    page = wide
    column = """[...document.querySelectorAll("#tensors tbody tr")].map((row) => row.cells[{}].{})"""
    click = """document.querySelectorAll("#tensors thead button")[{}].click()"""
    sizes, names = column.format(5, "dataset.value"), column.format(2, "textContent")
    page.evaluate(click.format(5))
    falling = [int(value) for value in page.evaluate(sizes)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 1
    page.evaluate(click.format(5))
    assert [int(value) for value in page.evaluate(sizes)] == falling[::-1] == sorted(falling)
    page.evaluate(click.format(2))
    kinds = page.evaluate(names)
    assert kinds == sorted(kinds) and len(set(kinds)) > 1
    marks = "[...document.querySelectorAll('#tensors th')].map((head) => head.getAttribute('aria-sort'))"
    assert [mark for mark in page.evaluate(marks) if mark] == ["ascending"]


def test_a_finger_scrolls_over_charts(narrow, wide):
    """Tools that want to be dragged would keep the page where it is."""
    assert narrow.evaluate("matchMedia('(pointer: coarse)').matches")
    dragged = """[...Bokeh.documents[0].all_models].filter((each) =>
      Array.isArray(each.event_types) && each.event_types.includes("pan")).map((each) => each.active)"""
    assert set(narrow.evaluate(dragged)) == {False}
    assert True in wide.evaluate(dragged)


def test_hostile_text_is_only_shown_in_tooltips_too(browser, tmp_path):
    held = planned_of(relabelled(saving(4, 0.8).trace, HOSTILE))
    texts = dict.fromkeys(("model", "owner", "query", "target", "error", "traceback"), HOSTILE)
    path = tmp_path / "report.html"
    path.write_text(render(record(held, log=[line(held.numbers, reason=HOSTILE)], **texts)), "utf-8")
    page = opened(browser, path)
    assert page.evaluate("document.getElementById('evil')") is None
    assert page.evaluate("JSON.parse(document.getElementById('facts').textContent).job.target").startswith("</script>")
    chart = "document.getElementById('chart-footprint')"
    page.evaluate(f"{chart}.scrollIntoView()")
    box = page.evaluate(f"{chart}.getBoundingClientRect().toJSON()")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2, y=box["y"] + 150)
    text = """(() => {
      const shadows = (node) => [...node.querySelectorAll("*")].flatMap((each) =>
        each.shadowRoot ? [each.shadowRoot, ...shadows(each.shadowRoot)] : []);
      return shadows(document).map((each) => each.textContent).join(" ");
    })()"""
    page.wait(f"{text}.includes('begins at')")
    assert "<b id=evil onclick" in page.evaluate(text)
    assert page.evaluate("document.getElementById('evil')") is None
    check_quiet(page, path)


def test_a_job_without_a_plan_is_shown_without_complaint(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render(record(**NEVER_CAPTURED, state="queued", ended_at=None, metrics=[])), "utf-8")
    page = opened(browser, path)
    assert page.evaluate(DRAWN) == "none"
    assert "has not captured its iteration yet" in page.evaluate("document.querySelector('main').innerText")
    check_quiet(page, path)


@pytest.mark.long
def test_a_page_about_many_operators_is_drawn(browser, tmp_path):
    held = saving(layers=3_715, share=1.0, policy="swap_all")
    path = tmp_path / "report.html"
    path.write_text(render(record(held)), "utf-8")
    page = opened(browser, path)
    assert int(page.evaluate("document.documentElement.dataset.milliseconds")) > 0
    check_quiet(page, path)
