/*
 * guc.c: every setting of pg_tensile, and nothing else that could be set.
 *
 * Settings that size shared memory are fixed at server start and exist only when the library is preloaded. Those that a
 * job's own session can't decide (interpreter, device, memory) belong to postgresql.conf: a reload is enough, because
 * supervisors read them when they start something.
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"

#include "guc.h"
#include "slot.h"

#ifndef PG_TENSILE_PYTHON
#define PG_TENSILE_PYTHON "python3"
#endif

char	   *tensile_database = NULL;
char	   *tensile_python = NULL;
char	   *tensile_device = NULL;
int			tensile_device_memory = 0;
int			tensile_max_jobs = 16;
int			tensile_plan_events = 65536;
int			tensile_policy = TENSILE_POLICY_JOINT;
int			tensile_dataset_cache = 1024;
int			tensile_checkpoint_interval = 60;
static int	tensile_max_state_size = 65536;
static int	tensile_job_retention = 0;
int			tensile_max_retries = 2;
int			tensile_predict_timeout = 30000;
int			tensile_predict_spin = 150;
int			tensile_threads = 0;
int			tensile_ageing = 300;
int			tensile_model_cache = 1024;
int			tensile_executor_timeout = 300;
double		tensile_update_threshold = 0.2;
double		tensile_latency_weight = 0.2;
int			tensile_host_memory = 0;
int			tensile_search_time = 30;
int			tensile_search_processes = 0;
bool		tensile_log_jobs = true;
int			tensile_nice = 0;
int			tensile_child_memory = 0;

static const struct config_enum_entry policies[] = {
	{"none", TENSILE_POLICY_NONE, false},
	{"tensile", TENSILE_POLICY_TENSILE, false},
	{"joint", TENSILE_POLICY_JOINT, false},
	{"swapadvisor", TENSILE_POLICY_SWAPADVISOR, false},
	{NULL, 0, false}
};

/* auto, cpu, cuda or cuda:N */
static bool
check_device(char **newval, void **extra, GucSource source)
{
	const char *number = *newval + strlen("cuda:");

	if (strcmp(*newval, "auto") == 0 || strcmp(*newval, "cpu") == 0 || strcmp(*newval, "cuda") == 0)
		return true;
	if (strncmp(*newval, "cuda:", strlen("cuda:")) == 0 && *number != '\0' && strlen(number) <= 3 &&
		strspn(number, "0123456789") == strlen(number))
		return true;
	GUC_check_errdetail("Valid values are \"auto\", \"cpu\", \"cuda\", and \"cuda:N\" with the number N of the device.");
	return false;
}

static bool
check_python(char **newval, void **extra, GucSource source)
{
	if (**newval != '\0')
		return true;
	GUC_check_errdetail("The name or path of a Python interpreter is needed.");
	return false;
}

/* What sizes shared memory. */
static void
define_startup_settings(void)
{
	DefineCustomIntVariable("pg_tensile.max_jobs",
							"Sets how many training jobs may run at once.",
							"Each one needs a background worker (max_worker_processes).",
							&tensile_max_jobs, 16, 1, TENSILE_MAX_JOBS, PGC_POSTMASTER, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.plan_events",
							"Sets how many events the plan of one job may have.",
							"Each takes 32 bytes of shared memory for each of pg_tensile.max_jobs.",
							&tensile_plan_events, 65536, 1024, 1048576, PGC_POSTMASTER, 0, NULL, NULL, NULL);
}

/* Where jobs run: processes, interpreter, device. */
static void
define_place_settings(void)
{
	DefineCustomStringVariable("pg_tensile.database",
							   "Sets the database whose models are trained and served.",
							   "Empty: none, and no process of pg_tensile but the launcher runs.",
							   &tensile_database, "postgres", PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("pg_tensile.python",
							   "Sets the Python interpreter that runs PyTorch.",
							   "A name looked up in the server's PATH, or a path that the server's operating-system user can follow.",
							   &tensile_python, PG_TENSILE_PYTHON, PGC_SIGHUP, 0, check_python, NULL, NULL);
	DefineCustomStringVariable("pg_tensile.device",
							   "Sets the device that models are trained on: auto, cpu, cuda or cuda:N.",
							   "auto: the first CUDA device if there is one, else the CPU.",
							   &tensile_device, "auto", PGC_SIGHUP, 0, check_device, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.device_memory",
							"Sets how much memory of a device jobs and predictions together may use.",
							"0: all of it.",
							&tensile_device_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_KB, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.threads",
							"Sets how many threads each executor computes with.",
							"0: the processor cores but one, divided by the jobs that run.",
							&tensile_threads, 0, 0, 1024, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.dataset_cache",
							"Sets how much training data a job keeps in memory.",
							"More is spooled to memory-mapped files.",
							&tensile_dataset_cache, 1024, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.model_cache",
							"Sets how much memory the predictor keeps models in.",
							"The least recently used models are dropped and loaded again when needed.",
							&tensile_model_cache, 1024, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL, NULL, NULL);
}

/* What the operating system lets child processes take. */
static void
define_child_settings(void)
{
	DefineCustomIntVariable("pg_tensile.nice",
							"Sets by how much the processes that train and plan give way to others.",
							"The nice value that is added to the server's; the predictor has the server's.",
							&tensile_nice, 0, 0, 19, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.child_memory",
							"Sets how much private memory of the host each child process may allocate.",
							"0: as much as there is. Mapped files and device memory do not count.",
							&tensile_child_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL, NULL, NULL);
}

/* When jobs start, save, give up. */
static void
define_job_settings(void)
{
	DefineCustomIntVariable("pg_tensile.checkpoint_interval",
							"Sets the least time between checkpoints of a job.",
							"Where writing one takes long, they are further apart. 0: between epochs only.",
							&tensile_checkpoint_interval, 60, 0, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.max_state_size",
							"Sets the largest checkpoint, and the largest weights, that a job may store.",
							"A job that has more fails.",
							&tensile_max_state_size, 65536, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.job_retention",
							"Sets how long ended jobs are kept, with their metrics.",
							"Those whose version of a model exists are kept longer. 0: for ever.",
							&tensile_job_retention, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.max_retries",
							"Sets how often a job is tried again after its executor died.",
							"A new checkpoint starts the count again.",
							&tensile_max_retries, 2, 0, 100, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("pg_tensile.log_jobs",
							 "Logs each job when it is submitted, starts, is interrupted and ends.",
							 NULL,
							 &tensile_log_jobs, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.executor_timeout",
							"Sets how long a child process may be silent before it counts as hung and is killed.",
							"0: without limit.",
							&tensile_executor_timeout, 300, 0, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.ageing",
							"Sets the time in the queue that is worth one step of priority.",
							"After that time nobody passes a job that waits for memory, either. 0: never.",
							&tensile_ageing, 300, 0, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.predict_timeout",
							"Sets how long a prediction may take, loading the model included.",
							"Starting the predictor is part of it.",
							&tensile_predict_timeout, 30000, 1, INT_MAX, PGC_USERSET, GUC_UNIT_MS, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.predict_spin",
							"Sets for how many microseconds a session watches for the predictor's answer before it sleeps.",
							"Only while answers come that fast. 0: it always sleeps.",
							&tensile_predict_spin, 150, 0, 10000, PGC_USERSET, 0, NULL, NULL, NULL);
}

/* How device memory is planned. */
static void
define_plan_settings(void)
{
	DefineCustomEnumVariable("pg_tensile.policy",
							 "Sets the policy that plans device memory for jobs that name none.",
							 "joint and tensile swap and recompute, swapadvisor searches besides for a better order and plan; none trains as PyTorch does.",
							 &tensile_policy, TENSILE_POLICY_JOINT, policies, PGC_USERSET, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("pg_tensile.update_threshold",
							 "Sets the relative change of a job's measured latency that makes a new plan.",
							 "0.2: a training step that takes 20 % more or less time than planned.",
							 &tensile_update_threshold, 0.2, 0.01, 10, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("pg_tensile.latency_weight",
							 "Sets the weight of a new measurement in an operator's average latency.",
							 "1: the last measurement alone counts.",
							 &tensile_latency_weight, 0.2, 0.001, 1, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.host_memory",
							"Sets how much host memory the swapped tensors of all jobs together may use.",
							"0: half of the machine's.",
							&tensile_host_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.search_time",
							"Sets how long the policy swapadvisor searches for a better plan of a job.",
							"The job trains meanwhile, under the best plan so far; its option search_time counts instead.",
							&tensile_search_time, 30, 1, 86400, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.search_processes",
							"Sets how many processes search for a better plan at once.",
							"0: one for each processor core.",
							&tensile_search_processes, 0, 0, 1024, PGC_SIGHUP, 0, NULL, NULL, NULL);
}

void
tensile_define_settings(void)
{
	if (process_shared_preload_libraries_in_progress)
		define_startup_settings();
	define_place_settings();
	define_child_settings();
	define_job_settings();
	define_plan_settings();
	MarkGUCPrefixReserved("pg_tensile");
}
