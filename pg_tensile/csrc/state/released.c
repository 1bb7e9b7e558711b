/*
 * released.c: functions that the scripts of released versions create, and that
 * later versions do not have.
 *
 * A dump of an older version is restored into a database with the extension of
 * that version, which is updated then.  CREATE FUNCTION looks for them in the
 * library; nothing calls them before the update.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "fmgr.h"

#include "state/extension.h"

#define TENSILE_RELEASED_FUNCTION(name) \
	PG_FUNCTION_INFO_V1(name); \
	Datum \
	name(PG_FUNCTION_ARGS) \
	{ \
		tensile_require_version(); \
		PG_RETURN_VOID(); \
	}

/* 0.1.0 */
TENSILE_RELEASED_FUNCTION(tensile_check_architecture)
TENSILE_RELEASED_FUNCTION(tensile_check_options)
TENSILE_RELEASED_FUNCTION(tensile_explain_feed)
TENSILE_RELEASED_FUNCTION(tensile_wait)
