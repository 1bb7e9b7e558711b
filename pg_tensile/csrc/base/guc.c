/*
 * guc.c: the settings of pg_tensile.
 *
 * Settings that size shared memory are fixed at server start, and exist only
 * if the library is preloaded.  Settings that users must not change, such as
 * the interpreter, the device and its memory, belong to postgresql.conf; a
 * reload suffices, because supervisors read them when they start something.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"

#include "base/guc.h"
#include "base/role_limits.h"

#ifndef PG_TENSILE_PYTHON
#define PG_TENSILE_PYTHON "python3"
#endif

#define RAY_SCHEME "ray://"

typedef enum TensilePolicy
{
	TENSILE_POLICY_NONE,
	TENSILE_POLICY_TENSILE,
	TENSILE_POLICY_JOINT,
	TENSILE_POLICY_SWAPADVISOR
} TensilePolicy;

typedef enum TensileMemoryFlow
{
	TENSILE_FLOW_OFF,
	TENSILE_FLOW_AUTO
} TensileMemoryFlow;

/* Read by other C files. */
char	   *tensile_database = NULL;
char	   *tensile_python_path = NULL;
int			tensile_device_memory = 0;
int			tensile_max_jobs = 16;
int			tensile_plan_events = 65536;
int			tensile_predict_timeout = 30000;
int			tensile_predict_spin = 400;
bool		tensile_predict_batching = true;
int			tensile_executor_timeout = 300;
int			tensile_flow_timeout = 30;
bool		tensile_log_jobs = true;

/* Read by the Python processes, through SQL. */
static char *tensile_python = NULL;
static char *tensile_device = NULL;
static char *tensile_model_path = NULL;
static char *tensile_ray_address = NULL;
static char *tensile_ray_token_file = NULL;
static int	tensile_ray_timeout = 30;
static int	tensile_policy = TENSILE_POLICY_JOINT;
static int	tensile_memory_flow = TENSILE_FLOW_AUTO;
static int	tensile_dataset_cache = 1024;
static int	tensile_checkpoint_interval = 60;
static int	tensile_max_state_size = 65536;
static int	tensile_job_retention = 90 * 86400;
static int	tensile_version_retention = 5;
static int	tensile_max_retries = 2;
static int	tensile_threads = 0;
static int	tensile_ageing = 300;
int			tensile_model_cache = 1024;
static int	tensile_model_idle = 10;
static double tensile_update_threshold = 0.2;
static double tensile_latency_weight = 0.2;
static int	tensile_host_memory = 0;
static int	tensile_search_time = 30;
static int	tensile_search_processes = 0;
double		tensile_drift_sample_rate = 0.01;
bool		tensile_predict_in_session = true;
static int	tensile_drift_window = 7 * 86400;
static int	tensile_nice = 10;
static int	tensile_child_memory = 0;
static bool tensile_fork_server = true;
static bool tensile_auto_calibrate = true;

static const struct config_enum_entry policies[] = {
	{"none", TENSILE_POLICY_NONE, false},
	{"tensile", TENSILE_POLICY_TENSILE, false},
	{"joint", TENSILE_POLICY_JOINT, false},
	{"swapadvisor", TENSILE_POLICY_SWAPADVISOR, false},
	{NULL, 0, false}
};

static const struct config_enum_entry memory_flows[] = {
	{"off", TENSILE_FLOW_OFF, false},
	{"auto", TENSILE_FLOW_AUTO, false},
	{NULL, 0, false}
};

/* Types of accelerators; "emulated" is that of the tests, which nothing installs. */
static const char *const accelerators[] = {"cuda", "emulated", NULL};

/* Accepts auto, cpu, and a type of accelerators with or without a number, as cuda:1. */
static bool
check_device(char **newval, void **extra, GucSource source)
{
	if (strcmp(*newval, "auto") == 0 || strcmp(*newval, "cpu") == 0)
		return true;
	for (const char *const *type = accelerators; *type != NULL; type++)
	{
		size_t		length = strlen(*type);
		const char *number = *newval + length + 1;

		if (strcmp(*newval, *type) == 0)
			return true;
		if (strncmp(*newval, *type, length) == 0 && (*newval)[length] == ':' &&
			*number != '\0' && strlen(number) <= 3 &&
			strspn(number, "0123456789") == strlen(number))
			return true;
	}
	GUC_check_errdetail("Valid values are \"auto\", \"cpu\", \"cuda\", and \"cuda:N\" "
						"with the number N of the device.");
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

static bool
check_path(char **newval, void **extra, GucSource source)
{
	if (**newval == '\0' || is_absolute_path(*newval))
		return true;
	GUC_check_errdetail("The path must be absolute.");
	return false;
}

/* Is this the number of a TCP port? */
static bool
is_port(const char *number)
{
	size_t		length = strlen(number);

	return length > 0 && length <= 5 && strspn(number, "0123456789") == length &&
		atoi(number) > 0 && atoi(number) <= 65535;
}

/* Is this a host's name or address, of `length` bytes?  One of IPv6 has brackets. */
static bool
is_host(const char *host, size_t length)
{
	if (length > 2 && *host == '[')
		return strspn(host + 1, "0123456789abcdefABCDEF:.") == length - 2 &&
			host[length - 1] == ']';
	return length > 0 &&
		strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") == length;
}

/* Accepts nothing, or ray://host:port. */
static bool
check_ray_address(char **newval, void **extra, GucSource source)
{
	if (**newval == '\0')
		return true;
	if (strncmp(*newval, RAY_SCHEME, strlen(RAY_SCHEME)) == 0)
	{
		const char *host = *newval + strlen(RAY_SCHEME);
		const char *colon = strrchr(host, ':');

		if (colon && is_host(host, colon - host) && is_port(colon + 1))
			return true;
	}
	GUC_check_errdetail("The address must be empty, or \"ray://host:port\" with the host and "
						"the port of Ray's client server.");
	return false;
}

/* Sizes of shared memory. */
static void
define_startup_settings(void)
{
	DefineCustomIntVariable("pg_tensile.max_jobs",
							"Sets how many training jobs may run at once.",
							"Each job needs a background worker (max_worker_processes).",
							&tensile_max_jobs, 16, 1, TENSILE_MAX_JOBS, PGC_POSTMASTER, 0, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.plan_events",
							"Sets how many events the plan of one job may have.",
							"Each event takes 32 bytes of shared memory for each of "
							"pg_tensile.max_jobs.",
							&tensile_plan_events, 65536, 1024, 1048576, PGC_POSTMASTER, 0, NULL,
							NULL, NULL);
}

/* Where jobs run: database, interpreter, device. */
static void
define_resource_settings(void)
{
	DefineCustomStringVariable("pg_tensile.database",
							   "Sets the database whose models are trained and served.",
							   "If it is empty, only the launcher of pg_tensile runs.",
							   &tensile_database, "postgres", PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("pg_tensile.python",
							   "Sets the Python interpreter that runs PyTorch.",
							   "This is a name in the server's PATH, or a path that the "
							   "server's operating-system user can access.",
							   &tensile_python, PG_TENSILE_PYTHON, PGC_SIGHUP, 0, check_python,
							   NULL, NULL);
	DefineCustomStringVariable("pg_tensile.python_path",
							   "Sets the folder of pg_tensile's own Python packages.",
							   "If it is empty, they are beside the library, in "
							   "pg_tensile/python.",
							   &tensile_python_path, "", PGC_SIGHUP, 0, check_path, NULL, NULL);
	DefineCustomStringVariable("pg_tensile.device",
							   "Sets the device that models are trained on: auto, cpu, cuda or "
							   "cuda:N.",
							   "The value auto means the first CUDA device if there is one, "
							   "else the CPU. Predictions within a memory budget run there, too.",
							   &tensile_device, "auto", PGC_SIGHUP, 0, check_device, NULL, NULL);
	DefineCustomStringVariable("pg_tensile.model_path",
							   "Sets the folder that has a folder for each pretrained model.",
							   "The architecture pretrained reads nothing outside of it. If it is "
							   "empty, there are no pretrained models.",
							   &tensile_model_path, "", PGC_SIGHUP, 0, check_path, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.device_memory",
							"Sets how much memory of a device jobs and predictions together "
							"may use.",
							"0 means all of it.",
							&tensile_device_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_KB, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.threads",
							"Sets how many threads each trainer computes with.",
							"0 means the number of processor cores minus one, divided by the "
							"number of running jobs.",
							&tensile_threads, 0, 0, 1024, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.dataset_cache",
							"Sets how much training data a job keeps in memory.",
							"The rest is written to memory-mapped files.",
							&tensile_dataset_cache, 1024, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.model_cache",
							"Sets how much memory the predictor uses for models, and how much "
							"those take that sessions evaluate.",
							"The least recently used models are dropped, and loaded again when "
							"needed.",
							&tensile_model_cache, 1024, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.model_idle",
							"Sets how long a model must not have predicted before a job that "
							"waits for its memory takes it.",
							"The model is loaded again when it is needed.",
							&tensile_model_idle, 10, 0, 24 * 60 * 60, PGC_SIGHUP, GUC_UNIT_S, NULL,
							NULL, NULL);
}

/* The Ray cluster that jobs with ranks train on. */
static void
define_cluster_settings(void)
{
	DefineCustomStringVariable("pg_tensile.ray_address",
							   "Sets the address of the Ray cluster that jobs with ranks are "
							   "trained on.",
							   "It is ray://host:port of the cluster's client server. If it is "
							   "empty, there is no cluster.",
							   &tensile_ray_address, "", PGC_SIGHUP, 0, check_ray_address, NULL,
							   NULL);
	DefineCustomStringVariable("pg_tensile.ray_token_file",
							   "Sets the file that has the token of the Ray cluster.",
							   "Only the server's operating-system user should be able to read "
							   "it. Whoever has the token can run code on the cluster.",
							   &tensile_ray_token_file, "", PGC_SIGHUP, GUC_SUPERUSER_ONLY,
							   check_path, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.ray_timeout",
							"Sets how long ranks wait for each other, and a job for the Ray "
							"cluster's answer.",
							"Then the ranks are ended, and the job is tried again from its last "
							"checkpoint.",
							&tensile_ray_timeout, 30, 1, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
}

/* Limits of child processes. */
static void
define_child_settings(void)
{
	DefineCustomIntVariable("pg_tensile.nice",
							"Sets how much the processes that train and plan lower their priority.",
							"This is added to the server's nice value; the predictor keeps the "
							"server's.",
							&tensile_nice, 10, 0, 19, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.child_memory",
							"Sets how much private memory of the host each child process may "
							"allocate.",
							"0 means no limit. Mapped files and device memory do not count.",
							&tensile_child_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL,
							NULL, NULL);
	DefineCustomBoolVariable("pg_tensile.fork_server",
							 "Sets whether jobs start as forks of a process that has imported PyTorch.",
							 "They start faster, and share memory. The process is started with the "
							 "first job, and ends after five minutes without one.",
							 &tensile_fork_server, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
}

/* When jobs start, write checkpoints and give up; predictions. */
static void
define_job_settings(void)
{
	DefineCustomIntVariable("pg_tensile.checkpoint_interval",
							"Sets the minimum time between checkpoints of a job.",
							"If writing a checkpoint takes long, the time is longer. 0 means "
							"only between epochs.",
							&tensile_checkpoint_interval, 60, 0, INT_MAX / 1000, PGC_SIGHUP,
							GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.max_state_size",
							"Sets the largest checkpoint, and the largest weights, that a job "
							"may store.",
							"A job that exceeds it fails.",
							&tensile_max_state_size, 65536, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB,
							NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.job_retention",
							"Sets how long jobs that have ended are kept, with their metrics.",
							"Jobs are kept longer while their version of a model exists. 0 "
							"means for ever.",
							&tensile_job_retention, 90 * 86400, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.version_retention",
							"Sets how many of a model's newest versions are kept, besides the "
							"deployed one, when a version is added.",
							"set_model_retention takes precedence for a model. 0 means all.",
							&tensile_version_retention, 5, 0, INT_MAX, PGC_SIGHUP, 0, NULL, NULL,
							NULL);
	DefineCustomIntVariable("pg_tensile.max_retries",
							"Sets how often a job is retried after its trainer died.",
							"A new checkpoint resets the count.",
							&tensile_max_retries, 2, 0, 100, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("pg_tensile.log_jobs",
							 "Logs each job when it is submitted, starts, is interrupted and ends.",
							 NULL,
							 &tensile_log_jobs, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.executor_timeout",
							"Sets how long a child process may be silent before it counts as "
							"hung and is killed.",
							"0 means no limit.",
							&tensile_executor_timeout, 300, 0, INT_MAX / 1000, PGC_SIGHUP,
							GUC_UNIT_S, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.ageing",
							"Sets the time in the queue that is worth one step of priority.",
							"After that time, no job overtakes one that waits for memory, "
							"either. 0 means never.",
							&tensile_ageing, 300, 0, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.predict_timeout",
							"Sets how long a prediction may take, loading the model included.",
							"This includes the start of the predictor.",
							&tensile_predict_timeout, 30000, 1, INT_MAX, PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.predict_spin",
							"Sets for how many microseconds a session polls for the "
							"predictor's answer before it sleeps.",
							"It polls only while answers come that fast. 0 means never.",
							&tensile_predict_spin, 400, 0, 10000, PGC_USERSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("pg_tensile.predict_in_session",
							 "Sets whether sessions evaluate small models for tables themselves.",
							 "Otherwise the predictor answers, as it does for all other models.",
							 &tensile_predict_in_session, true, PGC_USERSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("pg_tensile.predict_batching",
							 "Sets whether the executor collects rows that a query predicts for into "
							 "batches.",
							 "With off, plans that are made from then on predict row by row.",
							 &tensile_predict_batching, true, PGC_USERSET, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("pg_tensile.drift_sample_rate",
							 "Sets the share of predicted rows that is compared with the "
							 "training rows.",
							 "1 means all rows, 0 none.",
							 &tensile_drift_sample_rate, 0.01, 0, 1, PGC_SIGHUP, 0, NULL, NULL,
							 NULL);
	DefineCustomIntVariable("pg_tensile.drift_window",
							"Sets the age up to which predicted rows count for drift.",
							NULL,
							&tensile_drift_window, 7 * 86400, 60, INT_MAX / 1000, PGC_SIGHUP,
							GUC_UNIT_S, NULL, NULL, NULL);
}

/* How device memory is planned. */
static void
define_plan_settings(void)
{
	DefineCustomEnumVariable("pg_tensile.policy",
							 "Sets the policy that plans device memory for jobs that name none.",
							 "The policies joint and tensile swap and recompute, swapadvisor "
							 "also searches for a better order and plan, and none trains like "
							 "PyTorch.",
							 &tensile_policy, TENSILE_POLICY_JOINT, policies, PGC_USERSET, 0, NULL,
							 NULL, NULL);
	DefineCustomEnumVariable("pg_tensile.memory_flow",
							 "Sets whether jobs on the host that do not fit beside each other "
							 "share its memory during their iterations.",
							 "Each takes in its forward pass what others give back in their "
							 "backward passes. With off, every job has memory of its own.",
							 &tensile_memory_flow, TENSILE_FLOW_AUTO, memory_flows, PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.flow_timeout",
							"Sets how long a job may hold memory that flows while another job "
							"waits for it.",
							"Then its trainer counts as hung and is killed. 0 means no limit.",
							&tensile_flow_timeout, 30, 0, INT_MAX / 1000, PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);
	DefineCustomRealVariable("pg_tensile.update_threshold",
							 "Sets the relative change of a job's measured latency that causes "
							 "a new plan.",
							 "0.2 means a training step that takes 20 % more or less time than "
							 "planned.",
							 &tensile_update_threshold, 0.2, 0.01, 10, PGC_SIGHUP, 0, NULL, NULL,
							 NULL);
	DefineCustomRealVariable("pg_tensile.latency_weight",
							 "Sets the weight of a new measurement in an operator's average "
							 "latency.",
							 "1 means that only the last measurement counts.",
							 &tensile_latency_weight, 0.2, 0.001, 1, PGC_SIGHUP, 0, NULL, NULL,
							 NULL);
	DefineCustomIntVariable("pg_tensile.host_memory",
							"Sets how much host memory the swapped tensors of all jobs "
							"together may use.",
							"0 means half of the machine's memory.",
							&tensile_host_memory, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB, NULL,
							NULL, NULL);
	DefineCustomIntVariable("pg_tensile.search_time",
							"Sets how long a better plan is searched for, for a job with policy "
							"swapadvisor or joint.",
							"The job trains meanwhile, under the best plan so far. Its option "
							"search_time takes precedence.",
							&tensile_search_time, 30, 1, 86400, PGC_SIGHUP, GUC_UNIT_S, NULL, NULL,
							NULL);
	DefineCustomBoolVariable("pg_tensile.auto_calibrate",
							 "Sets whether a device that has not been calibrated is calibrated "
							 "while the server is idle.",
							 "A job that is submitted interrupts it. It is repeated when jobs "
							 "have brought new kinds of operators or another PyTorch.",
							 &tensile_auto_calibrate, true, PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("pg_tensile.search_processes",
							"Sets how many processes search for a better plan at once.",
							"0 means one for each processor core.",
							&tensile_search_processes, 0, 0, 1024, PGC_SIGHUP, 0, NULL, NULL, NULL);
}

void
tensile_define_settings(void)
{
	if (process_shared_preload_libraries_in_progress)
		define_startup_settings();
	define_resource_settings();
	define_cluster_settings();
	define_child_settings();
	define_job_settings();
	define_plan_settings();
	tensile_define_role_limits();
	MarkGUCPrefixReserved("pg_tensile");
}
