/*
 * job_change.h: sessions that wait for a change of a job.
 */
#ifndef TENSILE_JOB_CHANGE_H
#define TENSILE_JOB_CHANGE_H

/* Wakes the sessions in tensile._wait_for_change. */
extern void tensile_wake_readers(void);

#endif
