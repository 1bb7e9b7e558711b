/*
 * pythonhome.c: loaded with libpython, tells PL/Python's interpreter where the
 * standard library of the bundle is, before it starts.
 *
 * By itself it would search beside the first python3 of PATH.  Only processes
 * with PL/Python have the variable; the supervisors' children do not inherit it
 * (pyworker/supervisors/child_environment.py).
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((constructor)) static void
set_python_home(void)
{
	Dl_info		self;
	char		home[PATH_MAX];

	if (dladdr((void *) set_python_home, &self) == 0 || strrchr(self.dli_fname, '/') == NULL)
		return;
	snprintf(home, sizeof(home), "%.*s/../python",
			 (int) (strrchr(self.dli_fname, '/') - self.dli_fname), self.dli_fname);
	setenv("PYTHONHOME", home, 1);
}
