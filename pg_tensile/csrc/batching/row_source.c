/*
 * row_source.c: where the row of a call comes from.
 *
 * Features come from the columns of a tuple where a call has a whole row of a
 * table or a row expression: then no composite value is made.  Any other row
 * is evaluated to a value, and read as predict does.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "nodes/makefuncs.h"
#include "utils/jsonb.h"
#include "utils/typcache.h"

#include "base/compat.h"
#include "batching/functions.h"
#include "batching/row_source.h"
#include "predicting/predict_site.h"
#include "rows/model.h"
#include "rows/predict_features_tuple.h"

struct RowSource
{
	CallRow		form;
	PlanState  *node;
	ExprContext *econtext;		/* of the row */
	ExprState  *value;			/* NULL: the row is made of columns */

	/* Columns: of a table, in the slot of the input, or of a row expression. */
	TupleDesc	desc;			/* NULL: the row is a value */
	ProjectionInfo *fields;		/* of a row expression; NULL: of a table */
	FeatureSource *features;	/* in the site's context */
	int			last_column;	/* that the features come from */
};

/* Is it the row of all columns of a table, which the input returns first? */
static bool
is_row_of_table(const Expr *row)
{
	return IsA(row, Var) && ((const Var *) row)->varno == OUTER_VAR &&
		((const Var *) row)->varattno == InvalidAttrNumber;
}

/* The columns of a row that is not a value; sets how they are computed. */
static void
create_columns(RowSource *self, Expr *row)
{
	if (is_row_of_table(row))
	{
		TupleDesc	desc = lookup_rowtype_tupdesc(((Var *) row)->vartype, -1);

		self->desc = CreateTupleDescCopy(desc);
		ReleaseTupleDesc(desc);
	}
	else if (IsA(row, RowExpr) && ((RowExpr *) row)->row_typeid == RECORDOID)
	{
		RowExpr    *expression = (RowExpr *) row;
		List	   *target = NIL;
		ListCell   *cell;

		self->desc = ExecTypeFromExprList(expression->args);
		ExecTypeSetColNames(self->desc, expression->colnames);
		foreach(cell, expression->args)
			target = lappend(target, makeTargetEntry(lfirst(cell), list_length(target) + 1, NULL,
													 false));
		self->fields = ExecBuildProjectionInfo(target, self->econtext,
											   MakeSingleTupleTableSlot(self->desc, &TTSOpsVirtual),
											   self->node, NULL);
	}
	else
		self->value = ExecInitExpr(row, self->node);
}

RowSource *
row_source_create(const FuncExpr *call, CallRow form, PlanState *node, ExprContext *econtext)
{
	RowSource  *self = palloc0(sizeof(RowSource));

	self->form = form;
	self->node = node;
	self->econtext = econtext;
	create_columns(self, row_of_call(call));
	return self;
}

Expr *
row_source_call(const FuncExpr *call)
{
	FuncExpr   *copy = copyObject((FuncExpr *) call);
	Var		   *row = (Var *) row_of_call(call);
	RowExpr    *value;
	TupleDesc	desc;

	if (!is_row_of_table((Expr *) row))
		return (Expr *) copy;
	value = makeNode(RowExpr);
	value->row_typeid = row->vartype;
	value->row_format = COERCE_IMPLICIT_CAST;
	value->location = -1;
	desc = lookup_rowtype_tupdesc(row->vartype, -1);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(desc, i);

		value->args = lappend(value->args, attribute->attisdropped ?
							  (Node *) makeNullConst(INT4OID, -1, InvalidOid) :
							  (Node *) makeVar(OUTER_VAR, i + 1, attribute->atttypid,
											   attribute->atttypmod, attribute->attcollation, 0));
	}
	ReleaseTupleDesc(desc);
	lfirst(list_nth_cell(copy->args, ROW_ARGUMENT)) = value;
	return (Expr *) copy;
}

void
row_source_open(RowSource *self, const CallSite *site)
{
	const FeatureSet *set = &site->model->features;

	if (self->desc == NULL)
		return;
	self->features = feature_sources_create(set, self->desc, site->context);
	self->last_column = 0;
	for (int i = 0; i < set->count; i++)
		self->last_column = Max(self->last_column, self->features[i].attribute + 1);
}

/* Packs the columns of a tuple. */
static void
add_columns(RowSource *self, CallSite *site)
{
	TupleTableSlot *slot;

	if (self->fields != NULL)
		slot = ExecProject(self->fields);
	else
	{
		slot = self->econtext->ecxt_outertuple;
		slot_getsomeattrs(slot, self->last_column);
	}
	feature_batch_add_tuple(site->batch, self->features, slot->tts_values, slot->tts_isnull);
}

/* Packs a value; false: it is null. */
static bool
add_value(RowSource *self, CallSite *site)
{
	bool		isnull;
	Datum		value = ExecEvalExprSwitchContext(self->value, self->econtext, &isnull);
	MemoryContext old;

	if (isnull)
		return false;
	old = MemoryContextSwitchTo(self->econtext->ecxt_per_tuple_memory);
	switch (self->form)
	{
		case ROW_RECORD:
			predict_site_pack_record(site, DatumGetHeapTupleHeader(value));
			break;
		case ROW_NUMBERS:
			predict_site_pack_numbers(site, DatumGetArrayTypeP(value));
			break;
		case ROW_OBJECT:
			predict_site_pack_object(site, DatumGetJsonbP(value));
			break;
		case ROW_TEXT:
			predict_site_pack_text(site, DatumGetTextPP(value));
			break;
	}
	MemoryContextSwitchTo(old);
	return true;
}

bool
row_source_pack(RowSource *self, CallSite *site)
{
	if (self->desc == NULL)
		return add_value(self, site);
	add_columns(self, site);
	return true;
}
