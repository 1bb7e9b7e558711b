/*
 * job_change.h: sessions that wait for a change of a job.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_JOB_CHANGE_H
#define TENSILE_JOB_CHANGE_H

/* Wakes the sessions in tensile._wait_for_change. */
extern void tensile_announce_job_change(void);

#endif
