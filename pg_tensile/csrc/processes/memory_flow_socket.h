/*
 * memory_flow_socket.h: the socket on which a job asks before each group of
 * steps.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_MEMORY_FLOW_SOCKET_H
#define TENSILE_MEMORY_FLOW_SOCKET_H

#include "state/plan.h"

/* The socket on which the job asks; -1: none. */
extern int	tensile_memory_flow_fd(void);

/*
 * Serves the job's requests without blocking.  False if that has ended: the
 * job has left, has broken the protocol, or was late.
 */
extern bool tensile_memory_flow_serve(void);

/* Does the job wait for what it has asked for? */
extern bool tensile_memory_flow_waits(void);

/* Is there a fault that tensile_worker._flow_state() tells?  True once for each. */
extern bool tensile_memory_flow_take_fault(void);

/* Remembers the groups of a plan that is sent to the job. */
extern void tensile_memory_flow_know_plan(const TensilePlanHeader *header,
										  const TensilePlanGroup *groups);

#endif
