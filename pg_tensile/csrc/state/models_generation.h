/*
 * models_generation.h: whether what a session has read about models is what
 * the present statement sees.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODELS_GENERATION_H
#define TENSILE_MODELS_GENERATION_H

/*
 * A state of the tables of models, as a snapshot shows it.  What was read
 * under a view is valid for all statements with the same view.
 */
typedef struct ModelsView
{
	uint64		generation;		/* rises when models have changed */
	uint64		snapshot;		/* 0: any that is as new as this generation */
} ModelsView;

/* That of the active snapshot.  Get it before reading the tables. */
extern ModelsView tensile_models_view(void);

static inline bool
tensile_same_view(ModelsView view, ModelsView other)
{
	return view.generation == other.generation && view.snapshot == other.snapshot;
}

/* This transaction has changed models, or a part of it that did was rolled back. */
extern void tensile_models_changed_here(void);

/* This transaction, which has changed models, is about to be committed. */
extern void tensile_models_committing(void);

/* It has ended.  `changed`: it has committed a change of models. */
extern void tensile_models_transaction_ended(bool changed);

/*
 * Remembers the OID of tensile_internal.models, whenever models are read: from then on
 * invalidations of that table change the generation, too.
 */
extern void tensile_watch_models(Oid relation);

extern void tensile_watch_invalidations(void);

#endif
