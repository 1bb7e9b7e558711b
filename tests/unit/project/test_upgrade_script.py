"""Upgrade scripts: the statements of scripts, and those derived from two scripts."""

from __future__ import annotations

import pytest

from scripts.upgrade_script import GUARD, Routine, generate, routine, statements

OLD = """
\\echo Use "CREATE EXTENSION x" to load this file. \\quit
CREATE TABLE tensile.jobs (id int);
CREATE TABLE tensile.old_place (id int);
CREATE POLICY visible ON tensile.jobs USING (tensile._same(id) = 1);
COMMENT ON COLUMN tensile.jobs.id IS 'number';
CREATE FUNCTION tensile._same(a int) RETURNS int LANGUAGE sql AS $$ SELECT 1; $$;
CREATE FUNCTION tensile._body(a int) RETURNS int LANGUAGE sql AS $$ SELECT 1; $$;
CREATE FUNCTION tensile._result(OUT a int) RETURNS int LANGUAGE c AS 'x';
CREATE FUNCTION tensile._gone(a text DEFAULT 'a, b)', b int DEFAULT 1) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
COMMENT ON FUNCTION tensile._result() IS 'result';
CREATE VIEW tensile.uses WITH (security_invoker = true) AS SELECT tensile._result();
CREATE VIEW tensile.stays AS SELECT 1;
CREATE VIEW tensile.changes AS SELECT 1;
COMMENT ON VIEW tensile.uses IS 'uses';
GRANT SELECT ON tensile.uses TO PUBLIC;
"""
NEW = """
\\echo Use "CREATE EXTENSION x" to load this file. \\quit
CREATE TABLE tensile.jobs (id int, kind text);
CREATE TABLE inside.old_place (id int);
CREATE TABLE inside.epochs (id int);
CREATE INDEX epochs_id ON inside.epochs (id);
CREATE INDEX jobs_kind ON tensile.jobs (kind);
ALTER TABLE inside.epochs ENABLE ROW LEVEL SECURITY;
CREATE POLICY visible ON tensile.jobs USING (tensile._same(id) = 2);
CREATE TRIGGER told AFTER INSERT OR UPDATE ON inside.epochs EXECUTE FUNCTION f();
CREATE AGGREGATE tensile._sum(int) (SFUNC = f, STYPE = int);
COMMENT ON COLUMN tensile.jobs.id IS 'number';
CREATE FUNCTION tensile._same(a int) RETURNS int LANGUAGE sql AS $$ SELECT 1; $$;
----
-- Another section

-- One more than
-- before
CREATE FUNCTION tensile._body(a int) RETURNS int LANGUAGE sql AS $$ SELECT 2; -- ; $$;
CREATE FUNCTION tensile._result(OUT a int, OUT b int) RETURNS record LANGUAGE c AS 'x';
COMMENT ON FUNCTION tensile._result() IS 'result';
CREATE FUNCTION @extschema@.fresh(a int) RETURNS int LANGUAGE c AS 'x';
CREATE VIEW tensile.uses WITH (security_invoker = true) AS SELECT tensile._result();
CREATE VIEW tensile.stays AS
    SELECT 1;
CREATE VIEW tensile.changes AS SELECT 2;
COMMENT ON VIEW tensile.uses IS 'uses';
GRANT SELECT ON tensile.uses TO PUBLIC;
-- A fresh installation only: the reason.
REVOKE EXECUTE ON FUNCTION @extschema@.fresh(int) FROM PUBLIC;
"""
BY_HAND = "-- branch\nALTER TABLE tensile.jobs ADD kind text;\nALTER TABLE tensile.old_place SET SCHEMA inside;"


def upgrade(by_hand: str = BY_HAND) -> str:
    return generate(OLD, NEW, f"{by_hand}\n")


def before_and_after(text: str) -> tuple[str, str]:
    before, after = text.split(BY_HAND)
    return before, after


def test_statements_end_at_semicolons_outside_of_strings_bodies_and_comments() -> None:
    texts = [statement.text for statement in statements(NEW)]
    assert texts[11] == "CREATE FUNCTION tensile._body(a int) RETURNS int LANGUAGE sql AS $$ SELECT 2; -- ; $$"
    assert len(texts) == 21


def test_a_statement_has_the_comment_right_before_it() -> None:
    assert list(statements(NEW))[11].comment == "-- One more than\n-- before\n"
    with pytest.raises(ValueError, match="within a statement"):
        list(statements("SELECT 1"))


def test_defaults_are_not_part_of_a_functions_identity() -> None:
    gone = routine(list(statements(OLD))[7])
    assert gone == Routine("FUNCTION", "tensile._gone", ("a text", "b int"), 2, "RETURNS int")


def test_objects_are_dropped_before_the_statements_written_by_hand() -> None:
    before, _ = before_and_after(upgrade())
    assert "DROP VIEW tensile.uses,\n    tensile.changes;" in before
    assert "DROP FUNCTION tensile._result(OUT a int);" in before
    assert "DROP FUNCTION tensile._gone(a text, b int);" in before
    assert "CREATE" not in before and "_same" not in before and "stays" not in before


def test_new_and_changed_objects_are_created_after_them() -> None:
    _, after = before_and_after(upgrade())
    assert "-- One more than\n-- before\nCREATE OR REPLACE FUNCTION tensile._body" in after
    assert "CREATE FUNCTION tensile._result(OUT a int, OUT b int)" in after  # it was dropped
    assert "COMMENT ON FUNCTION tensile._result() IS 'result';" in after  # and its comment with it
    assert "CREATE FUNCTION @extschema@.fresh" in after
    assert "REVOKE EXECUTE ON FUNCTION @extschema@.fresh(a int) FROM PUBLIC;" in after
    assert "CREATE VIEW tensile.uses" in after and "COMMENT ON VIEW tensile.uses" in after
    assert "GRANT SELECT ON tensile.uses TO PUBLIC;" in after
    assert "FUNCTION tensile._same" not in after and "stays" not in after and "A fresh installation only" not in after


def test_rights_on_a_public_function_stay_if_its_signature_changes() -> None:
    assert "pg_tensile_rights" not in upgrade()
    old = f"{OLD}\nCREATE FUNCTION @extschema@.fresh(a text) RETURNS int LANGUAGE c AS 'x';"
    before, after = before_and_after(generate(old, NEW, f"{BY_HAND}\n"))
    assert before.index("ARRAY['fresh']") < before.index("DROP FUNCTION @extschema@.fresh(a text);")
    revoked = after.index("REVOKE EXECUTE ON FUNCTION @extschema@.fresh(a int) FROM PUBLIC;")
    assert revoked < after.index("GRANT EXECUTE ON FUNCTION %s") < after.index("DROP TABLE pg_temp.pg_tensile_rights;")


def test_an_object_dropped_by_hand_is_dropped_once_and_created_again() -> None:
    text = upgrade(f"{BY_HAND}\nDROP VIEW tensile.stays;\nDROP FUNCTION tensile._gone(text, int);")
    assert text.count("DROP FUNCTION tensile._gone") == 1
    assert "CREATE VIEW tensile.stays" in text


def test_new_tables_are_created_with_what_belongs_to_them() -> None:
    before, after = before_and_after(upgrade())
    assert "DROP POLICY visible ON tensile.jobs;" in before
    assert "CREATE TABLE inside.epochs" in after and "CREATE INDEX epochs_id" in after
    assert "ALTER TABLE inside.epochs ENABLE ROW LEVEL SECURITY;" in after and "CREATE TRIGGER told" in after
    assert "CREATE POLICY visible ON tensile.jobs USING (tensile._same(id) = 2);" in after
    assert "CREATE AGGREGATE tensile._sum" in after


def test_tables_that_stay_or_are_moved_by_hand_are_not_created() -> None:
    text = upgrade()
    assert "CREATE TABLE tensile.jobs" not in text and "old_place (id" not in text and "jobs_kind" not in text


def test_statements_behind_the_line_follow_the_new_objects() -> None:
    _, after = before_and_after(upgrade(f"{BY_HAND}\n-- Behind the new objects\nINSERT INTO inside.epochs VALUES (1);"))
    assert after.endswith("INSERT INTO inside.epochs VALUES (1);\n")


def test_a_view_that_differs_in_white_space_only_stays() -> None:
    assert "stays" not in upgrade()


def test_psql_refuses_the_script() -> None:
    assert upgrade().startswith(f"{GUARD}\n\nDROP VIEW")
