/*
 * plan.h: plans of device memory as they lie in shared memory.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PLAN_H
#define TENSILE_PLAN_H

typedef struct TensilePlanHeader
{
	uint64		generation;		/* 0: no plan; rises while the slot is the job's */
	int64		planned_bytes;	/* device peak of the plan, with workspaces */
	int64		granted_bytes;	/* that the trainer may use: >= planned_bytes */
	float8		link_share;		/* of the link to the host, 0 to 1, assumed by the plan */
	uint32		nevents;
	uint32		ngroups;		/* group rows, behind the event rows; 0: the grant is
								 * constant */
	uint32		nordered;		/* operators of the order, int32 each, behind the
								 * group rows; 0: in the order of the trace */
} TensilePlanHeader;

/* One event of a plan; the same bytes in shared memory and in PLAN frames. */
typedef struct TensilePlanEvent
{
	uint8		kind;			/* 1 swap_out, 2 swap_in, 3 recompute, 4 release */
	uint8		codec;			/* of a swap_out: 0 none, 1 zvc, 2 rle, 3 csr, 4 lz4 */
	uint8		zero[2];
	int32		tensor;
	int32		version;
	int32		trigger_operator;	/* index into the order if the plan has one */
	int32		delay_us;
	int32		deadline_operator;	/* index as above */
	int64		bytes;
} TensilePlanEvent;

StaticAssertDecl(sizeof(TensilePlanEvent) == 32, "event rows are sent as they are");

/* Consecutive steps, before which a job asks for memory; sent as they are, too. */
typedef struct TensilePlanGroup
{
	int32		first;			/* step */
	int32		last;
	int32		first_operator; /* as captured */
	int32		last_operator;
	int64		most_bytes;		/* that the job takes during the group */
	int64		rest_bytes;		/* that it keeps after it */
} TensilePlanGroup;

StaticAssertDecl(sizeof(TensilePlanGroup) == sizeof(TensilePlanEvent),
				 "groups and events are rows of one table");

/* The group rows of a plan, and its order; `events` are all rows. */
static inline TensilePlanGroup *
tensile_plan_groups(const TensilePlanHeader *header, TensilePlanEvent *events)
{
	return (TensilePlanGroup *) (events + header->nevents);
}

static inline int32 *
tensile_plan_order(const TensilePlanHeader *header, TensilePlanEvent *events)
{
	return (int32 *) (tensile_plan_groups(header, events) + header->ngroups);
}

/* Bytes of all rows and the order. */
static inline Size
tensile_plan_bytes(const TensilePlanHeader *header)
{
	return (header->nevents + header->ngroups) * sizeof(TensilePlanEvent) +
		header->nordered * sizeof(int32);
}

#endif
