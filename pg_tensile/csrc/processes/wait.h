/*
 * wait.h: how processes of pg_tensile and sessions wait.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_WAIT_H
#define TENSILE_WAIT_H

/*
 * Waits for the socket (WL_SOCKET_READABLE | WL_SOCKET_WRITEABLE; none if
 * fd < 0), the latch or the timeout (ms; none if < 0), and processes
 * interrupts.  Returns the WL_ events; only WL_LATCH_SET means: look again.
 */
extern int	tensile_wait_socket(int fd, uint32 wl_events, long timeout_ms);

/* Installs handlers of SIGHUP and SIGTERM, and unblocks signals. */
extern void tensile_setup_signals(void);

/* Causes of the end of a wait: bits that tensile_worker._step takes. */
#define TENSILE_WAIT_READABLE 1
#define TENSILE_WAIT_WRITABLE 2
#define TENSILE_WAIT_LATCH 4
#define TENSILE_WAIT_TIMEOUT 8
#define TENSILE_WAIT_STOP 16	/* once for each SIGTERM */
#define TENSILE_WAIT_GONE 32	/* the extension or the role was dropped */
#define TENSILE_WAIT_CANCEL 64	/* a cancel request came during the wait or before */
#define TENSILE_WAIT_FLOW 128	/* a fault: see tensile_worker._flow_state() */

extern bool tensile_wakeup_pending(void);	/* Was it woken since its last wait? */
extern int	tensile_socket_bits(int wl_events); /* READABLE and WRITABLE */

/*
 * Waits in a background process, outside any transaction.  A process with a
 * connection to a database uses the second function, which returns GONE too.
 * A worker serves its job's requests for memory meanwhile
 * (memory_flow_socket.h).
 */
extern int	tensile_wait_stoppable(int fd, uint32 wl_events, long timeout_ms);
extern int	tensile_wait_connected(int fd, uint32 wl_events, long timeout_ms);

/* What is waited for; pg_stat_activity shows it from PostgreSQL 17 on. */
typedef enum TensileWait
{
	TENSILE_WAIT_SUPERVISOR,	/* a background process: for events */
	TENSILE_WAIT_PREDICTOR,		/* a session: for a prediction */
	TENSILE_WAIT_JOB			/* a session: for a change of a job */
} TensileWait;

extern uint32 tensile_wait_event(TensileWait wait);

#endif
