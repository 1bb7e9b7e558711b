/*
 * device.c: devices that jobs and predictions use, in shared memory, and the
 * memory that each of them has.
 *
 * Everything is protected by shared->lock.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <unistd.h>

#include "utils/timestamp.h"

#include "base/convert.h"
#include "base/guc.h"
#include "base/library.h"
#include "state/device.h"
#include "state/images.h"
#include "state/shmem.h"
#include "state/slot.h"

#define MAX_RATE 1e15			/* bytes/s; no link is faster */

int64
tensile_device_images_bytes(const TensileDevice *device)
{
	return strcmp(device->name, TENSILE_HOST_DEVICE) == 0 ? tensile_images_bytes() : 0;
}

int64
tensile_device_constant_bytes(int device)
{
	int64		bytes = tensile_device_images_bytes(&tensile_shared->devices[device]);

	for (int i = 0; i < tensile_shared->max_jobs; i++)
	{
		const TensileSlot *slot = &tensile_shared->slots[i];

		if (slot->state != SLOT_FREE && slot->device == device)
			bytes += slot->granted_bytes + slot->overhead_bytes;
	}
	return bytes;
}

int
tensile_device_jobs(int device)
{
	int			jobs = 0;

	for (int i = 0; i < tensile_shared->max_jobs; i++)
		jobs += tensile_shared->slots[i].state != SLOT_FREE &&
			tensile_shared->slots[i].device == device;
	return jobs;
}

bool
tensile_device_on_cluster(const char *name)
{
	return strncmp(name, TENSILE_CLUSTER_PREFIX, strlen(TENSILE_CLUSTER_PREFIX)) == 0;
}

int64
tensile_device_budget(const TensileDevice *device)
{
	int64		limit = (int64) tensile_device_memory * 1024;

	if (limit == 0 || tensile_device_on_cluster(device->name))
		return device->total_bytes;
	return Min(limit, device->total_bytes);
}

int64
tensile_device_flow_budget(int number, bool begins)
{
	const TensileDevice *device = &tensile_shared->devices[number];
	int64		room = tensile_device_budget(device) - tensile_device_constant_bytes(number);

	if (!begins)
		return room - device->inference_bytes;
	if (device->reserved_bytes > 0 && GetCurrentTimestamp() < device->reserved_until)
		room -= device->reserved_bytes;
	return room - Max(device->inference_bytes, device->inference_wanted);
}

/* The entry, as tensile_device_enter() takes it; -1 if all are in use. */
static int
find_device(const char *name, const TensileSlot *slot)
{
	int			unused = -1;

	for (int i = 0; i < tensile_shared->max_devices; i++)
	{
		TensileDevice *device = &tensile_shared->devices[i];

		if (strcmp(device->name, name) == 0)
			return i;
		if (unused < 0 && device->inference_bytes == 0 &&
			tensile_device_jobs(i) == (slot && slot->device == i))
			unused = i;
	}
	if (unused >= 0)
	{
		memset(&tensile_shared->devices[unused], 0, sizeof(TensileDevice));
		strlcpy(tensile_shared->devices[unused].name, name, NAMEDATALEN);
	}
	return unused;
}

int
tensile_device_enter(const char *name, const TensileSlot *slot)
{
	int			device = find_device(name, slot);

	if (device < 0)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("jobs and predictions use more than %d devices at once",
						tensile_shared->max_devices)));
	return device;
}

char *
tensile_device_name(const text *argument)
{
	char	   *name = palloc(NAMEDATALEN);

	tensile_copy_text(name, NAMEDATALEN, argument);
	if (*name == '\0')
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a device needs a name")));
	return name;
}

int64
tensile_device_most_bytes(const char *name)
{
	if (strcmp(name, TENSILE_HOST_DEVICE) == 0)
		return Min((int64) sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), TENSILE_MAX_BYTES);
	return TENSILE_MAX_BYTES;
}

static bool
possible_rate(float8 bytes_per_s)
{
	return bytes_per_s > 0 && bytes_per_s <= MAX_RATE;	/* false for a NaN */
}

bool
tensile_device_possible(const char *name, const TensileDevice *device, int64 overhead_bytes)
{
	return device->total_bytes > 0 && device->total_bytes <= tensile_device_most_bytes(name) &&
		possible_rate(device->out_bytes_per_s) && possible_rate(device->in_bytes_per_s) &&
		overhead_bytes >= 0 && overhead_bytes <= device->total_bytes;
}
