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
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from scripts.sqlstates import ERRORS, condition
from tests.documents import DOCUMENTS, REPOSITORY, anchors, blocks, links, statements, tokens
from tests.examples import examples
from tests.unit.graphs import chain, traces
from tests.unit.handmade import network

OPERATIONS = REPOSITORY / "docs" / "operations.md"
C_SOURCES = sorted(REPOSITORY.glob("pg_tensile/csrc/**/*.c"))
SQL_SOURCES = sorted(REPOSITORY.glob("sql/**/*.sql"))
WORKER_SOURCES = sorted(REPOSITORY.glob("pyworker/**/*.py"))
LIBRARY_SOURCES = sorted(REPOSITORY.glob("pg_tensile/**/*.py"))
# Parts of messages of PostgreSQL, PyTorch and Python
BY_OTHERS = {
    *("permission denied for function", "permission denied for function train_model", "for schema tensile"),
    *("can't allocate memory", "MemoryError", "is being accessed by other users"),
}
ENDINGS = "py|c|h|sql|md|sh|cpp|json|toml|css|j2|html"
# Names of files of the user, of columns of tables, and of other libraries
ELSEWHERE = {
    *("file.py", "config.json", "tokenizer.json", "report.html", "trace.json", "training.split", "cuda._use_uvm"),
    *("pg_tensile/planning/policies/longest.py", "tests/unit/planning/policies/test_longest.py"),
}
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


def said() -> str:
    """Return the sources of the version in development, with adjacent literals as one and without escapes."""
    paths = [*C_SOURCES, *SQL_SOURCES, *WORKER_SOURCES, *LIBRARY_SOURCES]
    sources = [path.read_text() for path in paths if not path.name.startswith("pg_tensile--")]
    joined = re.sub(r"""(?<!\\)(["'])\n\s*f?\1""", "", "\n".join(sources))
    return joined.replace("''", "'").replace('\\"', '"').replace("\\'", "'")


def missing_parts(message: str, sources: str) -> list[str]:
    """Return the parts of a message, with … for what varies, that are in no source."""
    parts = (part.strip() for part in re.split("…|%s|%d", message))
    return [part for part in parts if part and part not in sources and part not in BY_OTHERS]


def test_messages_in_operations_are_those_of_the_sources() -> None:
    """Check the messages in the first column of the tables, of which a row may have several."""
    sources = said()
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, | with |$)?)+[^|]*) \|", OPERATIONS.read_text(), re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 100
    assert {message: parts for message in messages if (parts := missing_parts(message, sources))} == {}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_messages_that_psql_shows_are_those_of_the_sources(document: Path) -> None:
    """Check the first part of each, up to the first quoted name or number."""
    sources = said()
    for message in re.findall(r"^(?:ERROR|WARNING|NOTICE|HINT|DETAIL): +(.+)$", document.read_text(), re.MULTILINE):
        first = re.split(r'"|\d', message)[0].strip()
        assert first in sources or first in BY_OTHERS, f"{document.name}: {message}"


# ---- names ----------------------------------------------------------------------------------------------------------


def definitions() -> dict[str, str]:
    """Map the name of a module, or of the folder of a package, to the sources of it."""
    sources: dict[str, str] = {}
    for folder in ("pg_tensile", "pyworker", "benchmarks", "scripts"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for name in (path.stem, path.parent.name):
                sources[name] = sources.get(name, "") + path.read_text()
    return sources


def test_paths_that_documents_name_exist() -> None:
    """Files may be named by the end of their path."""
    tracked = [path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.rglob("*.*") if ".venv" not in path.parts]
    paths = {"/" + path for path in tracked}
    for document in DOCUMENTS:
        for named in re.findall(rf"(?<![\w/.-])[\w./-]+\.(?:{ENDINGS})\b", " ".join(code_of(document))):
            known = named in ELSEWHERE or any(path.endswith("/" + named.lstrip("./")) for path in paths)
            assert known, f"{document.name}: there is no {named}"


def test_names_in_modules_that_documents_name_exist() -> None:
    """`module.name` in a document is a name that a module of that name defines or imports."""
    sources = definitions()
    # Names in the catalogue, and settings, look the same
    tables = set(re.findall(r"CREATE (?:TABLE|VIEW) tensile(?:_internal)?\.(\w+)", said()))
    for document in DOCUMENTS:
        for code in code_of(document):
            for module, name in re.findall(r"(?<![\w.])(?:\w+\.)*?(\w+)\.(\w+)(?![\w.])", code):
                if module in tables | {"pg_tensile", "tensile"} or module not in sources:
                    continue
                if f"{module}.{name}" in ELSEWHERE or name in [*ENDINGS.split("|"), *sources]:
                    continue
                defined = rf"\b(?:def|class) {name}\b|^ *{name}\b *[:=]|import .*\b{name}\b|^    {name},$"
                assert re.search(defined, sources[module], re.MULTILINE), f"{document.name}: {module}.py has no {name}"


def code_of(document: Path) -> list[str]:
    """Return what stands between backticks in the text; what changed in the past need not exist."""
    if document.name == "CHANGELOG.md":
        return []
    children = (child for token in tokens(document) for child in token.children or ())
    return [child.content for child in children if child.type == "code_inline" and "SELECT" not in child.content]


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
