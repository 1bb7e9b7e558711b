/*
 * guc.h: the settings of pg_tensile, as guc.c defines them.
 */
#ifndef TENSILE_GUC_H
#define TENSILE_GUC_H

typedef enum TensilePolicy
{
	TENSILE_POLICY_NONE,
	TENSILE_POLICY_TENSILE,
	TENSILE_POLICY_JOINT,
	TENSILE_POLICY_SWAPADVISOR
} TensilePolicy;

extern char *tensile_database;
extern char *tensile_python;
extern char *tensile_device;
extern int	tensile_device_memory;	/* kB; 0 = all of it */
extern int	tensile_max_jobs;
extern int	tensile_plan_events;
extern int	tensile_policy;		/* TensilePolicy */
extern int	tensile_dataset_cache;	/* MB */
extern int	tensile_checkpoint_interval;	/* s; 0 = between epochs only */
extern int	tensile_max_retries;
extern int	tensile_predict_timeout;	/* ms */
extern int	tensile_predict_spin;	/* us; 0 = never */
extern int	tensile_threads;	/* 0 = cores / running jobs */
extern int	tensile_ageing;		/* s; 0 = never */
extern int	tensile_model_cache;	/* MB */
extern int	tensile_executor_timeout;	/* s; 0 = never */
extern double tensile_update_threshold; /* relative change of a job's latency */
extern double tensile_latency_weight;	/* of a new measurement in the average */
extern int	tensile_host_memory;	/* MB; 0 = half of the machine's */
extern int	tensile_search_time;	/* s */
extern int	tensile_search_processes;	/* 0 = cores */
extern bool tensile_log_jobs;
extern int	tensile_nice;
extern int	tensile_child_memory;	/* MB; 0 = no limit */

extern void tensile_define_settings(void);

#endif
