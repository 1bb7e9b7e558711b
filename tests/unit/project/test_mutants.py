"""The table of mutants fits the sources and the tests. `make mutants` tries them; this is what can be seen without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS
from tests.repository import REPOSITORY


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_one_place_and_has_tests_that_are_not_long(mutant: Mutant) -> None:
    text = mutant.mutated()
    assert text != (REPOSITORY / mutant.file).read_text()
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")
    assert mutant.selected()


def test_names_are_unique_and_the_document_has_their_number() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert f"{len(MUTANTS)} mutants of the rest" in (REPOSITORY / "docs" / "verification.md").read_text()


@pytest.mark.parametrize("text", ["there is no such line", "\n"])
def test_a_text_that_is_not_there_once_is_noticed(text: str) -> None:
    mutant = Mutant("name", "tests/repository.py", text, "", "tests/unit/project/test_mutants.py")
    with pytest.raises(LookupError, match="times, not once"):
        mutant.mutated()


def test_long_tests_are_left_out(tmp_path: Path) -> None:
    long = "@pytest.mark.long\ndef test_slow(): ..."
    (tmp_path / "test_it.py").write_text(f"import pytest\n{long}\ndef test_quick(): ...\ndef helper(): ...\n")
    assert Mutant("name", "", "", "", "test_it.py").selected(tmp_path) == ["test_it.py::test_quick"]
    assert Mutant("name", "", "", "", "test_it.py", "slow").selected(tmp_path) == []
