/*
 * guc.h: settings of pg_tensile that C reads.  guc.c defines all of them.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_GUC_H
#define TENSILE_GUC_H

#define TENSILE_MAX_JOBS 256	/* upper limit of pg_tensile.max_jobs */

extern char *tensile_database;
extern char *tensile_python_path;	/* empty: beside the library */
extern int	tensile_device_memory;	/* kB; 0 = all of it */
extern int	tensile_max_jobs;
extern int	tensile_plan_events;
extern int	tensile_predict_timeout;	/* ms */
extern int	tensile_predict_spin;	/* us; 0 = never */
extern bool tensile_predict_in_session;
extern bool tensile_predict_batching;
extern int	tensile_model_cache;	/* MB */
extern double tensile_drift_sample_rate;
extern int	tensile_executor_timeout;	/* s; 0 = never */
extern int	tensile_flow_timeout;	/* s; 0 = never */
extern bool tensile_log_jobs;

extern void tensile_define_settings(void);

#endif
