/*
 * pg_tensile.h: what the files of the shim share: shared memory, settings, the processes and how they wake each other.
 *
 * Shared memory is one TensileShared, then max_jobs slots inside it, then max_jobs * plan_events event rows. Its locks:
 *
 *   shared->lock         the four processes, the jobs' slots (except what follows), the device ledger (ledger.c)
 *   slot->lock           the slot's progress and plan; taken after shared->lock when both are needed
 *   shared->predictions_lock   which entry of the prediction counters belongs to which version
 *
 * Everything else there is atomic. Nothing is protected by a spinlock, so ereport is allowed everywhere; but callbacks at
 * commit and at exit never raise.
 */
#ifndef PG_TENSILE_H
#define PG_TENSILE_H

#include "postgres.h"

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "port/atomics.h"
#include "postmaster/bgworker.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lwlock.h"

#define TENSILE_VERSION "0.2.0" /* that of pg_tensile.control; test_workers.py compares */
#define TENSILE_EXTENSION "pg_tensile"
#define TENSILE_LIBRARY "pg_tensile"
#define TENSILE_MAX_JOBS 256	/* upper limit of pg_tensile.max_jobs */
#define TENSILE_MAX_DEVICES 16
#define TENSILE_MAX_PREDICTIONS 256 /* model versions whose predictions are counted */

/* ---- processes ---- */

typedef enum TensileProcessKind
{
	TENSILE_LAUNCHER,
	TENSILE_CONTROLLER,
	TENSILE_SCHEDULER,
	TENSILE_INFERENCE,
	TENSILE_N_SINGLETONS,		/* those above exist once in a cluster */
	TENSILE_WORKER = TENSILE_N_SINGLETONS,
	TENSILE_NO_PROCESS			/* an ordinary session */
} TensileProcessKind;

/* How a singleton ended; tells the launcher when to start the next one. */
typedef enum TensileOutcome
{
	TENSILE_FAILED,				/* an error, or stopped by somebody else */
	TENSILE_GONE,				/* the extension was dropped under it */
	TENSILE_NO_EXTENSION		/* the extension does not exist in its database */
} TensileOutcome;

/* What every process that others wake has: the latch, and a count that tells it of a wake-up that somebody's ResetLatch ate. */
typedef struct TensileWakeup
{
	Latch	   *latch;			/* NULL: no process */
	pg_atomic_uint64 count;
} TensileWakeup;

typedef struct TensileSingleton
{
	pid_t		pid;			/* 0: does not run */
	Oid			database;		/* the one it is connected to */
	TimestampTz started_at;
	TimestampTz ended_at;
	TimestampTz requested_at;	/* registered, but not yet attached (inference only) */
	TensileOutcome outcome;		/* of the last one that ran */
	uint32		error_hash;		/* of the last error in its procedure, to log it once */
	TensileWakeup wakeup;
} TensileSingleton;

/* ---- job slots ---- */

typedef enum TensileSlotState
{
	SLOT_FREE,
	SLOT_RESERVED,				/* a background worker is registered for the job */
	SLOT_ATTACHED				/* it runs */
} TensileSlotState;

#define TENSILE_PHASE_LENGTH 32
#define TENSILE_REPORTED_UTILISATION (1 << 12)	/* in TensileProgress.reported */

/* Bits of TensileProgress.reported, one a column that tensile._report sets. */
typedef struct TensileProgress
{
	uint32		reported;		/* bit i: argument i of tensile._report has been given */
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
	float8		utilisation;	/* 0 … 1, of the device, by others than this job */
	int64		raw_bytes_swapped;	/* what bytes_swapped would be without compression */
	TimestampTz heartbeat;		/* of the last report; 0: none yet */
} TensileProgress;

typedef struct TensilePlanHeader
{
	uint64		generation;		/* 0: no plan yet; rises as long as the slot is the job's */
	int64		planned_bytes;	/* the plan's device peak, workspaces included */
	int64		granted_bytes;	/* what its executor may take: at least planned_bytes */
	float8		link_share;		/* of the device's link to the host that it was planned with: 0 … 1 */
	uint32		nevents;
	uint32		nordered;		/* operators of the order, int32 each, behind the event rows; 0: as captured */
	uint32		checksum;		/* CRC-32C of the event rows, of the order and of what stands before it here */
} TensilePlanHeader;

typedef struct TensileSlot
{
	TensileSlotState state;
	int64		job;
	Oid			role;			/* the submitter */
	Oid			database;
	pid_t		pid;			/* of the worker; 0 before it attached */
	volatile bool feeding;		/* the worker runs the training query; only it writes this */
	TimestampTz since;			/* reserved or attached at */
	int			device;			/* index into shared->devices; -1: none yet */
	int64		granted_bytes;	/* of that device's budget: the larger of the acknowledged plan's and the newest plan's */
	int64		overhead_bytes; /* of that device, taken by the executor besides */
	uint64		acknowledged;	/* generation of the newest plan with which an iteration was made; 0: none */
	TensileWakeup wakeup;
	LWLock	   *lock;			/* protects what follows, and the slot's event rows with the order behind them */
	TensileProgress progress;
	TensilePlanHeader plan;
} TensileSlot;

/* One event of a plan; the same bytes in shared memory and in PLAN frames. */
typedef struct TensilePlanEvent
{
	uint8		kind;			/* 1 swap_out, 2 swap_in, 3 recompute, 4 release */
	uint8		codec;			/* of a swap_out: 0 none, 1 zvc, 2 rle, 3 csr, 4 lz4 */
	uint8		zero[2];
	int32		tensor;
	int32		version;
	int32		trigger_operator;	/* where the plan has an order, its place there, as the deadline */
	int32		delay_us;
	int32		deadline_operator;
	int64		bytes;
} TensilePlanEvent;

StaticAssertDecl(sizeof(TensilePlanEvent) == 32, "event rows travel as they are");

/* ---- the rest of shared memory ---- */

typedef struct TensileDevice
{
	char		name[NAMEDATALEN];	/* "": free */
	int64		total_bytes;	/* 0: not known yet */
	float8		out_bytes_per_s;	/* over its link to the host, each way; 0: no job has used it yet */
	float8		in_bytes_per_s;
	int64		inference_bytes;	/* taken by the predictor */
	int64		inference_wanted;	/* what it waits for; 0: nothing */
} TensileDevice;

typedef struct TensilePredictions
{
	int64		version;		/* model_versions.id in that database; 0: free */
	Oid			database;
	pg_atomic_uint64 rows;
	pg_atomic_uint64 requests;
	pg_atomic_uint64 unknown_categories;
	pg_atomic_uint64 last_used; /* a TimestampTz */
} TensilePredictions;

typedef struct TensileShared
{
	LWLock	   *lock;
	LWLock	   *predictions_lock;
	pg_atomic_uint64 models_generation; /* bumped when a change of models has become visible */
	pg_atomic_uint64 drops;		/* roles and extensions dropped: everybody looks whether it was theirs */
	pg_atomic_uint64 installs;	/* times CREATE EXTENSION committed */
	pg_atomic_uint64 changes;	/* times a job changed */
	ConditionVariable job_changed;
	TensileSingleton singletons[TENSILE_N_SINGLETONS];
	TensileDevice devices[TENSILE_MAX_DEVICES];
	TensilePredictions predictions[TENSILE_MAX_PREDICTIONS];
	int			max_jobs;
	int			plan_events;
	TensilePlanEvent *events;	/* max_jobs * plan_events */
	TensileSlot slots[FLEXIBLE_ARRAY_MEMBER];
} TensileShared;

/* NULL when the library is not in shared_preload_libraries: call tensile_require_preload() first. */
extern TensileShared *tensile_shared;

/* ---- settings (guc.c) ---- */

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
extern int	tensile_policy;			/* TensilePolicy */
extern int	tensile_dataset_cache;	/* MB */
extern int	tensile_checkpoint_interval;	/* s; 0 = at epochs only */
extern int	tensile_max_retries;
extern int	tensile_predict_timeout;	/* ms */
extern int	tensile_threads;		/* 0 = cores / running jobs */
extern int	tensile_ageing;			/* s; 0 = never */
extern int	tensile_model_cache;	/* MB */
extern int	tensile_executor_timeout;	/* s; 0 = never */
extern double tensile_update_threshold; /* relative change of a job's latency */
extern double tensile_latency_weight;	/* of a new measurement in the average */
extern int	tensile_host_memory;	/* MB; 0 = half of the machine's */
extern int	tensile_search_time;	/* s */
extern int	tensile_search_processes;	/* 0 = cores */

extern void tensile_define_settings(void);

/* ---- shared memory and slots (shmem.c) ---- */

extern void tensile_require_preload(void);	/* 55000 unless in shared_preload_libraries */
extern void tensile_install_shmem_hooks(void);
extern TensileSlot *tensile_slot_attach(int index, int64 job);	/* NULL: the reservation is gone */
extern void tensile_slot_free(TensileSlot *slot);	/* does nothing unless it is this process's */
extern void tensile_clear_slot(TensileSlot *slot);	/* makes it FREE; caller holds shared->lock exclusively */
extern TensileSlot *tensile_slot_of_job(int64 job); /* of this database; caller holds shared->lock; NULL: no slot */

/* A copy of the slots in use by this database, to look at without locks; catalogs must not be read under them. */
extern TensileSlot *tensile_copy_slots(int *nslots);
extern bool tensile_role_visible(Oid role); /* may the current user see what that role runs? */

/* Wakes a process from its wait; caller holds shared->lock, shared is enough. */
extern void tensile_wake(TensileWakeup *wakeup);

/* ---- this process (worker.c) ---- */

extern TensileProcessKind tensile_process; /* TENSILE_NO_PROCESS in sessions */
extern TensileSlot *tensile_my_slot;	/* the worker's */

extern bool tensile_in_worker(void);	/* this process is a pg_tensile worker */
extern void tensile_require_process(TensileProcessKind kind);	/* 42501 unless this is such a process */
extern TensileWakeup *tensile_my_wakeup(void);	/* NULL in sessions */
extern bool tensile_still_there(void);	/* the extension and the role this process was started for exist */

/* Attaches this process as a singleton; false: there is one already. */
extern bool tensile_singleton_attach(TensileProcessKind kind, Oid database);

/* Fills name, type, flags, entry point and notify pid of a dynamic worker that is not restarted. */
extern void tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job);

extern void tensile_require_database(void); /* 55000 unless this database is pg_tensile.database */

/* Registers the inference worker unless it runs; raises as above, 55000 on a standby, 53000 when no worker is free. */
extern void tensile_start_inference(void);

extern void tensile_register_launcher(void);	/* launcher.c */

/* ---- waiting (wait.c) ---- */

/*
 * Waits for the socket (WL_SOCKET_READABLE | WL_SOCKET_WRITEABLE; fd < 0 or no events: none), the latch or the time-out
 * (ms; < 0: none), and processes interrupts. Returns the WL_ events; WL_LATCH_SET only means: look again.
 */
extern int	tensile_wait_socket(int fd, uint32 wl_events, long timeout_ms);

extern void tensile_setup_signals(void);	/* SIGHUP, SIGTERM and SIGINT of our processes; unblocks signals */

/* What ended a wait: bits for tensile._step. */
#define TENSILE_WAIT_READABLE 1
#define TENSILE_WAIT_WRITABLE 2
#define TENSILE_WAIT_LATCH 4
#define TENSILE_WAIT_TIMEOUT 8
#define TENSILE_WAIT_STOP 16	/* once for each SIGTERM */
#define TENSILE_WAIT_GONE 32
#define TENSILE_WAIT_CANCEL 64	/* a cancel request came while it waited, or before */

extern bool tensile_wakeup_pending(void);	/* somebody has woken this process since its last wait */
extern int	tensile_socket_bits(int wl_events); /* READABLE and WRITABLE */

/* A wait of one of our processes, outside any transaction. The second one is connected, and looks for GONE as well. */
extern int	tensile_wait_stoppable(int fd, uint32 wl_events, long timeout_ms);
extern int	tensile_wait_connected(int fd, uint32 wl_events, long timeout_ms);

/* ---- at commit (notify.c) ---- */

extern void tensile_install_notify_hooks(void);
extern void tensile_notify_at_commit(int64 job);
extern void tensile_submitted_at_commit(int64 job); /* notify, and remember for _submitted_here */
extern void tensile_models_changed_at_commit(void);
extern void tensile_wake_readers(void); /* of tensile._wait_for_change; now, for what no transaction changes */

/*
 * Changes whenever models may have changed, for this transaction as well. Read it before the tables: what was read with
 * generation g is good as long as this returns g, unless a REPEATABLE READ snapshot older than g was used.
 */
extern uint64 tensile_models_generation(void);

/* ---- the device ledger (ledger.c); callers hold shared->lock exclusively ---- */

extern bool tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes);	/* false: no room */
extern void tensile_ledger_forget_inference(void);

/* ---- live numbers (progress.c) ---- */

extern void tensile_copy_text(char *target, Size size, const text *source); /* cut to whole characters */

extern void tensile_count_predictions(int64 version, int64 rows, int64 unknown_categories);

#endif
