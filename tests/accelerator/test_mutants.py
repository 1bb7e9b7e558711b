"""Each wait, record and hold of the runtime removed or misplaced in turn.

Something has to report each mutant: the race detector, wrong bits, an error, a dead lock, or what is left behind. The
table says of the others why nothing can, and which places have no mutant.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.accelerator.mutants.mutant import Mutant, Place, ordering_places
from tests.accelerator.mutants.table import ACCELERATOR, EXCEPTIONS, FILES, MUTANTS
from tests.repository import REPOSITORY

Ask = Callable[[dict[str, str]], str | None]
DOCUMENT = REPOSITORY / "docs" / "verification.md"


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run the scenarios with other sources of some modules; returns what was reported, None for nothing."""
    command = [sys.executable, "-m", "tests.accelerator.mutants.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as server:
        requests, answers = server.stdin, server.stdout
        assert requests is not None and answers is not None

        def answer(sources: dict[str, str]) -> str | None:
            print(json.dumps(sources), file=requests, flush=True)
            return json.loads(answers.readline())

        unmutated = answer({})
        assert unmutated is None, f"without a mutation: {unmutated}"
        yield answer
        requests.close()


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_reported_unless_the_table_says_why_not(ask, mutant):
    report = ask(mutant.sources())
    assert (report is None) == bool(mutant.survives), report or "nothing reports it"


def test_every_place_that_orders_work_has_a_mutant_or_a_reason():
    there = set[Place]().union(*map(ordering_places, FILES))
    changed = {place for mutant in MUTANTS for place in mutant.places}
    assert there - changed - EXCEPTIONS.keys() == set(), "neither in the table of mutants nor in that of exceptions"
    assert EXCEPTIONS.keys() <= there, "exceptions for lines that are not there"
    assert not EXCEPTIONS.keys() & changed, "exceptions that have a mutant"


def test_the_table_names_lines_that_are_there():
    for mutant in MUTANTS:
        for name, source in mutant.sources().items():
            compile(source, name, "exec")
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "function, line, why",
    [
        ("AcceleratorDevice.wait", "self._compute.wait_event(transfer.begun)", "there 0 times"),
        ("AcceleratorDevice.waits", "self._compute.wait_event(transfer.ended)", "a function that is not there"),
        ("AcceleratorDevice._give", "with lane:\n", "there 0 times"),
    ],
)
def test_a_line_that_is_gone_is_noticed(function, line, why):
    with pytest.raises(LookupError, match=why):
        Mutant(ACCELERATOR, function, {line: "pass"}).sources()


def test_a_new_wait_is_noticed(tmp_path, monkeypatch):
    """A wait, a record and a hold more than the runtime has are places, strings that are joined are none."""
    monkeypatch.setattr("tests.accelerator.mutants.mutant.EXECUTION", tmp_path)
    file = tmp_path / "new.py"
    file.write_text(
        "class Lane:\n    def follow(self, other):\n        self.stream.wait_event(other.record_event())  # why\n"
        "        held.append(', '.join('ab'))\n        self.count += len('')\n"
    )
    assert ordering_places(file) == {
        Place("new.py", "Lane.follow", "self.stream.wait_event(other.record_event())"),
        Place("new.py", "Lane.follow", "held.append(', '.join('ab'))"),
    }


def test_the_document_tells_of_the_mutants():
    """Their numbers, and each survivor with its reason."""
    text = re.sub(r"\s+", " ", DOCUMENT.read_text())
    survivors = [mutant for mutant in MUTANTS if mutant.survives]
    assert f"{len(MUTANTS)} mutants" in text and f"{len(MUTANTS) - len(survivors)} are reported" in text
    section = text.split("## Mutants")[1].split(" ## ")[0]
    rows = re.findall(r"\| `([^|]+)` \| ([^|]+) \|", section)
    assert sorted(rows) == sorted((mutant.told, mutant.survives) for mutant in survivors)
