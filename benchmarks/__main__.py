"""Benchmarks for us and for papers, in sections.

    python -m benchmarks plans|server|answers [--section NAME …] [--only WORD] [--quick] [--resume] …
    python -m benchmarks tables [--section NAME …]

`plans` trains and simulates without PostgreSQL; `server` measures private servers with the installed extension;
`answers` compares the models of train_model with others. Each section writes its rows to benchmarks/results/NAME.json,
with the device in the name where that is not its usual one, and its tables to docs/results/NAME.md. What a section
measures takes the place of what is there, scenario by scenario. `tables` writes all pages again, and the ages of all
results in docs/benchmarks.md; it measures nothing. The exit status is 1 if a section fails or a check does not hold.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from math import inf
from pathlib import Path

from benchmarks.checks import print_checks
from benchmarks.documents import all_checks, missing, page_part, write_documents, write_page
from benchmarks.results import FOLDER, QUICK_FOLDER, Results, kind_of
from benchmarks.runner import Options, Run, Section, say
from benchmarks.sections import COMMANDS, SECTIONS, load


def parse(arguments: list[str]) -> tuple[str, list[str], Options]:
    """Return the command, the names of the sections, and the options; with --list, print the sections and exit."""
    words = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="benchmarks", description=words[0], epilog=words[2], allow_abbrev=False)
    parser.add_argument("command", choices=[*COMMANDS, "tables"])
    parser.add_argument("--section", nargs="+", default=[], metavar="NAME", help="only these sections")
    parser.add_argument("--list", action="store_true", help="print the sections")
    parser.add_argument("--only", default="", metavar="WORD", help="only scenarios with this word in their names")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it; writes to build/benchmarks/")
    parser.add_argument("--resume", action="store_true", help="not what this revision has measured on this machine")
    parser.add_argument("--keep", action="store_true", help="not what any revision has measured")
    parser.add_argument("--minutes", type=float, default=inf, metavar="M", help="begin no scenario later than that")
    device = "host, cuda, cuda:N, emulated or sim:PROFILE, in place of each section's own"
    parser.add_argument("--device", metavar="D", help=device)
    parser.add_argument("--seeds", type=int, metavar="N", help="orders of the rows of a table (answers)")
    parser.add_argument("--beside", metavar="REVISION", help="another revision in the same rounds (serving)")
    parser.add_argument("--jobs", type=int, metavar="N", help="short jobs (soak)")
    parser.add_argument("--phase-minutes", type=float, metavar="M", help="of each other phase (soak)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also write each row to a file at once, as JSON")
    asked = vars(parser.parse_args(arguments))
    command, names, listed = asked.pop("command"), asked.pop("section"), asked.pop("list")
    there = COMMANDS.get(command, tuple(SECTIONS))
    if unknown := [name for name in names if name not in there]:
        parser.error(f"no such section of {command}: {', '.join(unknown)} (--list names them)")
    if listed:
        print("\n".join(f"{name:14} {load(name).title}" for name in there))
        sys.exit()
    return command, names or list(there), Options(**asked)


def run_section(name: str, section: Section, options: Options) -> bool:
    """Measure a section, write its results and its page, and return whether all that it promises holds."""
    device = options.device or section.device
    named = name if kind_of(device) == kind_of(section.device) else f"{name}-{kind_of(device)}"
    results = Results((QUICK_FOLDER if options.quick else FOLDER) / f"{named}.json")
    say(f"{named}: {section.title}")
    run, failed = Run(results, device, options), False
    try:
        for row in section.rows(run):
            run.add(row)
    except Exception:  # what the scenarios before it have measured is kept, and the next section is measured
        traceback.print_exc()
        failed = True
    if not results.runs:
        return not failed
    part, checks = page_part(section, results), all_checks(section, results)
    if options.quick:
        results.path.with_suffix(".md").write_text(part)
    else:
        write_page(named, section, results)
    print(part)
    if checks:
        print_checks(checks, missing(section, results))
    return not failed and all(check.holds for check in checks)


def main(arguments: list[str]) -> int:
    command, names, options = parse(arguments)
    if command == "tables":
        write_documents(names)
        return 0
    held = [run_section(name, load(name), options) for name in names]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
