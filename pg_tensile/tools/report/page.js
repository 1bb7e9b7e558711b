"use strict";

// The report's page: tables that sort, charts in the page's colours, and a mark when all is drawn.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Properties of what the charts consist of, whatever it is, and the variable of page.css each follows
  const COLOURS = {
    axis_label_text_color: "--text",
    major_label_text_color: "--text",
    axis_line_color: "--rule",
    major_tick_line_color: "--rule",
    grid_line_color: "--grid",
  };

  const documents = () => (window.Bokeh ? window.Bokeh.documents : []);
  const models = () => documents().flatMap((each) => [...each.all_models]);

  function paint() {
    const style = getComputedStyle(root);
    for (const model of models()) {
      for (const [property, variable] of Object.entries(COLOURS)) {
        if (property in model && model[property] !== null) {
          model[property] = style.getPropertyValue(variable).trim();
        }
      }
    }
  }

  // A finger that moves up a chart scrolls the page: tools that want to be dragged begin switched off
  function freeTouch() {
    for (const model of models()) {
      if (Array.isArray(model.event_types) && model.event_types.includes("pan")) {
        model.active = false;
      }
    }
  }

  function inScheme(scheme) {
    root.dataset.scheme = scheme;
    paint();
  }

  function begin() {
    if (!document.querySelector(".chart")) {
      finish("none");
    } else if (documents().length === 0) {
      setTimeout(begin, 10);
    } else {
      paint();
      dark.addEventListener("change", paint);
      addEventListener("beforeprint", () => inScheme("light"));
      addEventListener("afterprint", () => inScheme(""));
      settle();
    }
  }

  function settle() {
    if (documents().every((each) => each.is_idle)) {
      if (matchMedia("(pointer: coarse)").matches) {
        freeTouch();
      }
      finish("drawn");
    } else {
      setTimeout(settle, 20);
    }
  }

  function finish(charts) {
    root.dataset.milliseconds = Math.round(performance.now());
    root.dataset.charts = charts;
  }

  function valueOf(row, column) {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) {
      return cell.textContent;
    }
    return cell.dataset.value === "" ? -Infinity : Number(cell.dataset.value);
  }

  function compare(one, other) {
    return typeof one === "string" ? one.localeCompare(other) : one === other ? 0 : one < other ? -1 : 1;
  }

  function sort(table, head) {
    const column = head.cellIndex;
    const before = head.getAttribute("aria-sort");
    const falls = before ? before === "ascending" : head.classList.contains("number");
    for (const other of head.parentElement.cells) {
      other.removeAttribute("aria-sort");
    }
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
    rows.sort(([one], [other]) => (falls ? compare(other, one) : compare(one, other)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("th");
      if (head) {
        sort(table, head);
      }
    });
  }
  begin();
})();
