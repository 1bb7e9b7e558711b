/*
 * wait.c: how our processes wait, and how they stop.
 *
 * PL/Python never checks for interrupts, so a supervisor waits here, through tensile._wait, for everything that can
 * happen to it: its child's socket, a wake-up, the time, cancel, reload, stop, the postmaster's death.
 *
 * SIGTERM stops a supervisor gently: die() would throw it out of Python without running `finally`, and its job would
 * lose what it did since the last checkpoint. So the handler only remembers the signal and sets the latch, and the next
 * wait returns STOP. A supervisor that does not come to a wait within STOP_PATIENCE_S (it runs a query, or waits for a
 * lock) gets a second SIGTERM from a timer, which is die().
 *
 * The latch alone does not carry wake-ups: anything that waits inside PostgreSQL resets it. Whoever wakes a process also
 * counts (tensile_wake), and a wait returns at once if that count is not the one the last wait saw.
 */
#include "postgres.h"

#include <signal.h>
#include <time.h>

#include "fmgr.h"
#include "libpq/pqsignal.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "explain.h"
#include "pg_tensile.h"

#define STOP_PATIENCE_S 1
#define LOOK_INTERVAL_MS 1000	/* between looks whether extension and role exist */

PG_FUNCTION_INFO_V1(tensile_wait);

static volatile sig_atomic_t stop_pending = false;	/* SIGTERM came, no wait has returned STOP for it yet */
static volatile sig_atomic_t waiting = false;
static timer_t stop_timer;

static uint64 seen_wakeups = 0;
static uint64 seen_drops = 0;
static TimestampTz looked_at = 0;

/* ---- signals ---- */

/* Only async-signal-safe calls here; timer_settime is one. */
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

	if (stop_pending && !waiting)
		die(TENSILE_PASS_SIGNAL_ARGS);
	else
	{
		stop_pending = true;
		if (!waiting)
			set_stop_timer(STOP_PATIENCE_S);
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
	BackgroundWorkerUnblockSignals();
}

/* Was SIGTERM received since this was asked last? */
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

/* Were settings reloaded? */
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

/* Did somebody call tensile_wake for this process since this was asked last? */
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
 * Looks whether extension and role still exist: when something like them was dropped, and otherwise now and then, as
 * this process is awake anyway (a drop may come by COMMIT PREPARED, which nobody counts).
 */
static bool
gone(void)
{
	uint64		drops = pg_atomic_read_u64(&tensile_shared->drops);
	TimestampTz now = GetCurrentTimestamp();

	if (drops == seen_drops && !TimestampDifferenceExceeds(looked_at, now, LOOK_INTERVAL_MS))
		return false;
	seen_drops = drops;
	looked_at = now;
	AcceptInvalidationMessages();
	return !tensile_still_there();
}

/* Bits of tensile._wait for the socket. */
static int
socket_bits(int events)
{
	return (events & WL_SOCKET_READABLE ? TENSILE_WAIT_READABLE : 0) |
		(events & WL_SOCKET_WRITEABLE ? TENSILE_WAIT_WRITABLE : 0);
}

/* One wait; bits as tensile._wait returns them, but for GONE. */
int
tensile_wait_stoppable(int fd, uint32 wl_events, long timeout_ms)
{
	volatile int events = 0;
	volatile int result = 0;
	volatile long sleep_ms = timeout_ms;

	waiting = true;				/* from here on SIGTERM only sets the latch */
	PG_TRY();
	{
		/* If something has happened already, ask the socket all the same, but don't sleep. */
		if (stop_pending || ConfigReloadPending || tensile_wakeup_pending())
			sleep_ms = 0;
		events = tensile_wait_socket(fd, wl_events, sleep_ms);
		if (take_stop())
			result |= TENSILE_WAIT_STOP;
	}
	PG_FINALLY();
	{
		waiting = false;
	}
	PG_END_TRY();

	if (reload_settings())
		result |= TENSILE_WAIT_LATCH;
	result |= socket_bits(events);
	if (take_wakeup() || (events & WL_LATCH_SET))
		result |= TENSILE_WAIT_LATCH;
	if (result == 0)
		result = TENSILE_WAIT_TIMEOUT;
	return result;
}

/*
 * The snapshots of the statements we are in will read nothing any more: a supervisor commits after each wait. So they are
 * not advertised while it sleeps, and VACUUM and CREATE INDEX CONCURRENTLY elsewhere need not wait for it. Whatever
 * looks at a table after the wait takes a snapshot of its own, which advertises itself.
 */
static void
release_xmin(void)
{
	InvalidateCatalogSnapshot();
	MyProc->xmin = InvalidTransactionId;
}

/* tensile._wait(fd, timeout_ms, writable): see docs/internals.md. */
Datum
tensile_wait(PG_FUNCTION_ARGS)
{
	int			fd = PG_GETARG_INT32(0);
	uint32		events = WL_SOCKET_READABLE | (PG_GETARG_BOOL(2) ? WL_SOCKET_WRITEABLE : 0);
	int			result;

	tensile_require_preload();
	if (tensile_explaining())	/* a session, in a transaction that goes on: neither its snapshots nor SIGTERM are ours */
	{
		result = socket_bits(tensile_wait_socket(fd, events, PG_GETARG_INT32(1)));
		PG_RETURN_INT32(result ? result : TENSILE_WAIT_TIMEOUT);
	}
	if (tensile_process == TENSILE_NO_PROCESS)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("only processes of pg_tensile may call this function")));
	release_xmin();
	result = tensile_wait_stoppable(fd, events, PG_GETARG_INT32(1));
	if (gone())
		result |= TENSILE_WAIT_GONE;
	PG_RETURN_INT32(result);
}
