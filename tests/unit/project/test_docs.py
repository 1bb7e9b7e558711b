"""Documents are correct: links resolve, errors exist, and the example of a policy works."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from pg_tensile.errors import BudgetError
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies.building_blocks.keep import least_bytes
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from scripts.sqlstates import ERRORS, condition
from tests.documents import DOCUMENTS, REPOSITORY, anchors, blocks, links, statements
from tests.examples import examples
from tests.unit.graphs import chain, traces
from tests.unit.handmade import network

OPERATIONS = REPOSITORY / "docs" / "operations.md"
C_SOURCES = sorted(REPOSITORY.glob("pg_tensile/csrc/*.c"))
SQL_SOURCES = sorted(REPOSITORY.glob("sql/**/*.sql"))
WORKER_SOURCES = sorted(REPOSITORY.glob("pyworker/**/*.py"))
LIBRARY_SOURCES = sorted(REPOSITORY.glob("pg_tensile/**/*.py"))
NEVER_SEEN = {"39P01"}  # raised by a private trigger function that cannot be called
# SQLSTATEs that are written down as such: five digits or capitals, a digit among them; '' is a quote in a text
CODE = re.compile(r"""(?<!')["']((?=[A-Z]*[0-9])[0-9A-Z]{5})["']""")


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if re.match(r"https?:", link):
            continue
        page, _, anchor = link.partition("#")
        target = (document.parent / page).resolve() if page else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


def test_there_are_documents_and_links() -> None:
    """Check that the test above sees links."""
    for name in ("README.md", "docs/tutorial.md", "docs/architecture.md", "docs/operations.md", "docs/policies.md"):
        path = REPOSITORY / name
        assert path in DOCUMENTS and links(path), name


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("# A `b.c` (d, e)\n\n## Same\n\n## Same\n\n```\n# not one\n```\n")
    assert anchors(document) == {"a-bc-d-e", "same", "same-1"}


def test_statements_are_split_as_psql_does() -> None:
    sql = "SELECT ';', \"a;b\" -- it's; no statement\n; CALL f($$ ; '$$, $x$ $$;$x$); SELECT 1 - 1"
    assert list(statements(sql)) == ["SELECT ';', \"a;b\"", "CALL f($$ ; '$$, $x$ $$;$x$)", "SELECT 1 - 1"]


# ---- errors ---------------------------------------------------------------------------------------------------------


def sqlstates() -> set[str]:
    """Return all SQLSTATEs in the sources, given as codes or as names in C and PL/pgSQL."""
    command = [os.environ.get("PG_CONFIG", "pg_config"), "--includedir-server"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    macro = r"^#define (ERRCODE_\w+) MAKE_SQLSTATE\('(.)','(.)','(.)','(.)','(.)'\)"
    defined = re.findall(macro, (Path(folder) / "utils" / "errcodes.h").read_text(), re.MULTILINE)
    codes = {name: "".join(digits) for name, *digits in defined}
    names = {name for path in C_SOURCES for name in re.findall(r"ERRCODE_\w+", path.read_text())} - {
        "ERRCODE_TO_CATEGORY"
    }
    for path in SQL_SOURCES:
        names |= {f"ERRCODE_{name.upper()}" for name in re.findall(r"ERRCODE = '(\w+)'", path.read_text())}
    return {codes[name] for name in names} | {
        code for path in [*SQL_SOURCES, *WORKER_SOURCES] for code in CODE.findall(path.read_text())
    }


def test_the_reference_has_every_sqlstate_and_no_other() -> None:
    assert sqlstates() - NEVER_SEEN == set(ERRORS)


def test_sqlstates_have_names() -> None:
    assert condition("22023") == "invalid_parameter_value"
    assert condition("25006") == "read_only_sql_transaction"
    assert condition("XX000") == "internal_error"
    assert all(re.fullmatch("[a-z_]+", condition(code)) for code in ERRORS)


def test_messages_in_operations_are_those_of_the_sources() -> None:
    """Return the messages in the first column of the tables, with … for varying parts."""
    sources = [path.read_text() for path in (*C_SOURCES, *SQL_SOURCES, *WORKER_SOURCES, *LIBRARY_SOURCES)]
    joined = re.sub(r'(?<!\\)"\n\s*"', "", "\n".join(sources))  # adjacent literals are one
    said = joined.replace("''", "'").replace('\\"', '"').replace("\\'", "'")
    messages = re.findall(r"^\| `([^`]+)` \|", OPERATIONS.read_text(), re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        for part in filter(None, (part.strip() for part in message.split("…"))):
            assert part in said, f"{message}: {part!r} is in no source"


# ---- the policy -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Callable[..., Any]:
    """Return the function of the module in docs/policies.md."""
    (block,) = (block for block in blocks(REPOSITORY / "docs" / "policies.md", "python") if block.note == "the example")
    module: dict[str, Any] = {"__name__": "example"}
    exec(compile(block.text, "docs/policies.md", "exec"), module)
    plan: Callable[..., Any] = module["plan"]
    return plan


@pytest.mark.parametrize("trace", [chain(), network(6)], ids=["chain", "network"])
def test_the_example_of_a_policy_keeps_to_a_budget(example: Callable[..., Any], trace: Trace) -> None:
    vanilla = footprint(trace).device_peak_bytes
    budget = (vanilla + least_bytes(trace)) // 2
    plan = example({1: trace}, RTX_A6000, budget)[1]
    validate(trace, plan)
    assert {event.kind for event in plan.events} == {EventKind.SWAP_OUT, EventKind.SWAP_IN}
    assert footprint(trace, plan).device_peak_bytes <= budget < vanilla
    with_plan, without = (
        simulate([SimulatedJob(trace, plan)], RTX_A6000)[0],
        simulate([SimulatedJob(trace)], RTX_A6000)[0],
    )
    assert with_plan.iteration_us > without.iteration_us


def test_the_example_of_a_policy_shares_the_budget(example: Callable[..., Any]) -> None:
    jobs = {3: network(2), 1: network(5)}
    budget = sum(footprint(trace).device_peak_bytes for trace in jobs.values()) * 4 // 5
    plans = example(jobs, RTX_A6000, budget)
    assert sum(footprint(jobs[job], plan).device_peak_bytes for job, plan in plans.items()) <= budget
    assert example({}, RTX_A6000, None) == {}


@given(trace=traces(most_operators=20, most_tensors=20))
@examples(10)
def test_the_example_of_a_policy_holds_for_any_trace(example: Callable[..., Any], trace: Trace) -> None:
    least, vanilla = least_bytes(trace), footprint(trace).device_peak_bytes
    assert example({0: trace}, RTX_A6000, vanilla)[0] == NO_EVENTS
    tight = example({0: trace}, RTX_A6000, least)[0]
    validate(trace, tight)
    assert footprint(trace, tight).device_peak_bytes == least
    assert example({0: Trace.from_bytes(trace.to_bytes())}, RTX_A6000, least)[0] == tight
    if least > 0:
        with pytest.raises(BudgetError) as error:
            example({0: trace}, RTX_A6000, least - 1)
        assert error.value.smallest_bytes == least
        assert error.value.operator.startswith("operator ")
