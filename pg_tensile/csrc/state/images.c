/*
 * images.c: images of versions that sessions evaluate, which all sessions map.
 *
 * An image is a file among the temporary files, which backups omit, and which
 * the end and the start of a server remove.  It is complete when it has its name, and never changes.  The name
 * has a hash of what is stored with the version, so that the file of another
 * version with the same number is not taken for it.
 *
 * Images are memory of the host, as its page cache has them, and count towards
 * the device ledger (device.c).  One is removed when a job lacks its memory or
 * when there are too many: its file is unlinked, and sessions that have it
 * mapped notice when they predict next, for its entry has another serial.
 *
 * Entries are protected by shared->lock, but for what is atomic.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <unistd.h>

#include "access/xact.h"
#include "common/file_utils.h"
#include "miscadmin.h"
#include "storage/fd.h"
#include "storage/ipc.h"

#include "state/images.h"
#include "state/shmem.h"
#include "state/wakeup.h"

#define IMAGE_INFIX ".pg_tensile_image_"

static void
image_path(TensileImagePath path, Oid database, int64 version, uint64 identity)
{
	snprintf(path, MAXPGPATH,
			 "base/" PG_TEMP_FILES_DIR "/" PG_TEMP_FILE_PREFIX IMAGE_INFIX
			 "%u_" INT64_FORMAT "_" UINT64_FORMAT, database, version, identity);
}

void
tensile_image_path(TensileImagePath path, int64 version, uint64 identity)
{
	image_path(path, MyDatabaseId, version, identity);
}

static void
counts_path(TensileImagePath path, Oid database, int64 version, uint64 identity)
{
	image_path(path, database, version, identity);
	strlcat(path, ".counts", MAXPGPATH);
}

void
tensile_counts_path(TensileImagePath path, int64 version, uint64 identity)
{
	counts_path(path, MyDatabaseId, version, identity);
}

/*
 * An exit callback of the postmaster: a server that has been shut down leaves no
 * images.  A start removes those of one that has crashed.
 */
static void
remove_files(int code, Datum arg)
{
	const char *folder = "base/" PG_TEMP_FILES_DIR;
	const char *prefix = PG_TEMP_FILE_PREFIX IMAGE_INFIX;
	DIR		   *dir;
	struct dirent *entry;
	TensileImagePath path;

	if (MyProcPid != PostmasterPid || (dir = AllocateDir(folder)) == NULL)
		return;
	while ((entry = ReadDirExtended(dir, folder, LOG)) != NULL)
	{
		if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0)
			continue;
		snprintf(path, MAXPGPATH, "%s/%s", folder, entry->d_name);
		unlink(path);
	}
	FreeDir(dir);
}

void
tensile_install_images_hook(void)
{
	on_proc_exit(remove_files, (Datum) 0);
}

/* Frees the entry and unlinks its files.  Caller holds the lock exclusively. */
static void
remove_image(TensileImage *image)
{
	TensileImagePath path;

	pg_atomic_write_u64(&image->serial, 0);
	image_path(path, image->database, image->version, image->identity);
	unlink(path);
	counts_path(path, image->database, image->version, image->identity);
	unlink(path);
	tensile_wake(&tensile_shared->singletons[TENSILE_SCHEDULER].wakeup);
}

/* The image that was not used for the longest time, or NULL. */
static TensileImage *
oldest_image(void)
{
	TensileImage *oldest = NULL;

	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		TensileImage *image = &tensile_shared->images[i];

		if (pg_atomic_read_u64(&image->serial) != 0 &&
			(oldest == NULL ||
			 pg_atomic_read_u64(&image->last_used) < pg_atomic_read_u64(&oldest->last_used)))
			oldest = image;
	}
	return oldest;
}

int64
tensile_images_bytes(void)
{
	int64		bytes = 0;

	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
		if (pg_atomic_read_u64(&tensile_shared->images[i].serial) != 0)
			bytes += tensile_shared->images[i].bytes;
	return bytes;
}

/* The entry of the image, or a free one; NULL: there is neither. */
static TensileImage *
find_image(int64 version, uint64 identity)
{
	TensileImage *unused = NULL;

	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		TensileImage *image = &tensile_shared->images[i];

		if (pg_atomic_read_u64(&image->serial) == 0)
			unused = image;
		else if (image->version == version && image->identity == identity &&
				 image->database == MyDatabaseId)
			return image;
	}
	return unused;
}

TensileImage *
tensile_image_enter(int64 version, uint64 identity, int64 bytes, int64 most_bytes, uint64 *serial)
{
	TensileImage *image;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	image = find_image(version, identity);
	while (image == NULL ||
		   (pg_atomic_read_u64(&image->serial) == 0 && oldest_image() != NULL &&
			tensile_images_bytes() + bytes > most_bytes))
	{
		remove_image(oldest_image());
		image = find_image(version, identity);
	}
	if (pg_atomic_read_u64(&image->serial) == 0)
	{
		image->database = MyDatabaseId;
		image->version = version;
		image->identity = identity;
		image->bytes = bytes;
		pg_atomic_write_u32(&image->counted, 0);
		pg_atomic_write_u64(&image->serial, ++tensile_shared->last_image);
	}
	*serial = pg_atomic_read_u64(&image->serial);
	pg_atomic_write_u64(&image->last_used, (uint64) GetCurrentStatementStartTimestamp());
	LWLockRelease(tensile_shared->lock);
	return image;
}

bool
tensile_image_use(TensileImage *image, uint64 serial)
{
	if (pg_atomic_read_u64(&image->serial) != serial)
		return false;
	pg_atomic_write_u64(&image->last_used, (uint64) GetCurrentStatementStartTimestamp());
	return true;
}

int
tensile_image_versions(int64 versions[TENSILE_MAX_IMAGES])
{
	int			count = 0;

	LWLockAcquire(tensile_shared->lock, LW_SHARED);
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
		if (pg_atomic_read_u64(&tensile_shared->images[i].serial) != 0 &&
			tensile_shared->images[i].database == MyDatabaseId)
			versions[count++] = tensile_shared->images[i].version;
	LWLockRelease(tensile_shared->lock);
	return count;
}

void
tensile_images_remove(int64 version)
{
	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < TENSILE_MAX_IMAGES; i++)
	{
		TensileImage *image = &tensile_shared->images[i];

		if (pg_atomic_read_u64(&image->serial) != 0 && image->database == MyDatabaseId &&
			(version == 0 || image->version == version))
			remove_image(image);
	}
	LWLockRelease(tensile_shared->lock);
}

int64
tensile_images_give_way(int64 bytes)
{
	int64		given = 0;

	LWLockAcquire(tensile_shared->lock, LW_EXCLUSIVE);
	while (given < bytes && (given > 0 || tensile_images_bytes() >= bytes))
	{
		TensileImage *image = oldest_image();

		given += image->bytes;
		remove_image(image);
	}
	LWLockRelease(tensile_shared->lock);
	return given;
}
