/*
 * ledger_sql.c: the device ledger as rows in SQL.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "state/banker.h"
#include "state/device.h"
#include "state/identity.h"
#include "state/progress.h"
#include "state/shmem.h"
#include "state/slot.h"

PG_FUNCTION_INFO_V1(tensile_devices);
PG_FUNCTION_INFO_V1(tensile_budgets);
PG_FUNCTION_INFO_V1(tensile_grants);
PG_FUNCTION_INFO_V1(tensile_lacking_memory);

/* The use of a device by all of its jobs, in all databases. */
typedef struct DeviceUse
{
	int			jobs;
	int64		granted_bytes;	/* with overheads, and what flowing jobs hold */
	int64		in_use_bytes;	/* as last reported */
	float8		utilisation;	/* the highest reported; < 0: none */
	int			flowing_jobs;
	int64		flowing_bytes;	/* that these hold */
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
		use.flowing_jobs += slot->flow.ngroups > 0;
		use.flowing_bytes += tensile_banker_held(&slot->flow);
		LWLockAcquire(slot->lock, LW_SHARED);
		use.in_use_bytes += slot->progress.device_bytes;
		if (slot->progress.reported & TENSILE_REPORTED_UTILISATION)
			use.utilisation = Max(use.utilisation, slot->progress.utilisation);
		LWLockRelease(slot->lock);
	}
	use.granted_bytes += use.flowing_bytes;
	return use;
}

/*
 * Copies all devices and, unless `uses` is NULL, their use; returns their
 * number.  Images count towards the memory of predictions.
 */
static int
copy_devices(TensileDevice **devices, DeviceUse **uses)
{
	int			ndevices = tensile_shared->max_devices;

	*devices = palloc(ndevices * sizeof(TensileDevice));
	if (uses)
		*uses = palloc(ndevices * sizeof(DeviceUse));
	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	memcpy(*devices, tensile_shared->devices, ndevices * sizeof(TensileDevice));
	for (int i = 0; i < ndevices; i++)
	{
		(*devices)[i].inference_bytes += tensile_device_images_bytes(&(*devices)[i]);
		if (uses)
			(*uses)[i] = device_use(i);
	}
	LWLockRelease(tensile_shared->lock);
	return ndevices;
}

/*
 * tensile_worker._devices(): sums over the jobs of all roles.  Columns are null until
 * a job has used the device.
 */
Datum
tensile_devices(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice *devices;
	DeviceUse  *uses;
	int			ndevices;

	tensile_require_preload();
	InitMaterializedSRF(fcinfo, 0);
	ndevices = copy_devices(&devices, &uses);
	for (int i = 0; i < ndevices; i++)
	{
		bool		unknown = devices[i].total_bytes == 0;
		bool		unused = devices[i].out_bytes_per_s == 0;
		Datum		values[] = {
			CStringGetTextDatum(devices[i].name),
			Int64GetDatum(devices[i].total_bytes), Int64GetDatum(tensile_device_budget(&devices[i])),
			Int64GetDatum(uses[i].granted_bytes), Int64GetDatum(uses[i].in_use_bytes),
			Int64GetDatum(devices[i].inference_bytes), Int32GetDatum(uses[i].jobs),
			Float8GetDatum(devices[i].out_bytes_per_s), Float8GetDatum(devices[i].in_bytes_per_s),
			Float8GetDatum(uses[i].utilisation), Int32GetDatum(uses[i].flowing_jobs),
			Int64GetDatum(uses[i].flowing_bytes)
		};
		bool		nulls[lengthof(values)] = {
			false, unknown, unknown, false, false, false, false, unused, unused,
			uses[i].utilisation < 0
		};

		if (devices[i].name[0] != '\0')
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/*
 * tensile_internal._device_memory() -> (device, total_bytes, budget_bytes,
 * inference_bytes, wanted_bytes, claimed_bytes, claimed_s) of the devices that
 * jobs have used: what the predictor has, what it waits for, and what it has
 * waited for in vain and for how long
 */
Datum
tensile_budgets(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();
	TensileDevice *devices;
	int			ndevices;

	tensile_require_process(TENSILE_SCHEDULER);
	InitMaterializedSRF(fcinfo, 0);
	ndevices = copy_devices(&devices, NULL);
	for (int i = 0; i < ndevices; i++)
	{
		Datum		values[] = {
			CStringGetTextDatum(devices[i].name), Int64GetDatum(devices[i].total_bytes),
			Int64GetDatum(tensile_device_budget(&devices[i])),
			Int64GetDatum(devices[i].inference_bytes), Int64GetDatum(devices[i].inference_wanted),
			Int64GetDatum(now < devices[i].claimed_until ? devices[i].claimed_bytes : 0),
			Float8GetDatum((now - devices[i].claimed_since) / (float8) USECS_PER_SEC)
		};
		bool		nulls[lengthof(values)] = {false};

		if (devices[i].total_bytes > 0)
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/*
 * tensile_internal._lacking_memory() -> (device, number, bytes, slowed_bytes) of the
 * devices that the predictor uses and the scheduler has decided about, as
 * tensile_internal._lack_memory has them, less what the predictor has returned since
 * that decision; `number` rises with each decision
 */
Datum
tensile_lacking_memory(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice *devices;
	int			ndevices;

	tensile_require_process(TENSILE_INFERENCE);
	InitMaterializedSRF(fcinfo, 0);
	ndevices = copy_devices(&devices, NULL);
	for (int i = 0; i < ndevices; i++)
	{
		Datum		bytes[TENSILE_MAX_LACKING];
		Datum		values[4];
		bool		nulls[lengthof(values)] = {false};
		int64		returned = Max(0, devices[i].lacking_beside - devices[i].inference_bytes);

		if (devices[i].inference_bytes == 0 || devices[i].lacking_number == 0)
			continue;
		for (int k = 0; k < devices[i].nlacking; k++)
			bytes[k] = Int64GetDatum(Max(0, devices[i].lacking[k] - returned));
		values[0] = CStringGetTextDatum(devices[i].name);
		values[1] = Int64GetDatum((int64) devices[i].lacking_number);
		values[2] = PointerGetDatum(construct_array(bytes, devices[i].nlacking, INT8OID,
													sizeof(int64), FLOAT8PASSBYVAL,
													TYPALIGN_DOUBLE));
		values[3] = Int64GetDatum(Max(0, devices[i].slowed_bytes - returned));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}

/*
 * The constant grant of a job; of one whose memory flows the most that it may
 * take, because what it holds changes all the time.
 */
static int64
shown_grant(const TensileSlot *slot)
{
	return slot->flow.ngroups > 0 ? slot->flow.whole_bytes : slot->granted_bytes;
}

/*
 * tensile_internal._grants(): the ledger's entries of this database's jobs, with their
 * newest plans
 */
Datum
tensile_grants(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TensileDevice *devices;
	TensileSlot *slots;
	int			nslots;

	tensile_require_process(TENSILE_SCHEDULER);
	InitMaterializedSRF(fcinfo, 0);
	slots = tensile_copy_slots(&nslots);
	copy_devices(&devices, NULL);
	for (int i = 0; i < nslots; i++)
	{
		const TensileSlot *slot = &slots[i];
		Datum		values[] = {
			Int64GetDatum(slot->job), CStringGetTextDatum(devices[Max(slot->device, 0)].name),
			Int64GetDatum(shown_grant(slot)), Int64GetDatum(slot->overhead_bytes),
			Int64GetDatum((int64) slot->plan.generation), Int64GetDatum((int64) slot->acknowledged),
			Int64GetDatum(slot->plan.planned_bytes), Int64GetDatum(slot->plan.granted_bytes),
			BoolGetDatum(slot->plan.ngroups > 0)
		};
		bool		nulls[lengthof(values)] = {false};

		nulls[1] = slot->device < 0;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	PG_RETURN_NULL();
}
