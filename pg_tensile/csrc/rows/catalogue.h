/*
 * catalogue.h: reading the tables of models, whoever the current user is.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_CATALOGUE_H
#define TENSILE_CATALOGUE_H

#include "access/htup.h"
#include "access/tupdesc.h"
#include "nodes/pg_list.h"

/* ---- rows of a table, by an index and with the active snapshot ---- */

typedef struct CatalogueKey
{
	const char *column;
	Oid			equal;			/* OID of its function */
	Datum		value;
} CatalogueKey;

typedef struct CatalogueRow
{
	HeapTuple	tuple;
	TupleDesc	desc;
} CatalogueRow;

/* The first row with these keys, which begin the index; NULL: there is none. */
extern CatalogueRow *catalogue_row(const char *table, const char *index, const CatalogueKey *keys,
								   int nkeys);

/* All of them. */
extern List *catalogue_rows(const char *table, const char *index, const CatalogueKey *keys,
							int nkeys);

/* A column's value; 0 if it is null. */
extern Datum catalogue_value(const CatalogueRow *row, const char *column);
extern bool catalogue_is_null(const CatalogueRow *row, const char *column);

/* ---- queries ---- */

typedef struct CatalogueAccess
{
	Oid			user;			/* whose rights return at the end */
	int			security_context;
	int			nest_level;		/* of settings */
} CatalogueAccess;

/*
 * Connects to SPI with the rights of the tables' owner and a safe search_path;
 * the active snapshot stays as it is.  Errors in between undo it.
 */
extern CatalogueAccess catalogue_open(void);
extern void catalogue_close(const CatalogueAccess *access);

/*
 * Executes a SELECT with parameters and returns the number of rows, which are
 * in SPI_tuptable.  `nulls` is as for SPI_execute_with_args.
 */
extern uint64 catalogue_select(const char *query, int nargs, Oid *types, Datum *arguments,
							   const char *nulls);

#endif
