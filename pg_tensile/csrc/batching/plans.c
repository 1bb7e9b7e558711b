/*
 * plans.c: all nodes of a plan.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "nodes/pg_list.h"

#include "batching/plans.h"

typedef void (*PlanVisitor) (const Plan *plan, void *context);

static void visit_plan(const Plan *plan, PlanVisitor visitor, void *context);

static void
visit_plans(const List *plans, PlanVisitor visitor, void *context)
{
	ListCell   *cell;

	foreach(cell, plans)
		visit_plan(lfirst(cell), visitor, context);
}

static void
visit_plan(const Plan *plan, PlanVisitor visitor, void *context)
{
	if (plan == NULL)
		return;
	check_stack_depth();
	visitor(plan, context);
	visit_plan(plan->lefttree, visitor, context);
	visit_plan(plan->righttree, visitor, context);
	switch (nodeTag(plan))
	{
		case T_SubqueryScan:
			visit_plan(((const SubqueryScan *) plan)->subplan, visitor, context);
			break;
		case T_Append:
			visit_plans(((const Append *) plan)->appendplans, visitor, context);
			break;
		case T_MergeAppend:
			visit_plans(((const MergeAppend *) plan)->mergeplans, visitor, context);
			break;
		case T_BitmapAnd:
			visit_plans(((const BitmapAnd *) plan)->bitmapplans, visitor, context);
			break;
		case T_BitmapOr:
			visit_plans(((const BitmapOr *) plan)->bitmapplans, visitor, context);
			break;
		case T_CustomScan:
			visit_plans(((const CustomScan *) plan)->custom_plans, visitor, context);
			break;
		default:
			break;
	}
}

static void
visit_statement(const PlannedStmt *statement, PlanVisitor visitor, void *context)
{
	visit_plan(statement->planTree, visitor, context);
	visit_plans(statement->subplans, visitor, context);
}

static void
note_id(const Plan *plan, void *context)
{
	int		   *last = context;

	*last = Max(*last, plan->plan_node_id);
}

int
plans_last_id(const PlannedStmt *statement)
{
	int			last = 0;

	visit_statement(statement, note_id, &last);
	return last;
}

typedef struct Readers
{
	int			cte_plan;
	int			count;
} Readers;

static void
count_reader(const Plan *plan, void *context)
{
	Readers    *readers = context;

	if (IsA(plan, CteScan) && ((const CteScan *) plan)->ctePlanId == readers->cte_plan)
		readers->count++;
}

int
plans_readers(const PlannedStmt *statement, int cte_plan)
{
	Readers		readers = {cte_plan, 0};

	visit_statement(statement, count_reader, &readers);
	return readers.count;
}
