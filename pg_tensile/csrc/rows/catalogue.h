/*
 * catalogue.h: reading the tables of models by SPI, with the rights of their
 * owner.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_CATALOGUE_H
#define TENSILE_CATALOGUE_H

#include "postgres_ext.h"

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
