/*
 * notify.h: what a transaction tells other processes when it commits.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_NOTIFY_H
#define TENSILE_NOTIFY_H

extern void tensile_install_notify_hooks(void);

/* Announces a new job when this transaction commits. */
extern void tensile_submitted_at_commit(int64 job);

/* Tells all sessions that models, versions or grants have changed. */
extern void tensile_models_changed_at_commit(void);

/* Has what sessions share of a version removed. */
extern void tensile_version_deleted_at_commit(int64 version);

#endif
