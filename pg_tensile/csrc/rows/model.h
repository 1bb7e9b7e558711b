/*
 * model.h: what a session knows about models that it predicts with.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MODEL_H
#define TENSILE_MODEL_H

#include "evaluator/task.h"
#include "rows/predict_features.h"

#define NO_VERSION (-1)

/* A role as the tables store it.  InvalidOid: PUBLIC in a grant, no owner. */
typedef struct ModelRole
{
	Oid			oid;
	const char *name;
} ModelRole;

/* A version of a model, usually the deployed one. */
typedef struct PredictModel
{
	const char *name;
	int64		id;
	int64		base;			/* the predictor's number of it without a version */
	int64		version;		/* model_versions.id, or NO_VERSION */
	int64		weight_bytes;	/* of the version's file of weights */
	uint64		identity;		/* a hash of what is stored with the version, but for weights */
	bool		evaluated;		/* is of a kind that the evaluator may have */
	bool		pretrained;		/* is a pretrained transformer, which embeds texts */
	ModelRole	owner;
	int			ngrants;
	ModelRole  *grants;			/* roles that may predict besides the owner */
	ModelTask	task;
	const char *target;			/* name of the column */
	bool		numeric_labels;
	int			nlabels;
	const char **labels;		/* in the server's encoding */
	FeatureSet	features;
	int64		memory_budget;	/* set by its owner; 0: none */
	int32		number;			/* of the version, that users know; 0: none */
	int			users;			/* contexts of calls that it is kept for */
	bool		forgotten;		/* it goes with its last user */
	MemoryContext context;
} PredictModel;

/*
 * The model as the active snapshot shows it, kept for the session.  The result
 * is valid until `call_context` ends.  Raises 42704, 42501 or 55000 if the
 * model does not exist, is not granted or has no version.
 */
extern PredictModel *predict_model_get(const char *name, MemoryContext call_context);

/* The same, but the model may have no version. */
extern PredictModel *predict_model_find(const char *name, MemoryContext call_context);

/* A copy of the caller's own, in `context`. */
extern PredictModel *predict_model_load(const char *name, MemoryContext context);

/* The same for this version (42704 if there is none), or the deployed one (0). */
extern PredictModel *predict_model_load_version(const char *name, int32 version,
												MemoryContext context);

/*
 * A version by its id in model_versions, without a check of privileges and
 * without the model's name, for the worker of a job that trains the model.
 */
extern PredictModel *predict_model_load_id(int64 version_id, MemoryContext context);

/*
 * Is the version left to the evaluator (evaluator.h), which may still find it
 * unsuitable?
 */
extern bool predict_model_is_evaluated(const PredictModel *model);

/* Raises 42501 unless the current user may predict with it; cheap. */
extern void predict_model_check_privilege(const PredictModel *model);

#endif
