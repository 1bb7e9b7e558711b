/*
 * device.h: devices that jobs and predictions use, in shared memory, and the
 * memory that each of them has.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_DEVICE_H
#define TENSILE_DEVICE_H

#include "state/slot.h"

#define TENSILE_HOST_DEVICE "cpu"

/* Devices in use at once, besides one for each job. */
#define TENSILE_MORE_DEVICES 16

/* Waiting jobs of a device for which idle models may be dropped. */
#define TENSILE_MAX_LACKING 8

/*
 * Begins the name of a job's device on a Ray cluster, before the job's number.
 * tensile_internal._on_cluster in sql/ and pyworker/cluster_device.py have the same rule.
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
	int64		slowed_bytes;	/* and what running jobs lack to lose no time, */
	int64		lacking_beside; /* beside these bytes of the predictor; */
	uint64		lacking_number; /* rises with each decision of the scheduler */
	int64		reserved_bytes; /* held back for a waiting constant grant */
	TimestampTz reserved_until; /* when that reservation expires */
} TensileDevice;

/* Callers of these hold shared->lock, and of the last one exclusively. */

/*
 * The part of the memory that jobs and the predictor may use together: on a
 * cluster all of it.
 */
extern int64 tensile_device_budget(const TensileDevice *device);

/* The memory that images take of the host (images.c), and of no other device. */
extern int64 tensile_device_images_bytes(const TensileDevice *device);

/* Constant grants and overheads of the jobs on a device, and its images. */
extern int64 tensile_device_constant_bytes(int device);

/* The number of jobs on a device, in all databases. */
extern int	tensile_device_jobs(int device);

/*
 * The part of its budget that jobs whose memory flows have together: now, or
 * for an iteration that begins.
 */
extern int64 tensile_device_flow_budget(int device, bool begins);

/*
 * The entry of the device with that name.  If there is none, names an entry
 * that no job uses, or only the one of `slot` (if not NULL); 54000 if all are
 * in use.
 */
extern int	tensile_device_enter(const char *name, const TensileSlot *slot);

/* These need no lock. */

/* A device's name from an argument, cut to fit. */
extern char *tensile_device_name(const text *argument);

/* Is a device of that name one of a Ray cluster, and none of this machine? */
extern bool tensile_device_on_cluster(const char *name);

/* The most memory that a device of this name can have; known for the host. */
extern int64 tensile_device_most_bytes(const char *name);

/* Can a device have these numbers, and a trainer this overhead on it? */
extern bool tensile_device_possible(const char *name, const TensileDevice *device,
									int64 overhead_bytes);

#endif
