"""The query for predictions, derived from a training query: the same rows and features without the target.

Dropped are the target's column, conditions of WHERE that mention columns which only the target needs (such as
`delay IS NOT NULL`), and joins of tables that only the target needs. So rows whose target is not known yet are added;
those that have one stay the same, each of them once. That holds for a join if the joined columns are a unique key of
the joined table, which the server has to know. Where a part of the query could depend on rows that are added, or on the
target, nothing is derived.

Names are folded as PostgreSQL does it, but not resolved: whether a column exists, and that the query has been read
correctly, is for the server to say (pyworker/supervisors/job/prediction_query.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sqlglot
from sqlglot import exp

DIALECT = "postgres"
SOURCE = "tensile_source"  # the name that stands for the table of the training query in a template
# Parts of a SELECT with which dropping a column or a condition could change other rows
UNSUITABLE = {
    "distinct": "DISTINCT",
    "limit": "LIMIT or FETCH",
    "offset": "OFFSET",
    "having": "HAVING",
    "into": "INTO",
    "locks": "a locking clause",
}
PLAIN = {"this", "db", "catalog", "alias"}  # parts of a table's name


class Underivable(Exception):
    """There is no query for predictions; the message is the reason, a sentence without its full stop."""


class Column(NamedTuple):
    """A column as a query names it."""

    table: str | None
    name: str

    def may_be(self, other: Column) -> bool:
        return self.name == other.name and (None in (self.table, other.table) or self.table == other.table)


class Key(NamedTuple):
    """Columns of a table that have to be unique."""

    schema: str | None
    table: str
    columns: tuple[str, ...]


class Variant(NamedTuple):
    """A derived query; `template` reads SOURCE in place of `source`, both are None if it reads no table first.

    The query is correct if all `keys` are unique."""

    query: str
    template: str | None
    source: str | None
    keys: tuple[Key, ...]


class Derived(NamedTuple):
    """Derived queries, of which the first correct one counts, or the reason why there is none.

    `printed` is the training query as it was understood."""

    printed: str | None
    variants: tuple[Variant, ...]
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        variants = [variant._asdict() | {"keys": [key._asdict() for key in variant.keys]} for variant in self.variants]
        return self._asdict() | {"variants": variants}


def derive(query: str, target: str, features: Sequence[str]) -> Derived:
    """Return the queries for predictions of a training query that returns these features and the target."""
    try:
        select = _parse(query)
        printed = _text(select)
        whole = _Training(select, target, features)
        variants = [whole.variant(keep_joins=True)]
        if whole.removable:
            variants.insert(0, _Training(select, target, features).variant(keep_joins=False))
        return Derived(printed, tuple(variants), None)
    except Underivable as reason:
        return Derived(None, (), str(reason))
    except Exception as error:  # a query that the parser cannot take must not end its job
        first = str(error).partition("\n")[0][:200]
        return Derived(None, (), f"the training query cannot be read outside of the server: {first}")


def _parse(query: str) -> exp.Select:
    trees = [tree for tree in sqlglot.parse(query, read=DIALECT) if tree is not None]
    tree = trees[0].unnest() if len(trees) == 1 else None
    if not isinstance(tree, exp.Select):
        raise Underivable("the training query is not a single SELECT")
    return tree


def _text(tree: exp.Expr) -> str:
    return tree.sql(dialect=DIALECT, comments=False)


def folded(identifier: Any) -> str:
    """Return the name that PostgreSQL gives to an identifier."""
    name = str(identifier.this)
    return name if identifier.args.get("quoted") else name.lower()


def _column(node: exp.Column) -> Column:
    table = node.args.get("table")
    return Column(None if table is None else folded(table), folded(node.this))


def _columns(node: exp.Expr) -> Iterator[Column]:
    """Yield the columns that are named in a part of a query; of `t.*` none."""
    for found in node.find_all(exp.Column):
        if not isinstance(found.this, exp.Star):
            yield _column(found)


def _conjuncts(node: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the conditions that AND connects."""
    inner = node.unnest()
    if isinstance(inner, exp.And):
        yield from _conjuncts(inner.left)
        yield from _conjuncts(inner.right)
    else:
        yield node


def _output_name(item: exp.Expr) -> str | None:
    """Return the name of a column of the result; None if only the server knows it."""
    if isinstance(item, exp.Alias):
        return folded(item.args["alias"])
    while isinstance(item, exp.Cast | exp.Paren):
        item = item.this
    return _column(item).name if isinstance(item, exp.Column) and not item.is_star else None


class _Training:
    """A training query of which a copy is taken apart."""

    def __init__(self, select: exp.Select, target: str, features: Sequence[str]) -> None:
        self._select = select.copy()
        self._features = list(features)
        self._refuse_unsuitable()
        self._stars = [item for item in self._select.expressions if item.is_star]
        self._target_item = self._find_target(target)
        self._target = target
        self._own = self._columns_of_target()
        self.removable = [join for join in self._joins() if self._key(join) is not None]

    def variant(self, keep_joins: bool) -> Variant:
        """Derive the query, in place."""
        joins = [] if keep_joins else self.removable
        keys = [key for join in joins if (key := self._key(join)) is not None]
        aliases = {_alias(join.this) for join in joins}
        dropped = self._drop_conditions(aliases)
        for join in joins:
            join.pop()
        self._check_rows(dropped or bool(joins))
        self._drop_order(aliases)
        self._drop_target()
        source, template = self._template()
        return Variant(_text(self._select), template, source, tuple(keys))

    def _refuse_unsuitable(self) -> None:
        for part, word in UNSUITABLE.items():
            if self._select.args.get(part):
                raise Underivable(f"the training query has {word}")

    # -- the target ---------------------------------------------------------------------------------------------------

    def _find_target(self, target: str) -> exp.Expr | None:
        """Return the item of the select list that is the target; None: it is one of the columns of a star."""
        items = [item for item in self._select.expressions if not item.is_star]
        names = [_output_name(item) for item in items]
        if target in names:
            return items[names.index(target)]
        if self._stars:
            return None
        if names.count(None) == 1:
            return items[names.index(None)]
        raise Underivable(f'only the server can say which column of the training query is "{target}": name it with AS')

    def _columns_of_target(self) -> list[Column]:
        """Return the columns that only the target needs."""
        needed = [column for item in self._others() for column in _columns(item)]
        if self._stars:
            needed += [Column(None, name) for name in self._features]
        mentioned = [Column(None, self._target)] if self._target_item is None else _columns(self._target_item)
        return [column for column in mentioned if not any(column.may_be(other) for other in needed)]

    def _others(self) -> list[exp.Expr]:
        return [item for item in self._select.expressions if item is not self._target_item]

    def _is_own(self, node: exp.Expr, aliases: Iterable[str] = ()) -> bool:
        """Return whether a part of the query names a column that only the target needs, or a table of `aliases`."""
        return any(
            (column.table is not None and column.table in aliases) or any(column.may_be(own) for own in self._own)
            for column in _columns(node)
        )

    # -- what it needs ------------------------------------------------------------------------------------------------

    def _joins(self) -> list[exp.Join]:
        return list(self._select.args.get("joins") or [])

    def _key(self, join: exp.Join) -> Key | None:
        """Return the columns that the join compares, if only the target needs the joined table; else None."""
        table = join.this
        if not self._is_plain(table) or join.method or join.side not in ("", "LEFT") or join.kind not in ("", "INNER"):
            return None
        alias = _alias(table)
        own = [] if self._target_item is None else [self._target_item]
        elsewhere: list[exp.Expr] = [*self._others()] + [other for other in self._joins() if other is not join]
        elsewhere += [part for name in ("group", "windows") if (part := self._select.args.get(name))]
        named = {column.table for part in own for column in _columns(part)}
        if alias not in named or any(_names_table(part, alias) for part in elsewhere):
            return None
        columns = _compared(join, alias)
        if columns is None:
            return None
        schema = table.args.get("db")
        return Key(None if schema is None else folded(schema), folded(table.this), columns)

    def _is_plain(self, node: Any) -> bool:
        """Return whether a part of FROM is the name of a table or view."""
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            return False
        given = {part for part, value in node.args.items() if value}
        names = {folded(cte.args["alias"].this) for cte in self._select.ctes}
        is_cte = node.args.get("db") is None and folded(node.this) in names
        renamed = node.args.get("alias") is not None and node.args["alias"].args.get("columns")
        return given <= PLAIN and not is_cte and not renamed

    def _drop_conditions(self, aliases: Iterable[str]) -> bool:
        """Drop the conditions of WHERE that mention the target; return whether there are any."""
        where = self._select.args.get("where")
        if where is None:
            return False
        conditions = list(_conjuncts(where.this))
        kept = [condition for condition in conditions if not self._is_own(condition, aliases)]
        if len(kept) == len(conditions):
            return False
        self._select.set("where", exp.Where(this=exp.and_(*kept, copy=False)) if kept else None)
        return True

    def _check_rows(self, adds_rows: bool) -> None:
        """Raise Underivable if rows that are added, or the missing target, could change other rows."""
        group = self._select.args.get("group")
        if group is not None:
            numbers = any(isinstance(item, exp.Literal) for item in group.expressions)
            if adds_rows or numbers or self._is_target(group):
                raise Underivable("the groups of the training query depend on the target")
        if adds_rows and any(item.find(exp.Window, exp.AggFunc) for item in self._others()):
            raise Underivable(
                "a feature is computed from several rows, which are different without the target's conditions"
            )

    def _is_target(self, node: exp.Expr) -> bool:
        return self._is_own(node) or any(column == Column(None, self._target) for column in _columns(node))

    def _drop_order(self, aliases: Iterable[str]) -> None:
        """Drop from ORDER BY what mentions the target, and all of it if it counts columns."""
        order = self._select.args.get("order")
        if order is None:
            return
        items = [item for item in order.expressions if not self._is_target(item) and not self._is_own(item, aliases)]
        if any(isinstance(item.this, exp.Literal) for item in items):
            items = []
        self._select.set("order", exp.Order(expressions=items) if items else None)

    def _drop_target(self) -> None:
        if self._target_item is not None:
            self._target_item.pop()
            if not self._select.expressions:
                raise Underivable("the training query has no column besides the target")
            return
        named = {_output_name(item) for item in self._others() if not item.is_star}
        table = self._stars[0].args.get("table") if len(self._stars) == 1 else None
        columns: list[exp.Expr] = [
            exp.column(exp.to_identifier(name, quoted=True), table=None if table is None else table.copy())
            for name in self._features
            if name not in named
        ]
        explicit = [item for item in self._others() if not item.is_star]
        self._select.set("expressions", columns + explicit)

    # -- another table ------------------------------------------------------------------------------------------------

    def _template(self) -> tuple[str | None, str | None]:
        """Return the first table as SQL, and the query with SOURCE in its place; None if it is not a table."""
        first = self._select.args.get("from_")
        if first is None or not self._is_plain(first.this):
            return None, None
        table = first.this
        name = exp.table_(*(table.args.get(part) for part in ("this", "db", "catalog")))
        alias = exp.TableAlias(this=exp.to_identifier(_alias(table), quoted=True))
        copy = self._select.copy()
        copy.args["from_"].set("this", exp.Table(this=exp.to_identifier(SOURCE), alias=alias))
        return _text(name), _text(copy)


def _alias(table: exp.Table) -> str:
    """Return the name by which a query refers to a table."""
    alias = table.args.get("alias")
    return folded(table.this if alias is None else alias.this)


def _names_table(node: exp.Expr, alias: str) -> bool:
    """Return whether a part of a query names the table: a column, a whole row, or `t.*`."""
    for column in node.find_all(exp.Column):
        table = column.args.get("table")
        if table is not None and folded(table) == alias:
            return True
        if table is None and isinstance(column.this, exp.Identifier) and folded(column.this) == alias:
            return True
    return False


def _compared(join: exp.Join, alias: str) -> tuple[str, ...] | None:
    """Return the columns of the joined table that a join sets equal to others; None if it has other conditions.

    Each condition has to be about the joined table, because one about the others would choose among their rows."""
    using = join.args.get("using")
    if using:
        return tuple(folded(column.this if isinstance(column, exp.Column) else column) for column in using)
    condition = join.args.get("on")
    if condition is None:
        return None
    columns = []
    for part in _conjuncts(condition):
        if not _names_table(part, alias):
            return None
        inner = part.unnest()
        if isinstance(inner, exp.EQ):
            for side, other in ((inner.left, inner.right), (inner.right, inner.left)):
                tables = {column.table for column in _columns(other)}
                if isinstance(side, exp.Column) and _column(side).table == alias and not tables & {alias, None}:
                    columns.append(_column(side).name)
    return tuple(columns) or None
