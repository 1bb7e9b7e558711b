/*
 * memory_flow_socket.c: the socket on which a job asks before each group of steps.
 *
 * The trainer of a job whose memory flows waits for an answer again and
 * again, so its worker answers in C while it waits (wait.c), without a step in
 * Python.  A request is 16 bytes, an answer 8.  A job never asks twice at
 * once, and nothing here blocks.
 *
 * A request that makes no sense is an error of that job alone: the socket is
 * not served any more, the wait ends, and Python asks tensile_worker._flow_state()
 * why.  What the job holds is counted until its trainer is gone.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "access/htup_details.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "processes/memory_flow_socket.h"
#include "state/banker.h"
#include "state/identity.h"
#include "state/memory_flow.h"
#include "state/shmem.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_group_socket);
PG_FUNCTION_INFO_V1(tensile_flow_state);

#define KNOWN_PLANS 64			/* that a job may adopt: the newest ones */
#define FAULT_LENGTH 256

/* Codes that are not numbers of groups. */
#define CODE_WHOLE (-1)
#define CODE_REST (-2)
#define CODE_CONSTANT (-3)

typedef struct Request
{
	int64		generation;
	int32		code;
	int32		zero;
} Request;

StaticAssertDecl(sizeof(Request) == 16, "requests are sent as they are");

typedef struct KnownPlan
{
	uint64		generation;
	int64		granted_bytes;
	int			ngroups;
	TensilePlanGroup groups[FLEXIBLE_ARRAY_MEMBER];
} KnownPlan;

static int	group_fd = -1;
static uint64 asked_generation; /* of the request that waits for an answer */

static KnownPlan *known_plans[KNOWN_PLANS];
static int	next_known = 0;

static char fault[FAULT_LENGTH] = "";
static bool fault_is_late = false;	/* the job was late; else it broke the protocol */
static bool fault_untold = false;

/* ---- plans ---- */

void
tensile_memory_flow_know_plan(const TensilePlanHeader *header, const TensilePlanGroup *groups)
{
	Size		size = header->ngroups * sizeof(TensilePlanGroup);
	KnownPlan  *plan = MemoryContextAlloc(TopMemoryContext, offsetof(KnownPlan, groups) + size);

	plan->generation = header->generation;
	plan->granted_bytes = header->granted_bytes;
	plan->ngroups = header->ngroups;
	memcpy(plan->groups, groups, size);
	if (known_plans[next_known])
		pfree(known_plans[next_known]);
	known_plans[next_known] = plan;
	next_known = (next_known + 1) % KNOWN_PLANS;
}

static const KnownPlan *
known_plan(uint64 generation)
{
	for (int i = 0; i < KNOWN_PLANS; i++)
		if (known_plans[i] && known_plans[i]->generation == generation)
			return known_plans[i];
	return NULL;
}

/* Has the job take part with the groups of a plan. */
static void
adopt(const KnownPlan *plan)
{
	TensileFlow flow;

	memset(&flow, 0, sizeof(flow));
	flow.ngroups = plan->ngroups;
	for (int i = 0; i < plan->ngroups; i++)
	{
		flow.most_bytes[i] = plan->groups[i].most_bytes;
		flow.rest_bytes[i] = plan->groups[i].rest_bytes;
	}
	tensile_banker_prepare(&flow, plan->granted_bytes);
	tensile_memory_flow_adopt(plan->generation, &flow);
}

/* ---- requests ---- */

/* Ends the service; `problem` tells why. */
static void
set_fault(bool late, const char *problem)
{
	group_fd = -1;
	strlcpy(fault, problem, FAULT_LENGTH);
	fault_is_late = late;
	fault_untold = true;
}

/* Claims a group or a whole iteration; returns what is wrong with it, or NULL. */
static const char *
claim_memory(const Request *request)
{
	TensileSlot *slot = tensile_my_slot;

	if (slot->flow.ngroups == 0 || slot->flow_generation != (uint64) request->generation)
	{
		const KnownPlan *plan = known_plan(request->generation);

		if (plan == NULL || plan->ngroups == 0)
			return "no plan with groups is of that generation";
		if (slot->flow.position != 0)
			return "its iteration has not ended";
		if (slot->device < 0)
			return "it is on no device";
		adopt(plan);
	}
	if (request->code >= 0 && request->code != slot->flow.position)
		return "it is the turn of another group";
	if (request->code == CODE_WHOLE && slot->flow.position != 0)
		return "its iteration has not ended";
	tensile_memory_flow_claim(request->code == CODE_WHOLE ? TENSILE_CLAIM_WHOLE :
							  TENSILE_CLAIM_GROUP, 0);
	return NULL;
}

/*
 * Claims a constant grant; returns what is wrong with it, or NULL.
 *
 * From now on the others count with what the job asks for, not with the most
 * of its groups: else two that ask for a part each would wait for each other.
 */
static const char *
claim_constant(const Request *request)
{
	const KnownPlan *plan = known_plan(request->generation);
	TensileFlow flow;

	if (tensile_my_slot->flow.ngroups == 0)
		return "its grant is constant";
	if (plan == NULL || plan->ngroups > 0)
		return "no plan with a constant grant is of that generation";
	if (tensile_my_slot->flow.position != 0)
		return "its iteration has not ended";
	memset(&flow, 0, sizeof(flow));
	flow.ngroups = 1;
	flow.most_bytes[0] = plan->granted_bytes;
	flow.rest_bytes[0] = Min(plan->granted_bytes, tensile_banker_held(&tensile_my_slot->flow));
	tensile_banker_prepare(&flow, plan->granted_bytes);
	tensile_memory_flow_adopt(plan->generation, &flow);
	tensile_memory_flow_claim(TENSILE_CLAIM_CONSTANT, plan->granted_bytes);
	return NULL;
}

/*
 * Handles a request; returns what is wrong with it, or NULL.  Caller holds
 * shared->lock exclusively.
 */
static const char *
handle_request(const Request *request)
{
	TensileSlot *slot = tensile_my_slot;

	slot->flow_heard = GetCurrentTimestamp();
	slot->late_for_job = 0;
	if (request->zero != 0 || request->code < CODE_CONSTANT)
		return "there is no such request";
	if (request->code == CODE_REST)
	{
		if (slot->flow.ngroups == 0 || slot->flow_generation != (uint64) request->generation)
			return "no plan of that generation is in use";
		tensile_banker_rest(&slot->flow);
		tensile_memory_flow_wake(slot->device);
		return NULL;
	}
	if (slot->flow.waiting)
		return "another request waits";
	if (slot->flow.running)
	{
		tensile_banker_end(&slot->flow);
		tensile_memory_flow_wake(slot->device);
	}
	asked_generation = request->generation;
	return request->code == CODE_CONSTANT ? claim_constant(request) : claim_memory(request);
}

/* Sends the answer to the request that has waited. */
static void
answer(void)
{
	/* A job that is gone is found by reading. */
	if (send(group_fd, &asked_generation, sizeof(asked_generation),
			 MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET)
		set_fault(false, "it does not read the answers to its requests for memory");
}

/* Frees all that the job holds: its trainer is gone, or another one comes. */
static void
leave(void)
{
	group_fd = -1;
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	tensile_memory_flow_clear(tensile_my_slot);
	LWLockRelease(tensile_shared->lock);
}

/* Has the other end of the socket been closed? */
static bool
is_closed(void)
{
	struct pollfd state = {.fd = group_fd,.events = POLLIN};

	return poll(&state, 1, 0) > 0 && (state.revents & POLLHUP) != 0;
}

/* Receives and handles a request; false if there is none. */
static bool
receive_request(void)
{
	Request		request;
	ssize_t		length = recv(group_fd, &request, sizeof(request), MSG_DONTWAIT | MSG_TRUNC);
	const char *problem;

	if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
		return false;
	if (length < 0 || (length == 0 && is_closed()))
	{
		leave();
		return false;
	}
	if (length != sizeof(request))
	{
		set_fault(false, "a request for memory has another length");
		return false;
	}
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	problem = handle_request(&request);
	LWLockRelease(tensile_shared->lock);
	if (problem)
		set_fault(false, psprintf("it asked for memory with code %d and generation " INT64_FORMAT
								  ", but %s", request.code, request.generation, problem));
	return problem == NULL;
}

/* Ends the service if the job was marked as late, and has not asked since. */
static void
check_late(void)
{
	int64		waiting_job;
	int			seconds;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	waiting_job = tensile_my_slot->late_for_job;
	seconds = tensile_my_slot->late_s;
	LWLockRelease(tensile_shared->lock);
	if (waiting_job != 0)
		set_fault(true, psprintf("held memory for %d s that job " INT64_FORMAT
								 " waited for (pg_tensile.flow_timeout)", seconds, waiting_job));
}

int
tensile_memory_flow_fd(void)
{
	return group_fd;
}

bool
tensile_memory_flow_waits(void)
{
	return tensile_my_slot->flow.waiting;	/* written by this process only */
}

bool
tensile_memory_flow_serve(void)
{
	while (group_fd >= 0)
	{
		if (tensile_memory_flow_waits() && tensile_memory_flow_grant())
			answer();
		else if (!receive_request())
			break;
	}
	if (group_fd >= 0 && tensile_my_slot->late_for_job != 0)
		check_late();
	return group_fd >= 0;
}

bool
tensile_memory_flow_take_fault(void)
{
	bool		untold = fault_untold;

	fault_untold = false;
	return untold;
}

/* ---- functions in SQL ---- */

/*
 * tensile_worker._group_socket(fd): the job of this worker asks on that socket from
 * now on; -1: on none
 */
Datum
tensile_group_socket(PG_FUNCTION_ARGS)
{
	tensile_require_process(TENSILE_WORKER);
	leave();
	fault[0] = '\0';
	fault_untold = false;
	group_fd = PG_GETARG_INT32(0);
	PG_RETURN_VOID();
}

/*
 * tensile_worker._flow_state() -> (waits, late, fault): does the job wait for memory,
 * and why is its socket not served any more; fault null: it is
 */
Datum
tensile_flow_state(PG_FUNCTION_ARGS)
{
	TupleDesc	desc;
	Datum		values[3];
	bool		nulls[3] = {false};

	tensile_require_process(TENSILE_WORKER);
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "_flow_state returns a row");
	values[0] = BoolGetDatum(tensile_memory_flow_waits());
	values[1] = BoolGetDatum(fault[0] != '\0' && fault_is_late);
	nulls[2] = fault[0] == '\0';
	values[2] = nulls[2] ? (Datum) 0 : CStringGetTextDatum(fault);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls)));
}
