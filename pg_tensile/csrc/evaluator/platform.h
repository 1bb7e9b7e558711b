/*
 * platform.h: what a file of this folder includes first, in a server and in a
 * plain program.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_PLATFORM_H
#define TENSILE_PLATFORM_H

#ifdef FRONTEND
#include "postgres_fe.h"
#else
#include "postgres.h"
#endif

#include "base/compat.h"

#endif
