"""Generator of an upgrade script from the full scripts of two versions and the statements written by hand.

    python3 scripts/upgrade_script.py OLD.sql NEW.sql BY_HAND.sql

prints it. The Makefile runs this with the system's Python, so nothing but the standard library is imported.

The two full scripts are split into statements and compared. Functions that are new or changed are created or replaced;
views that are changed, or whose functions or views change, are dropped and created again; functions and views that no
longer exist are dropped; policies and triggers are dropped and created again. Tables that are new are created, with
their indexes. Comments follow, and all grants, calls and DO blocks are repeated, except statements whose comment begins
with "A fresh installation only:". EXECUTE on a new function for users is revoked from PUBLIC, unless the full script
grants it; one whose signature has changed keeps the rights that roles had on it.

Changes of tables that stay, and of the data in them, cannot be derived: they are written by hand, may drop functions
and views as well, and stand between what is dropped and what is created. What needs new tables follows behind the line
"-- Behind the new objects". A table that is moved to another schema by hand stays. The test in
tests/server/test_update.py compares the catalogue of an upgraded database with that of a new one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

GUARD = '\\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \\quit'

NAME = r"(?P<name>[@\w]+\.\w+)"
ROUTINE = re.compile(rf"CREATE (?:OR REPLACE )?(?P<kind>FUNCTION|PROCEDURE) {NAME}\s*\(", re.I)
VIEW = re.compile(rf"CREATE (?:OR REPLACE )?VIEW {NAME}", re.I)
DROPPED = re.compile(rf"DROP (?:FUNCTION|PROCEDURE|VIEW) (?:IF EXISTS )?{NAME}", re.I)
COMMENT = re.compile(rf"COMMENT ON (?P<kind>\w+) {NAME}(?P<rest>[^']*?)\s+IS\s", re.I)
COMMENT_ON_SCHEMA = re.compile(r"COMMENT ON SCHEMA\b", re.I)
AGGREGATE = re.compile(r"CREATE AGGREGATE\b", re.I)
TABLE = re.compile(rf"CREATE (?:UNLOGGED )?TABLE {NAME}", re.I)
OF_TABLE = re.compile(rf"(?:CREATE (?:UNIQUE )?INDEX \w+ ON|ALTER TABLE) {NAME}", re.I)  # of a new one
RENEWED = re.compile(rf"CREATE (?P<kind>POLICY|TRIGGER) (?P<member>\w+)\b.*?\bON {NAME}", re.I | re.S)
MOVED = re.compile(r"ALTER TABLE \w+\.(?P<table>\w+) SET SCHEMA (?P<schema>\w+)", re.I)
REPEATED = re.compile(r"(GRANT|REVOKE|DO)\b", re.I)
BEHIND = "-- Behind the new objects"  # line of the statements written by hand
USERS = "@extschema@."  # schema of the functions for users
FRESH_ONLY = "-- A fresh installation only:"  # begins the comment of a statement that an upgrade leaves out
# Rights on functions for users, around the statements that drop them and create others of their names
SAVE_RIGHTS = """CREATE TEMPORARY TABLE pg_temp.pg_tensile_rights AS
    SELECT DISTINCT p.proname, a.grantee, a.is_grantable
    FROM pg_catalog.pg_proc p
         CROSS JOIN LATERAL pg_catalog.aclexplode(
             coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) a
    WHERE p.pronamespace OPERATOR(pg_catalog.=) '@extschema@'::pg_catalog.regnamespace
      AND p.proname OPERATOR(pg_catalog.=) ANY (ARRAY[{names}]) AND a.grantee OPERATOR(pg_catalog.<>) p.proowner;"""
RESTORE_RIGHTS = """DO $$
DECLARE
    command pg_catalog.text;
BEGIN
    FOR command IN
        SELECT pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s%s', p.oid::pg_catalog.regprocedure,
                                 CASE WHEN r.rolname IS NULL THEN 'PUBLIC' ELSE pg_catalog.quote_ident(r.rolname) END,
                                 CASE WHEN s.is_grantable THEN ' WITH GRANT OPTION' END)
        FROM pg_temp.pg_tensile_rights s
             JOIN pg_catalog.pg_proc p ON p.proname OPERATOR(pg_catalog.=) s.proname
                 AND p.pronamespace OPERATOR(pg_catalog.=) '@extschema@'::pg_catalog.regnamespace
             LEFT JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) s.grantee LOOP
        EXECUTE command;
    END LOOP;
END $$;

DROP TABLE pg_temp.pg_tensile_rights;"""
CALL = re.compile(r"SELECT (tensile\w*|pg_catalog)\.", re.I)
# strings, quoted names, dollar-quoted bodies and comments, as wholes
TOKEN = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|(\$\w*\$).*?\1|--[^\n]*|/\*.*?\*/|.", re.S)


class Statement(NamedTuple):
    """A statement of a script without its semicolon, and the comment lines right before it."""

    text: str
    comment: str = ""

    @property
    def complete(self) -> str:
        return f"{self.comment}{self.text};"

    @property
    def on_one_line(self) -> str:
        return " ".join(self.text.split())


class Routine(NamedTuple):
    """A function or procedure; `arguments` without their defaults, whose number is `defaults`."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    defaults: int
    result: str  # from RETURNS to LANGUAGE

    @property
    def identity(self) -> str:
        """The signature that DROP and the comparison of scripts use."""
        return f"{self.kind} {self.name}({', '.join(self.arguments)})"

    def replaces(self, old: Routine) -> bool:
        """Return whether CREATE OR REPLACE is possible: it accepts neither another result nor fewer defaults."""
        return self.identity == old.identity and self.result == old.result and self.defaults >= old.defaults


def statements(script: str) -> Iterator[Statement]:
    """Yield the statements of an extension script in their order. Rulers and free-standing comments belong to none."""
    text, comment, empty_line = "", "", False
    for match in TOKEN.finditer(re.sub(r"^\\.*$", "", script, flags=re.M)):
        token = match.group()
        if text:
            if token == ";":
                yield Statement(text, comment)
                text, comment = "", ""
            else:
                text += token
        elif token.startswith("--"):
            comment = "" if token.startswith("----") else f"{'' if empty_line else comment}{token}\n"
            empty_line = False
        elif token == "\n":
            empty_line = match.string[: match.start()].endswith("\n")
        elif not token.isspace() and not token.startswith("/*"):
            text, comment = token, "" if empty_line else comment
    if text:
        raise ValueError(f"the script ends within a statement: {text[:60]}")


def split_arguments(arguments: str) -> list[str]:
    """Split arguments at the commas outside of brackets and strings."""
    parts, depth = [""], 0
    for match in TOKEN.finditer(arguments):
        token = match.group()
        depth += token in "([" if len(token) == 1 else 0
        depth -= token in ")]" if len(token) == 1 else 0
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [" ".join(argument.split()) for argument in parts if argument.strip()]


def routine(statement: Statement) -> Routine | None:
    """Return the function or procedure that a statement creates, or None if it creates neither."""
    head = ROUTINE.match(statement.text)
    if head is None:
        return None
    depth, position = 1, head.end()
    while depth:
        match = TOKEN.match(statement.text, position)
        assert match is not None, statement.text
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        position = match.end()
    arguments = split_arguments(statement.text[head.end() : position - 1])
    bare = tuple(re.split(r" DEFAULT ", argument, flags=re.I)[0] for argument in arguments)
    result = re.split(r"\bLANGUAGE\b", statement.text[position:], maxsplit=1, flags=re.I)[0]
    defaults = sum(before != after for before, after in zip(arguments, bare, strict=True))
    return Routine(head["kind"].upper(), head["name"], bare, defaults, " ".join(result.split()))


class Script:
    """A full script, indexed by the objects that it creates."""

    def __init__(self, text: str) -> None:
        self.statements = list(statements(text))

    @cached_property
    def routines(self) -> dict[str, tuple[Routine, Statement]]:
        pairs = ((routine(statement), statement) for statement in self.statements)
        return {created.identity: (created, statement) for created, statement in pairs if created is not None}

    @cached_property
    def views(self) -> dict[str, Statement]:
        pairs = ((VIEW.match(statement.text), statement) for statement in self.statements)
        return {match["name"]: statement for match, statement in pairs if match}

    @cached_property
    def tables(self) -> set[str]:
        return {match["name"] for statement in self.statements if (match := TABLE.match(statement.text))}

    @cached_property
    def texts(self) -> set[str]:
        return {statement.text for statement in self.statements}


class Upgrade:
    """The statements that lead from one full script to another, around those written by hand."""

    def __init__(self, old: Script, new: Script, by_hand: str) -> None:
        self.old, self.new, self.by_hand = old, new, by_hand
        self.dropped_by_hand = {match["name"] for match in DROPPED.finditer(by_hand)}
        self.dropped_routines = [routine for routine, _ in old.routines.values() if not self._stays(routine)]
        self.dropped_views = self._dropped_views()
        moved = {f"{match['schema']}.{match['table']}" for match in MOVED.finditer(by_hand)}
        self.new_tables = new.tables - old.tables - moved

    def _stays(self, routine: Routine) -> bool:
        successor = self.new.routines.get(routine.identity)
        return successor is not None and successor[0].replaces(routine)

    def _dropped_views(self) -> list[str]:
        """Return the changed and removed views, and those that use a dropped object, in the order of their creation."""
        views = {view.on_one_line for view in self.new.views.values()}
        changed = {name for name, view in self.old.views.items() if view.on_one_line not in views}
        gone = changed | self.dropped_by_hand | {routine.name for routine in self.dropped_routines}
        for name, view in self.old.views.items():  # a view comes after those that it uses
            if any(re.search(rf"{re.escape(used)}\b", view.text) for used in gone - {name}):
                gone.add(name)
        return [name for name in self.old.views if name in gone]

    @property
    def renewed_for_users(self) -> list[str]:
        """The names of functions for users that are dropped, and created with another signature."""
        created = {routine.name for routine, _ in self.new.routines.values()}
        names = {routine.name for routine in self.dropped_routines} & created
        return sorted(name for name in names if name.startswith(USERS))

    def saved_rights(self) -> Iterator[str]:
        """Yield the statement before the drops that saves who may execute the functions that are created again."""
        if self.renewed_for_users:
            names = ", ".join(f"'{name.partition('.')[2]}'" for name in self.renewed_for_users)
            yield SAVE_RIGHTS.format(names=names)

    def restored_rights(self) -> Iterator[str]:
        """Yield the statements at the end that grant these rights again."""
        if self.renewed_for_users:
            yield RESTORE_RIGHTS

    def drops(self) -> Iterator[str]:
        """Yield the statements before those written by hand."""
        views = [name for name in self.dropped_views if name not in self.dropped_by_hand]
        if views:
            yield "DROP VIEW " + ",\n    ".join(views) + ";"
        for statement in self.old.statements:
            if match := RENEWED.match(statement.text):
                yield f"DROP {match['kind']} {match['member']} ON {match['name']};"
        for routine in self.dropped_routines:
            if routine.name not in self.dropped_by_hand:
                yield f"DROP {routine.identity};"

    def creations(self) -> Iterator[str]:
        """Yield the statements after those written by hand, in the order of the full script."""
        renewed = {routine.name for routine in self.dropped_routines}
        for statement in self.new.statements:
            created, view, comment = routine(statement), VIEW.match(statement.text), COMMENT.match(statement.text)
            table = TABLE.match(statement.text) or OF_TABLE.match(statement.text)
            if statement.comment.startswith(FRESH_ONLY):
                continue
            if created is not None:
                if statement.text not in self.old.texts or created.name in renewed | self.dropped_by_hand:
                    yield self._replacing(statement, created.identity in self.old.routines, created.name)
                    if created.identity not in self.old.routines and created.name.startswith(USERS):
                        yield f"REVOKE EXECUTE ON {created.identity} FROM PUBLIC;"
            elif view:
                if view["name"] not in self.old.views or view["name"] in self.dropped_views:
                    yield self._replacing(statement, False, view["name"])
            elif comment:
                if statement.text not in self.old.texts or self._is_new(comment, renewed):
                    yield statement.complete
            elif table:
                if table["name"] in self.new_tables:
                    yield statement.complete
            elif AGGREGATE.match(statement.text) or COMMENT_ON_SCHEMA.match(statement.text):
                if statement.text not in self.old.texts:
                    yield statement.complete
            elif any(kind.match(statement.text) for kind in (RENEWED, REPEATED, CALL)):
                yield statement.complete

    def _replacing(self, statement: Statement, existing: bool, name: str) -> str:
        """Return the statement, with OR REPLACE only if an object is replaced.

        Otherwise it could take over another owner's object.
        """
        by_hand = re.search(rf"CREATE (OR REPLACE )?(FUNCTION|PROCEDURE|VIEW) {re.escape(name)}\b", self.by_hand, re.I)
        stays = existing and name not in {routine.name for routine in self.dropped_routines} | self.dropped_by_hand
        verb = "CREATE OR REPLACE" if stays or by_hand else "CREATE"
        return f"{statement.comment}{re.sub(r'^CREATE( OR REPLACE)?', verb, statement.text, flags=re.I)};"

    def _is_new(self, comment: re.Match[str], renewed: set[str]) -> bool:
        """Return whether a comment is on a view or function that is created, or created again."""
        name = comment["name"]
        if comment["kind"].upper() == "COLUMN":
            name += comment["rest"].split()[0] if comment["rest"].split() else ""
            name = name.rpartition(".")[0]
        new_views = self.new.views.keys() - self.old.views.keys()
        return name in renewed or name in self.dropped_views or name in new_views


def generate(old: str, new: str, by_hand: str) -> str:
    """Return the upgrade script from one full script to another, around the statements written by hand."""
    upgrade = Upgrade(Script(old), Script(new), by_hand)
    tables, _, behind = by_hand.partition(BEHIND)
    before, after = (*upgrade.saved_rights(), *upgrade.drops()), (*upgrade.creations(), *upgrade.restored_rights())
    return "\n\n".join(filter(None, (GUARD, *before, tables.strip(), *after, behind.strip()))) + "\n"


if __name__ == "__main__":
    print(generate(*(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:])), end="")
