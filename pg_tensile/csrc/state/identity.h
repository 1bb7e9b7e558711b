/*
 * identity.h: what only one kind of process may do, and whether this one was
 * told to stop.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_IDENTITY_H
#define TENSILE_IDENTITY_H

#include "base/process_kind.h"

/* Raises 42501 unless this is a process of that kind, outside user code. */
extern void tensile_require_process(TensileProcessKind kind);

/* Remembers that SIGTERM has come; for its handler (wait.c). */
extern void tensile_note_stop(pid_t sender);

/*
 * Was this worker stopped by pg_terminate_backend, not by a stop of the
 * server?
 */
extern bool tensile_terminated(void);

#endif
