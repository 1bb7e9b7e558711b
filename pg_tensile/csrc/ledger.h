/*
 * ledger.h: the device ledger, which divides the memory of each device among
 * jobs and predictions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_LEDGER_H
#define TENSILE_LEDGER_H

#include "slot.h"

/* Devices in use at once, besides one for each job. */
#define TENSILE_MORE_DEVICES 16

/* Waiting jobs of a device for which idle models may be dropped. */
#define TENSILE_MAX_LACKING 8

/*
 * Begins the name of a job's device on a Ray cluster, before the job's number.
 * tensile._on_cluster in sql/ and pyworker/cluster_device.py have the same rule.
 */
#define TENSILE_CLUSTER_PREFIX "ray:"

typedef struct TensileDevice
{
	char		name[NAMEDATALEN];	/* "": free entry */
	int64		total_bytes;	/* 0: not known yet */
	float8		out_bytes_per_s;	/* over the link to the host and back; */
	float8		in_bytes_per_s; /* 0: no job has used the device yet */
	int64		inference_bytes;	/* taken by the predictor */
	int64		inference_wanted;	/* that the predictor waits for; 0: nothing */
	int64		claimed_bytes;	/* that it has waited for in vain, */
	TimestampTz claimed_since;	/* for the first time and */
	TimestampTz claimed_until;	/* as long as no later job comes first */
	int64		yielded_bytes;	/* that idle models have given up for jobs, */
	TimestampTz yielded_until;	/* and for how long no prediction takes them */
	int			nlacking;		/* waiting jobs to which idle models may give way, */
	int64		lacking[TENSILE_MAX_LACKING];	/* what each of them lacks, in bytes, */
	int64		slowed_bytes;	/* and what running jobs lack to lose no time; */
	uint64		lacking_number; /* rises with each decision of the scheduler */
	int64		reserved_bytes; /* held back for a waiting constant grant */
	TimestampTz reserved_until; /* when that reservation expires */
} TensileDevice;

/* Callers of these hold shared->lock exclusively, or shared for the first two. */

/*
 * The part of the memory that jobs and the predictor may use together: on a
 * cluster all of it.
 */
extern int64 tensile_device_budget(const TensileDevice *device);

/*
 * The part of it that jobs whose memory flows have together: now, or for an
 * iteration that begins.
 */
extern int64 tensile_ledger_flow_budget(int device, bool begins);

/*
 * Grants device memory to the slot; false, and no change, without room for it.
 * A job whose memory flows gets nothing, and needs nothing.
 */
extern bool tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes);

/* Removes the predictor's entries, when the predictor has ended. */
extern void tensile_ledger_forget_inference(void);

#endif
