/*
 * reports.h: hints for errors of the server, and its messages about
 * supervisors.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_REPORTS_H
#define TENSILE_REPORTS_H

extern void tensile_install_report_hook(void);

#endif
