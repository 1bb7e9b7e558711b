/*
 * role_limits.h: the settings that limit the jobs of a role.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_ROLE_LIMITS_H
#define TENSILE_ROLE_LIMITS_H

extern void tensile_define_role_limits(void);

#endif
