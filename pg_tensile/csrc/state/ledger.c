/*
 * ledger.c: the device ledger, which divides the memory of each device among
 * jobs and predictions.
 *
 * A device has entries for the grant and the overhead of each job (the memory
 * that its trainer needs outside of the plan, such as a CUDA context), and
 * for the predictor.  Their sum does not exceed the device's budget, which is
 * pg_tensile.device_memory and at most the device's memory, because a grant
 * that does not fit is refused.  A job with ranks has a device of its own, on a
 * Ray cluster, which that setting does not limit.  Overheads are facts, not grants: they, or a
 * lower setting, can raise the sum above the budget, and then no grant grows
 * until there is room.
 *
 * Until the trainer has made an iteration under a new plan
 * (tensile_worker._acknowledge_plan, plan.c), the larger of the former and the new
 * grant counts, so that jobs shrink before others grow.
 *
 * The first worker on a device reports its size and rates, which are kept as
 * long as the device is in use.  Such reports come from a child, which
 * executes code of users.  So numbers that no device can have are an error of
 * that job, and sums over all jobs cannot overflow (TENSILE_MAX_BYTES).
 *
 * Jobs and predictions take turns.  A waiting job takes the memory of models
 * that are idle: the scheduler says what jobs lack, and the predictor drops
 * models (tensile_internal._lack_memory).  A prediction that has waited in vain keeps a
 * claim for CLAIM_MS: until then the scheduler starts no job that came later
 * in the memory that it needs.  Jobs that came earlier do not wait for it.
 *
 * Jobs whose memory flows have no grant.  They have what all this leaves
 * (tensile_device_flow_budget), and memory_flow.c divides it.
 *
 * Everything is protected by shared->lock.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "state/device.h"
#include "state/identity.h"
#include "state/images.h"
#include "state/ledger.h"
#include "state/memory_flow.h"
#include "state/shmem.h"
#include "state/slot.h"
#include "state/wakeup.h"

PG_FUNCTION_INFO_V1(tensile_register_device);
PG_FUNCTION_INFO_V1(tensile_inference_memory);
PG_FUNCTION_INFO_V1(tensile_lack_memory);

#define RESERVED_MS 2000		/* longer than the scheduler's and the predictor's pauses */
#define CLAIM_MS (60 * 1000)	/* in which a prediction is expected again */

/* ---- grants ---- */

/*
 * Is there room for a constant grant to grow beside the jobs whose memory
 * flows?  They have to fit into what remains.  If the state is not safe within
 * that now, it will be when they have ended their iterations: for a while none
 * begins that would prevent it, and the caller tries again.
 */
static bool
make_room(int number, int64 growth, int64 room)
{
	TensileDevice *device = &tensile_shared->devices[number];
	int64		fit_bytes;
	int64		safe_bytes;

	tensile_memory_flow_needs(number, &fit_bytes, &safe_bytes);
	if (growth > room - fit_bytes)
		return false;
	if (growth > room - safe_bytes)
	{
		TimestampTz now = GetCurrentTimestamp();

		if (now >= device->reserved_until)
			device->reserved_bytes = 0;
		device->reserved_bytes = Max(device->reserved_bytes, growth);
		device->reserved_until = TimestampTzPlusMilliseconds(now, RESERVED_MS);
		return false;
	}
	device->reserved_bytes = 0;
	tensile_memory_flow_wake(number);
	return true;
}

bool
tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes)
{
	const TensileDevice *device = &tensile_shared->devices[slot->device];
	int64		growth = granted_bytes - slot->granted_bytes;
	int64		inference = device->inference_bytes;
	int64		room;

	/* Whether a job starts before the predictor has its memory was decided by the scheduler. */
	if (slot->granted_bytes > 0)
		inference = Max(inference, device->inference_wanted);
	room = tensile_device_budget(device) - inference - tensile_device_constant_bytes(slot->device);

	if (growth <= 0 || slot->flow.ngroups > 0)
		return true;			/* the larger grant stays until the plan is acknowledged */
	if (!make_room(slot->device, growth, room))
		return false;
	slot->granted_bytes = granted_bytes;
	return true;
}

/* ---- devices ---- */

/*
 * Moves the slot to a device.  Memory that the job was granted on another one
 * is given back.
 */
static void
enter_slot(TensileSlot *slot, const char *name, const TensileDevice *description,
		   int64 overhead_bytes)
{
	bool		stays = slot->device >= 0 &&
		strcmp(tensile_shared->devices[slot->device].name, name) == 0;
	int			device = tensile_device_enter(name, slot);	/* raises before anything has changed */

	/* The only user of a device may describe it anew. */
	if (tensile_device_jobs(device) == (slot->device == device))
	{
		TensileDevice *entry = &tensile_shared->devices[device];

		entry->total_bytes = description->total_bytes;
		entry->out_bytes_per_s = description->out_bytes_per_s;
		entry->in_bytes_per_s = description->in_bytes_per_s;
	}
	if (!stays)
	{
		tensile_memory_flow_clear(slot);
		slot->granted_bytes = 0;
	}
	slot->overhead_bytes = overhead_bytes;
	slot->device = device;
	tensile_memory_flow_wake(device);
}

/*
 * tensile_worker._register_device(name, total_bytes, out_bytes_per_s, in_bytes_per_s,
 * overhead_bytes)
 */
Datum
tensile_register_device(PG_FUNCTION_ARGS)
{
	TensileDevice device = {
		.total_bytes = PG_GETARG_INT64(1),
		.out_bytes_per_s = PG_GETARG_FLOAT8(2),
		.in_bytes_per_s = PG_GETARG_FLOAT8(3)
	};
	int64		overhead_bytes = PG_GETARG_INT64(4);
	char	   *name;

	tensile_require_process(TENSILE_WORKER);
	name = tensile_device_name(PG_GETARG_TEXT_PP(0));
	if (!tensile_device_possible(name, &device, overhead_bytes))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("device \"%s\" cannot have " INT64_FORMAT " bytes, "
						"a link of %g and %g bytes/s and an overhead of " INT64_FORMAT " bytes",
						name, device.total_bytes, device.out_bytes_per_s, device.in_bytes_per_s,
						overhead_bytes)));
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	enter_slot(tensile_my_slot, name, &device, overhead_bytes);
	LWLockRelease(tensile_shared->lock);
	PG_RETURN_VOID();
}

/*
 * Begins or prolongs the claim of a prediction that waits for `least` bytes,
 * and ends it when it has them.
 */
static void
renew_claim(TensileDevice *device, int64 least, bool fits)
{
	TimestampTz now = GetCurrentTimestamp();

	if (fits)
	{
		if (least >= device->claimed_bytes)
			device->claimed_bytes = 0;
		return;
	}
	if (device->claimed_bytes == 0 || now >= device->claimed_until)
		device->claimed_since = now;
	device->claimed_bytes = least;
	device->claimed_until = TimestampTzPlusMilliseconds(now, CLAIM_MS);
}

/*
 * tensile_internal._inference_memory(device, total_bytes, least, wanted) -> bytes that
 * the predictor may use from now on: as many as fit, up to `wanted`.  Null if
 * `least` does not fit; then nothing changes, but plans of jobs leave that much.
 */
Datum
tensile_inference_memory(PG_FUNCTION_ARGS)
{
	int64		total_bytes = PG_GETARG_INT64(1);
	int64		least = PG_GETARG_INT64(2);
	int64		wanted = PG_GETARG_INT64(3);
	TensileDevice *device;
	int			number;
	int64		before;
	int64		fit_bytes;
	int64		safe_bytes;
	int64		room;
	bool		fits;
	char	   *name;

	tensile_require_process(TENSILE_INFERENCE);
	name = tensile_device_name(PG_GETARG_TEXT_PP(0));
	if (total_bytes <= 0 || total_bytes > tensile_device_most_bytes(name) || least < 0 ||
		wanted < least || tensile_device_on_cluster(name))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("the predictor cannot take " INT64_FORMAT " to " INT64_FORMAT " of the "
						INT64_FORMAT " bytes of device \"%s\"",
						least, wanted, total_bytes, name)));
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	device = &tensile_shared->devices[tensile_device_enter(name, NULL)];
	if (device->total_bytes == 0)
		device->total_bytes = total_bytes;
	number = device - tensile_shared->devices;
	tensile_memory_flow_needs(number, &fit_bytes, &safe_bytes);
	room = tensile_device_budget(device) - tensile_device_constant_bytes(number) -
		Max(fit_bytes, safe_bytes);
	if (GetCurrentTimestamp() < device->yielded_until)
		room -= device->yielded_bytes;
	before = device->inference_bytes;
	fits = least <= Max(room, device->inference_bytes); /* it keeps what it has */
	if (fits)
		device->inference_bytes = Max(least, Min(wanted, room));
	if (device->nlacking > 0 && device->inference_bytes < before)
	{
		device->yielded_bytes += before - device->inference_bytes;
		device->yielded_until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), RESERVED_MS);
	}
	/* No iteration begins that would keep `least` from becoming free. */
	device->inference_wanted = fits ? 0 : least;
	renew_claim(device, least, fits);
	tensile_memory_flow_wake(number);
	tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
	wanted = device->inference_bytes;
	LWLockRelease(tensile_shared->lock);
	if (!fits)
		PG_RETURN_NULL();
	PG_RETURN_INT64(wanted);
}

void
tensile_ledger_forget_inference(void)
{
	for (int i = 0; i < tensile_shared->max_devices; i++)
	{
		tensile_shared->devices[i].inference_bytes = 0;
		tensile_shared->devices[i].inference_wanted = 0;
		tensile_shared->devices[i].claimed_bytes = 0;
		tensile_memory_flow_wake(i);
	}
	tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
}

/*
 * The bytes that images have to give back for the first waiting job that they,
 * or they and the predictor's models, suffice for.  They are small and made
 * again in moments, so it does not matter how long they have been idle.
 */
static int64
images_needed(const TensileDevice *device)
{
	int64		images = tensile_device_images_bytes(device);

	for (int i = 0; i < device->nlacking; i++)
		if (device->lacking[i] <= images + device->inference_bytes)
			return Min(device->lacking[i], images);
	return 0;
}

/*
 * tensile_internal._lack_memory(device, bytes, slowed_bytes, inference_bytes): what
 * each waiting job lacks, those first that start first, and what the running ones
 * lack to lose no time, beside what the predictor had when that was decided.  The
 * inference process is told, so that idle models give way.
 */
Datum
tensile_lack_memory(PG_FUNCTION_ARGS)
{
	char	   *name = tensile_device_name(PG_GETARG_TEXT_PP(0));
	ArrayType  *array = PG_GETARG_ARRAYTYPE_P(1);
	int64		slowed_bytes = PG_GETARG_INT64(2);
	Datum	   *bytes;
	int			nbytes;
	int64		needed = 0;

	tensile_require_process(TENSILE_SCHEDULER);
	deconstruct_array(array, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE, &bytes,
					  NULL, &nbytes);
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < tensile_shared->max_devices; i++)
	{
		TensileDevice *device = &tensile_shared->devices[i];

		if (strcmp(device->name, name) != 0)
			continue;
		device->nlacking = Min(nbytes, TENSILE_MAX_LACKING);
		for (int k = 0; k < device->nlacking; k++)
			device->lacking[k] = DatumGetInt64(bytes[k]);
		device->slowed_bytes = slowed_bytes;
		device->lacking_beside = PG_GETARG_INT64(3);
		device->yielded_bytes = 0;	/* by now jobs have it */
		device->lacking_number++;
		if (device->inference_bytes > 0)
			tensile_wake(&tensile_shared->singletons[TENSILE_INFERENCE].wakeup);
		needed = images_needed(device);
	}
	LWLockRelease(tensile_shared->lock);
	if (needed > 0)
		(void) tensile_images_give_way(needed);
	PG_RETURN_VOID();
}
