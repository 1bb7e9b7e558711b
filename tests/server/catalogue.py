"""The objects of the extension and their properties, as lines of text that can be compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

# Privileges in one form: null stands for the default of the object's kind; grants are sorted.
RIGHTS = """
    SELECT string_agg(format('%s: %s%s', CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
                             privilege_type, CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END),
                      E'\\n' ORDER BY grantee, privilege_type)
    FROM aclexplode(coalesce({acl}, acldefault('{kind}', {owner})))
"""


def rights(acl: str, kind: str, owner: str) -> str:
    return f"({RIGHTS.format(acl=acl, kind=kind, owner=owner)})"


class Part(NamedTuple):
    """A property of the objects of a kind; `query` returns names of objects and the property, null or lines."""

    name: str
    query: str


MEMBERS = """
    (SELECT d.classid, d.objid, d.objsubid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
     WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'pg_tensile')
"""
ROUTINES = f"FROM pg_proc p JOIN {MEMBERS} m ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid"
ROUTINE = "'function ' || p.oid::regprocedure"
SCHEMAS = "IN ('tensile'::regnamespace, 'tensile_internal'::regnamespace, 'tensile_worker'::regnamespace)"
RELATIONS = f"FROM pg_class c WHERE c.relnamespace {SCHEMAS} AND c.relkind IN ('r', 'v', 'S')"
RELATION = """
    CASE c.relkind WHEN 'r' THEN 'table ' WHEN 'v' THEN 'view ' ELSE 'sequence ' END || c.oid::regclass
"""
COLUMNS = f"""
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relnamespace {SCHEMAS} AND c.relkind IN ('r', 'v')
"""
PARTS = [
    Part("member", f"SELECT pg_describe_object(classid, objid, objsubid), 'yes' FROM {MEMBERS} m"),
    Part("owner", f"SELECT {ROUTINE}, p.proowner::regrole::text {ROUTINES}"),
    Part("rights", f"SELECT {ROUTINE}, {rights('p.proacl', 'f', 'p.proowner')} {ROUTINES}"),
    Part("comment", f"SELECT {ROUTINE}, obj_description(p.oid, 'pg_proc') {ROUTINES}"),
    Part(
        "definition",
        f"SELECT {ROUTINE}, CASE p.prokind WHEN 'a' THEN a::text ELSE pg_get_functiondef(p.oid) END {ROUTINES}"
        " LEFT JOIN pg_aggregate a ON a.aggfnoid = p.oid",
    ),
    Part("owner", f"SELECT {RELATION}, c.relowner::regrole::text {RELATIONS}"),
    Part(
        "rights",
        f"SELECT {RELATION}, CASE c.relkind WHEN 'S' THEN {rights('c.relacl', 's', 'c.relowner')}"
        f" ELSE {rights('c.relacl', 'r', 'c.relowner')} END {RELATIONS}",
    ),
    Part("comment", f"SELECT {RELATION}, obj_description(c.oid, 'pg_class') {RELATIONS}"),
    Part(
        "storage",
        f"SELECT {RELATION}, concat_ws(' ', 'persistence', c.relpersistence, 'options', c.reloptions,"
        f" 'row security', c.relrowsecurity, c.relforcerowsecurity, 'replica identity', c.relreplident) {RELATIONS}",
    ),
    Part(
        "columns",
        f"SELECT {RELATION}, string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),"
        " CASE WHEN a.attnotnull THEN 'NOT NULL' END, 'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid),"
        " 'IDENTITY ' || nullif(a.attidentity::text, ''), 'GENERATED ' || nullif(a.attgenerated::text, ''),"
        " 'STORAGE', a.attstorage, 'COLLATION ' || nullif(a.attcollation, 0)::regcollation::text, a.attacl),"
        f" E'\\n' ORDER BY a.attnum) {COLUMNS} GROUP BY c.oid, c.relkind",
    ),
    Part(
        "comments of columns",
        f"SELECT {RELATION}, string_agg(a.attname || ': ' || col_description(c.oid, a.attnum), E'\\n'"
        f" ORDER BY a.attnum) {COLUMNS} GROUP BY c.oid, c.relkind",
    ),
    Part("definition", f"SELECT {RELATION}, pg_get_viewdef(c.oid) {RELATIONS} AND c.relkind = 'v'"),
    Part(
        "constraint",
        "SELECT 'table ' || conrelid::regclass, string_agg(conname || ' ' || pg_get_constraintdef(oid), E'\\n'"
        f" ORDER BY conname) FROM pg_constraint WHERE connamespace {SCHEMAS} AND conrelid <> 0"
        " GROUP BY conrelid",
    ),
    Part(
        "index",
        "SELECT 'table ' || indrelid::regclass, string_agg(pg_get_indexdef(indexrelid), E'\\n'"
        " ORDER BY indexrelid::regclass::text) FROM pg_index JOIN pg_class c ON c.oid = indrelid"
        f" WHERE c.relnamespace {SCHEMAS} GROUP BY indrelid",
    ),
    Part(
        "policy",
        "SELECT format('table %s.%s', schemaname, tablename), string_agg(concat_ws(' ', policyname, permissive, roles,"
        " cmd, 'USING', qual, 'WITH CHECK', with_check), E'\\n' ORDER BY policyname) FROM pg_policies"
        " WHERE schemaname ~ '^tensile' GROUP BY 1",
    ),
    Part(
        "trigger",
        "SELECT 'table ' || tgrelid::regclass, string_agg(concat_ws(' ', pg_get_triggerdef(t.oid), tgenabled), E'\\n'"
        " ORDER BY tgname) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid"
        f" WHERE c.relnamespace {SCHEMAS} AND NOT tgisinternal GROUP BY tgrelid",
    ),
    Part(
        "rights",
        f"SELECT 'schema ' || nspname, {rights('nspacl', 'n', 'nspowner')} FROM pg_namespace WHERE oid {SCHEMAS}",
    ),
    Part(
        "comment",
        f"SELECT 'schema ' || nspname, obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE oid {SCHEMAS}",
    ),
    Part(
        "dumped rows",
        "SELECT 'extension', string_agg(concat_ws(' ', c.config::regclass, c.condition), E'\\n'"
        " ORDER BY c.config::regclass::text) FROM pg_extension,"
        " unnest(extconfig, extcondition) AS c (config, condition) WHERE extname = 'pg_tensile'",
    ),
    Part("version", "SELECT 'extension', extversion FROM pg_extension WHERE extname = 'pg_tensile'"),
]


def describe(conn: Connection) -> list[str]:
    """Return all properties, sorted by object; every line names its object and property."""
    properties = set()
    for part_number, part in enumerate(PARTS):
        for name, lines in conn.execute(part.query).fetchall():
            properties |= {
                (name, part_number, line_number, f"{name} | {part.name}: {line}")
                for line_number, line in enumerate((lines or "").splitlines())
            }
    return [line for _, _, _, line in sorted(properties)]
