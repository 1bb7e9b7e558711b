/*
 * progress.h: the progress of a job in shared memory.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PROGRESS_H
#define TENSILE_PROGRESS_H

#include "datatype/timestamp.h"

#define TENSILE_PHASE_LENGTH 32
#define TENSILE_REPORTED_UTILISATION (1 << 12)	/* in TensileProgress.reported */

typedef struct TensileProgress
{
	uint32		reported;		/* bit i: argument i of tensile_worker._report was given */
	char		phase[TENSILE_PHASE_LENGTH];
	int32		epoch;
	int32		epochs;
	int64		step;
	int64		steps;
	float8		loss;
	float8		samples_per_s;
	int64		device_bytes;
	int64		device_peak_bytes;
	int64		bytes_swapped;
	int64		stall_us;
	int64		passive_swap_ins;
	float8		utilisation;	/* of the device by others than this job, 0 to 1 */
	int64		raw_bytes_swapped;	/* bytes_swapped without compression */
	float8		time_left_s;	/* seconds until the job ends, at most */
	float8		least_time_left_s;	/* and at least */
	TimestampTz heartbeat;		/* of the last report; 0: none yet */
} TensileProgress;

#endif
