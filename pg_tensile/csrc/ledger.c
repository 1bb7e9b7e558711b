/*
 * ledger.c: the device ledger, which divides the memory of each device among
 * jobs and predictions.
 *
 * A device has entries for the grant and the overhead of each job (the memory
 * that its executor needs outside of the plan, such as a CUDA context), and
 * for the predictor.  Their sum does not exceed the device's budget, which is
 * pg_tensile.device_memory and at most the device's memory, because a grant
 * that does not fit is refused.  Overheads are facts, not grants: they, or a
 * lower setting, can raise the sum above the budget, and then no grant grows
 * until there is room.
 *
 * Until the executor has made an iteration under a new plan
 * (tensile._acknowledge_plan, plan.c), the larger of the former and the new
 * grant counts, so that jobs shrink before others grow.
 *
 * The first worker on a device reports its size and rates, which are kept as
 * long as the device is in use.  Such reports come from a child, which
 * executes code of users.  So numbers that no device can have are an error of
 * that job, and sums over all jobs cannot overflow (TENSILE_MAX_BYTES).
 *
 * Everything is protected by shared->lock.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <unistd.h>

#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

#include "guc.h"
#include "ledger.h"
#include "pg_tensile.h"
#include "process.h"
#include "progress.h"
#include "shmem.h"
#include "slot.h"

PG_FUNCTION_INFO_V1(tensile_register_device);
PG_FUNCTION_INFO_V1(tensile_inference_memory);
PG_FUNCTION_INFO_V1(tensile_devices);
PG_FUNCTION_INFO_V1(tensile_budgets);
PG_FUNCTION_INFO_V1(tensile_grants);

#define HOST_DEVICE "cpu"
#define MAX_RATE 1e15			/* bytes/s; no link is faster */

/* ---- grants ---- */

/* The use of a device by all of its jobs, in all databases. */
typedef struct DeviceUse
{
	int			jobs;
	int64		granted_bytes;	/* with overheads */
	int64		in_use_bytes;	/* as last reported */
	float8		utilisation;	/* the highest reported; < 0: none */
} DeviceUse;

/* Caller holds shared->lock. */
static DeviceUse
device_use(int device)
{
	DeviceUse	use = {.utilisation = -1};

	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state == SLOT_FREE || slot->device != device)
			continue;
		use.jobs++;
		use.granted_bytes += slot->granted_bytes + slot->overhead_bytes;
		LWLockAcquire(slot->lock, LW_SHARED);
		use.in_use_bytes += slot->progress.device_bytes;
		if (slot->progress.reported & TENSILE_REPORTED_UTILISATION)
			use.utilisation = Max(use.utilisation, slot->progress.utilisation);
		LWLockRelease(slot->lock);
	}
	return use;
}

/*
 * The part of a device's memory that jobs and the predictor may use together.
 */
static int64
device_budget(const TensileDevice *device)
{
	int64		limit = (int64) tensile_device_memory * 1024;

	return limit > 0 ? Min(limit, device->total_bytes) : device->total_bytes;
}

bool
tensile_ledger_enter(TensileSlot *slot, int64 granted_bytes)
{
	const TensileDevice *device = &tensile_shared->devices[slot->device];
	int64		growth = granted_bytes - slot->granted_bytes;
	int64		inference = Max(device->inference_bytes, device->inference_wanted);
	int64		room = device_budget(device) - inference - device_use(slot->device).granted_bytes;

	if (growth <= 0)
		return true;			/* the larger grant stays until the plan is acknowledged */
	if (growth > room)
		return false;
	slot->granted_bytes = granted_bytes;
	return true;
}

/* ---- devices ---- */

/*
 * The entry of the device with that name.  If there is none, names an entry
 * that no job uses, or only the one of `slot` (if not NULL); -1 if all are in
 * use.  Caller holds shared->lock exclusively.
 */
static int
find_device(const char *name, const TensileSlot *slot)
{
	int			unused = -1;

	for (int i = 0; i < TENSILE_MAX_DEVICES; i++)
	{
		TensileDevice *device = &tensile_shared->devices[i];

		if (strcmp(device->name, name) == 0)
			return i;
		if (unused < 0 && device->inference_bytes == 0 &&
			device_use(i).jobs == (slot && slot->device == i))
			unused = i;
	}
	if (unused >= 0)
	{
		memset(&tensile_shared->devices[unused], 0, sizeof(TensileDevice));
		strlcpy(tensile_shared->devices[unused].name, name, NAMEDATALEN);
	}
	return unused;
}

static int
enter_device(const char *name, const TensileSlot *slot)
{
	int			device = find_device(name, slot);

	if (device < 0)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("jobs use more than %d devices at once", TENSILE_MAX_DEVICES)));
	return device;
}

/* A device's name from an argument, cut to fit. */
static char *
device_name(const text *argument)
{
	char	   *name = palloc(NAMEDATALEN);

	tensile_copy_text(name, NAMEDATALEN, argument);
	if (*name == '\0')
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a device needs a name")));
	return name;
}

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
	int			device = enter_device(name, slot);	/* raises before anything has changed */

	/* The only user of a device may describe it anew. */
	if (device_use(device).jobs == (slot->device == device))
	{
		TensileDevice *entry = &tensile_shared->devices[device];

		entry->total_bytes = description->total_bytes;
		entry->out_bytes_per_s = description->out_bytes_per_s;
		entry->in_bytes_per_s = description->in_bytes_per_s;
	}
	if (!stays)
		slot->granted_bytes = 0;
	slot->overhead_bytes = overhead_bytes;
	slot->device = device;
}

/* The most memory that a device of this name can have; known for the host. */
static int64
most_bytes(const char *name)
{
	if (strcmp(name, HOST_DEVICE) == 0)
		return Min((int64) sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), TENSILE_MAX_BYTES);
	return TENSILE_MAX_BYTES;
}

static bool
possible_rate(float8 bytes_per_s)
{
	return bytes_per_s > 0 && bytes_per_s <= MAX_RATE;	/* false for a NaN */
}

/* Can a device have these numbers, and an executor this overhead on it? */
static bool
possible_device(const char *name, const TensileDevice *device, int64 overhead_bytes)
{
	return device->total_bytes > 0 && device->total_bytes <= most_bytes(name) &&
		possible_rate(device->out_bytes_per_s) && possible_rate(device->in_bytes_per_s) &&
		overhead_bytes >= 0 && overhead_bytes <= device->total_bytes;
}

/*
 * tensile._register_device(name, total_bytes, out_bytes_per_s, in_bytes_per_s,
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
	name = device_name(PG_GETARG_TEXT_PP(0));
	if (!possible_device(name, &device, overhead_bytes))
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
 * tensile._inference_memory(device, total_bytes, least, wanted) -> bytes that
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
	int64		room;
	bool		fits;
	char	   *name;

	tensile_require_process(TENSILE_INFERENCE);
	name = device_name(PG_GETARG_TEXT_PP(0));
	if (total_bytes <= 0 || total_bytes > most_bytes(name) || least < 0 || wanted < least)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("the predictor cannot take " INT64_FORMAT " to " INT64_FORMAT " of the "
						INT64_FORMAT " bytes of device \"%s\"",
						least, wanted, total_bytes, name)));
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	device = &tensile_shared->devices[enter_device(name, NULL)];
	if (device->total_bytes == 0)
		device->total_bytes = total_bytes;
	room = device_budget(device) - device_use(device - tensile_shared->devices).granted_bytes;
	fits = least <= Max(room, device->inference_bytes); /* it keeps what it has */
	if (fits)
		device->inference_bytes = Max(least, Min(wanted, room));
	device->inference_wanted = fits ? 0 : least;
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
	for (int i = 0; i < TENSILE_MAX_DEVICES; i++)
	{
		tensile_shared->devices[i].inference_bytes = 0;
		tensile_shared->devices[i].inference_wanted = 0;
	}
	tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
}

/* ---- functions in SQL ---- */

/* Copies all devices and their use. */
static void
copy_devices(TensileDevice *devices, DeviceUse *uses)
{
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	memcpy(devices, tensile_shared->devices, sizeof(tensile_shared->devices));
	for (int i = 0; i < TENSILE_MAX_DEVICES; i++)
		uses[i] = device_use(i);
	LWLockRelease(tensile_shared->lock);
}

/*
 * tensile._devices(): sums over the jobs of all roles.  Columns are null until
 * a job has used the device.
 */
Datum
tensile_devices(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice devices[TENSILE_MAX_DEVICES];
	DeviceUse	uses[TENSILE_MAX_DEVICES];

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	copy_devices(devices, uses);
	for (int i = 0; i < TENSILE_MAX_DEVICES; i++)
	{
		bool		unknown = devices[i].total_bytes == 0;
		bool		unused = devices[i].out_bytes_per_s == 0;
		Datum		values[] = {
			CStringGetTextDatum(devices[i].name),
			Int64GetDatum(devices[i].total_bytes), Int64GetDatum(device_budget(&devices[i])),
			Int64GetDatum(uses[i].granted_bytes), Int64GetDatum(uses[i].in_use_bytes),
			Int64GetDatum(devices[i].inference_bytes), Int32GetDatum(uses[i].jobs),
			Float8GetDatum(devices[i].out_bytes_per_s), Float8GetDatum(devices[i].in_bytes_per_s),
			Float8GetDatum(uses[i].utilisation)
		};
		bool		nulls[] = {
			false, unknown, unknown, false, false, false, false, unused, unused,
			uses[i].utilisation < 0
		};

		if (devices[i].name[0] != '\0')
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/*
 * tensile._device_memory() -> (device, total_bytes, budget_bytes,
 * inference_bytes) of the devices that jobs have used
 */
Datum
tensile_budgets(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice devices[TENSILE_MAX_DEVICES];
	DeviceUse	uses[TENSILE_MAX_DEVICES];

	tensile_require_process(TENSILE_SCHEDULER);
	InitMaterializedSRF(fcinfo, 0);
	copy_devices(devices, uses);
	for (int i = 0; i < TENSILE_MAX_DEVICES; i++)
	{
		Datum		values[] = {
			CStringGetTextDatum(devices[i].name), Int64GetDatum(devices[i].total_bytes),
			Int64GetDatum(device_budget(&devices[i])),
			Int64GetDatum(Max(devices[i].inference_bytes, devices[i].inference_wanted))
		};
		bool		nulls[lengthof(values)] = {false};

		if (devices[i].total_bytes > 0)
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/*
 * tensile._grants(): the ledger's entries of this database's jobs, with their
 * newest plans
 */
Datum
tensile_grants(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice devices[TENSILE_MAX_DEVICES];
	DeviceUse	uses[TENSILE_MAX_DEVICES];
	TensileSlot *slots;
	int			nslots;

	tensile_require_process(TENSILE_SCHEDULER);
	InitMaterializedSRF(fcinfo, 0);
	slots = tensile_copy_slots(&nslots);
	copy_devices(devices, uses);
	for (int i = 0; i < nslots; i++)
	{
		const TensileSlot *slot = &slots[i];
		Datum		values[] = {
			Int64GetDatum(slot->job), CStringGetTextDatum(devices[Max(slot->device, 0)].name),
			Int64GetDatum(slot->granted_bytes), Int64GetDatum(slot->overhead_bytes),
			Int64GetDatum((int64) slot->plan.generation), Int64GetDatum((int64) slot->acknowledged),
			Int64GetDatum(slot->plan.planned_bytes), Int64GetDatum(slot->plan.granted_bytes)
		};
		bool		nulls[lengthof(values)] = {false};

		nulls[1] = slot->device < 0;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}
