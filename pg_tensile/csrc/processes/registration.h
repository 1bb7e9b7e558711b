/*
 * registration.h: registering the background processes of pg_tensile with the
 * postmaster.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_REGISTRATION_H
#define TENSILE_REGISTRATION_H

#include "postmaster/bgworker.h"

#include "base/process_kind.h"

/* Fills in everything about a worker that does not depend on its database. */
extern void tensile_describe_worker(BackgroundWorker *worker, TensileProcessKind kind, int64 job);

#endif
