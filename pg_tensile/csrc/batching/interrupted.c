/*
 * interrupted.c: nodes of a running plan in which an error has been caught.
 *
 * They are not asked for rows again but after a rescan.  A node that keeps what
 * it has collected, such as the table of a hash join, would go on with a part of
 * it then.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "executor/instrument.h"
#include "nodes/nodeFuncs.h"

#include "base/compat.h"
#include "batching/interrupted.h"
#include "batching/node.h"

static bool
has_workers(PlanState *node, void *context)
{
	return IsA(node, GatherState) || IsA(node, GatherMergeState) ||
		planstate_tree_walker(node, has_workers, context);
}

bool
computed_by_workers(PlanState *node)
{
	return has_workers(node, NULL);
}

static bool
stop_measurement(PlanState *node, void *context)
{
	if (node->instrument != NULL && tensile_is_measuring(node->instrument))
		InstrStopNode(node->instrument, 0);
	return planstate_tree_walker(node, stop_measurement, context);
}

void
stop_measurements(PlanState *node)
{
	(void) stop_measurement(node, NULL);
}

static bool
keeps_what_it_has(PlanState *node, void *context)
{
	if (node->initPlan != NIL || node->subPlan != NIL)
		return true;
	switch (nodeTag(node))
	{
		case T_SeqScanState:
		case T_SampleScanState:
		case T_IndexScanState:
		case T_IndexOnlyScanState:
		case T_BitmapHeapScanState:
		case T_BitmapIndexScanState:
		case T_BitmapAndState:
		case T_BitmapOrState:
		case T_TidScanState:
		case T_TidRangeScanState:
		case T_SubqueryScanState:
		case T_FunctionScanState:
		case T_ValuesScanState:
		case T_NamedTuplestoreScanState:
		case T_ForeignScanState:
		case T_NestLoopState:
		case T_MergeJoinState:
		case T_LimitState:
		case T_ResultState:
		case T_AppendState:
		case T_UniqueState:
			return planstate_tree_walker(node, keeps_what_it_has, context);
		case T_CustomScanState:
			return !is_predict_node(node->plan) ||
				planstate_tree_walker(node, keeps_what_it_has, context);
		default:
			return true;
	}
}

bool
rescan_starts_anew(PlanState *node)
{
	return !keeps_what_it_has(node, NULL);
}
