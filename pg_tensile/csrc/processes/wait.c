/*
 * wait.c: how the background processes wait, and how they stop.
 *
 * A step of a supervisor (step.c) runs in PL/Python, which never checks for
 * interrupts.  Between steps the process waits here, outside any transaction,
 * for everything that may happen to it: data from its child, a wake-up, the
 * timeout, a cancel, reload or stop request, the death of the postmaster.
 *
 * SIGTERM stops a supervisor gently.  die() would leave Python without running
 * `finally`, and the job would lose its work since the last checkpoint.  So
 * the handler only remembers the signal and sets the latch, and the next wait
 * returns STOP.  A supervisor that does not wait within STOP_GRACE_S, because
 * it runs a query or waits for a lock, gets a second SIGTERM from a timer,
 * which does call die().
 *
 * The latch alone does not suffice for wake-ups, because every wait inside
 * PostgreSQL resets it.  So tensile_wake also counts, and a wait returns at
 * once if the count differs from that of the last wait.  The latch of a worker
 * whose job waits for memory is set without counting when some may be free:
 * then the job's request is looked at here (memory_flow_socket.h), and the wait
 * goes on.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <signal.h>
#include <time.h>

#include "access/xact.h"
#include "libpq/pqsignal.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "base/compat.h"
#include "processes/memory_flow_socket.h"
#include "processes/wait.h"
#include "state/extension.h"
#include "state/identity.h"
#include "state/memory_flow.h"
#include "state/shmem.h"
#include "state/wakeup.h"

#define STOP_GRACE_S 1
#define LOOK_INTERVAL_MS 1000	/* between checks that extension and role exist */

static volatile sig_atomic_t stop_pending = false;	/* no wait has returned STOP for it yet */
static volatile sig_atomic_t waiting = false;
static timer_t stop_timer;

static uint64 seen_wakeups = 0;
static uint64 seen_drops = 0;
static TimestampTz checked_at = 0;

/* ---- signals ---- */

/* Called by a signal handler; timer_settime is async-signal-safe. */
static void
set_stop_timer(int seconds)
{
	struct itimerspec when = {{0, 0}, {seconds, 0}};

	timer_settime(stop_timer, 0, &when, NULL);
}

static void
handle_sigterm(SIGNAL_ARGS)
{
	int			save_errno = errno;

	tensile_note_stop(TENSILE_SIGNAL_SENDER);
	if (stop_pending && !waiting)
		die(TENSILE_PASS_SIGNAL_ARGS);
	else
	{
		stop_pending = true;
		if (!waiting)
			set_stop_timer(STOP_GRACE_S);
		SetLatch(MyLatch);
	}
	errno = save_errno;
}

void
tensile_setup_signals(void)
{
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL,.sigev_signo = SIGTERM};

	if (timer_create(CLOCK_MONOTONIC, &event, &stop_timer) != 0)
		ereport(FATAL, (errcode(ERRCODE_SYSTEM_ERROR), errmsg("could not create a timer: %m")));
	pqsignal(SIGTERM, handle_sigterm);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);

	/*
	 * StartBackgroundWorker ignores SIGHUP until now, which discards one that
	 * came since the fork.  So read the settings that it was about.
	 */
	ProcessConfigFile(PGC_SIGHUP);
	BackgroundWorkerUnblockSignals();
}

/* Has SIGTERM come since the last call? */
static bool
take_stop(void)
{
	if (!stop_pending)
		return false;
	stop_pending = false;
	set_stop_timer(0);
	return true;
}

/* ---- waiting ---- */

int
tensile_wait_socket(int fd, uint32 wl_events, long timeout_ms)
{
	uint32		wake = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH;
	int			events;

	if (fd >= 0)
		wake |= wl_events & (WL_SOCKET_READABLE | WL_SOCKET_WRITEABLE);
	if (timeout_ms >= 0)
		wake |= WL_TIMEOUT;
	events = WaitLatchOrSocket(MyLatch, wake, fd >= 0 ? fd : PGINVALID_SOCKET, timeout_ms,
							   tensile_wait_event(TENSILE_WAIT_SUPERVISOR));
	if (events & WL_LATCH_SET)
		ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	return events;
}

/* Reloads the settings if that was requested. */
static bool
reload_settings(void)
{
	if (!ConfigReloadPending)
		return false;
	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
	return true;
}

bool
tensile_wakeup_pending(void)
{
	return pg_atomic_read_u64(&tensile_my_wakeup()->count) != seen_wakeups;
}

/* Was this process woken since the last call? */
static bool
take_wakeup(void)
{
	uint64		count = pg_atomic_read_u64(&tensile_my_wakeup()->count);

	if (count == seen_wakeups)
		return false;
	seen_wakeups = count;
	return true;
}

/*
 * Was the extension or the role dropped?  Checks that after any drop of such
 * an object, and otherwise at intervals, because drops by COMMIT PREPARED are
 * not counted.
 */
static bool
is_gone(void)
{
	uint64		drops = pg_atomic_read_u64(&tensile_shared->drops);
	TimestampTz now = GetCurrentTimestamp();

	if (drops == seen_drops && !TimestampDifferenceExceeds(checked_at, now, LOOK_INTERVAL_MS))
		return false;
	seen_drops = drops;
	checked_at = now;
	return !tensile_still_there();
}

int
tensile_socket_bits(int events)
{
	return (events & WL_SOCKET_READABLE ? TENSILE_WAIT_READABLE : 0) |
		(events & WL_SOCKET_WRITEABLE ? TENSILE_WAIT_WRITABLE : 0);
}

/* During a wait a cancel request is a result, not an error. */
static bool
take_cancel(void)
{
	if (!QueryCancelPending)
		return false;
	QueryCancelPending = false;
	return true;
}

/* Is there more to be seen to than sockets? */
static bool
something_happened(void)
{
	return stop_pending || QueryCancelPending || ConfigReloadPending || tensile_wakeup_pending();
}

/* The latch, and the sockets of the wait and of the job's requests. */
static WaitEventSet *
served_events(int fd, uint32 wl_events)
{
	WaitEventSet *set = tensile_create_wait_event_set(TopMemoryContext, 4);

	AddWaitEventToSet(set, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(set, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	AddWaitEventToSet(set, WL_SOCKET_READABLE, tensile_memory_flow_fd(), NULL, NULL);
	if (fd >= 0)
		AddWaitEventToSet(set, wl_events & (WL_SOCKET_READABLE | WL_SOCKET_WRITEABLE), fd,
						  NULL, NULL);
	return set;
}

/* Waits once; returns the events of socket `fd`. */
static int
wait_once(WaitEventSet *set, int fd, long timeout_ms)
{
	WaitEvent	occurred[4];
	int			noccurred = WaitEventSetWait(set, timeout_ms, occurred, lengthof(occurred),
											 tensile_wait_event(TENSILE_WAIT_SUPERVISOR));
	int			events = 0;

	for (int i = 0; i < noccurred; i++)
	{
		if (occurred[i].events & WL_LATCH_SET)
			ResetLatch(MyLatch);
		else if (occurred[i].fd == fd)
			events |= occurred[i].events;
	}
	CHECK_FOR_INTERRUPTS();
	return events;
}

/*
 * Waits like tensile_wait_socket, and serves the job's requests for memory.
 * A latch that was set for those alone does not end the wait.
 */
static int
wait_and_serve(int fd, uint32 wl_events, long timeout_ms)
{
	TimestampTz end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), timeout_ms);
	WaitEventSet *set = served_events(fd, wl_events);
	long		left = timeout_ms;
	int			events = 0;
	bool		served;

	for (;;)
	{
		served = tensile_memory_flow_serve();
		if (!served || events != 0 || left < 0 || (left > 0 && something_happened()))
			break;
		events = wait_once(set, fd,
						   tensile_memory_flow_waits() ? Min(left, LOOK_INTERVAL_MS) : left);
		if (tensile_memory_flow_waits())
			tensile_memory_flow_mark_late();
		left = left == 0 ? -1 :
			TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end);
		if (left == 0)
			left = -1;
	}
	FreeWaitEventSet(set);
	return served && !something_happened() ? events : events | WL_LATCH_SET;
}

int
tensile_wait_stoppable(int fd, uint32 wl_events, long timeout_ms)
{
	int			events;
	int			result;

	HOLD_CANCEL_INTERRUPTS();
	waiting = true;				/* from here on SIGTERM only sets the latch */
	/* If something has happened already, check the socket without sleeping. */
	if (something_happened())
		timeout_ms = 0;
	if (tensile_memory_flow_fd() >= 0)
		events = wait_and_serve(fd, wl_events, timeout_ms);
	else
		events = tensile_wait_socket(fd, wl_events, timeout_ms);
	result = tensile_socket_bits(events);
	if (take_stop())
		result |= TENSILE_WAIT_STOP;
	/* A SIGTERM from here on is for the next step, which may take long. */
	waiting = false;
	if (stop_pending)
		set_stop_timer(STOP_GRACE_S);
	if (take_cancel())
		result |= TENSILE_WAIT_CANCEL;
	RESUME_CANCEL_INTERRUPTS();

	if (events & WL_LATCH_SET)
		result |= TENSILE_WAIT_LATCH;
	if (reload_settings())
		result |= TENSILE_WAIT_LATCH;
	if (take_wakeup())
		result |= TENSILE_WAIT_LATCH;
	if (tensile_memory_flow_take_fault())
		result |= TENSILE_WAIT_FLOW;
	return result ? result : TENSILE_WAIT_TIMEOUT;
}

int
tensile_wait_connected(int fd, uint32 wl_events, long timeout_ms)
{
	int			result = tensile_wait_stoppable(fd, wl_events, timeout_ms);

	HOLD_CANCEL_INTERRUPTS();	/* a cancel is for the next wait */
	if (is_gone())
		result |= TENSILE_WAIT_GONE;
	RESUME_CANCEL_INTERRUPTS();
	return result;
}

/* The number by which pg_stat_activity knows the name of a wait. */
uint32
tensile_wait_event(TensileWait wait)
{
	static const char *const names[] = {
		"PgTensileSupervisor", "PgTensilePredictor", "PgTensileJob"
	};
	static uint32 events[lengthof(names)] = {0};

	if (events[wait] == 0)
		events[wait] = WaitEventExtensionNew(names[wait]);
	return events[wait];
}
