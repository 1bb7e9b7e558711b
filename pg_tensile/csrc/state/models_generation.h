/*
 * models_generation.h: a number that changes whenever models may have changed.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODELS_GENERATION_H
#define TENSILE_MODELS_GENERATION_H

/*
 * The generation of models, as this transaction sees them.  Read it before
 * the tables: what was read with generation g is valid as long as this
 * returns g, unless a REPEATABLE READ snapshot older than g was used.
 */
extern uint64 tensile_models_generation(void);

/* Changes the generation for this session only. */
extern void tensile_models_changed_here(void);

/*
 * Remembers the OID of tensile_internal.models, whenever models are read: from then on
 * invalidations of that table change the generation, too.
 */
extern void tensile_watch_models(Oid relation);

extern void tensile_watch_invalidations(void);

#endif
