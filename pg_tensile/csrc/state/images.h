/*
 * images.h: images of versions that sessions evaluate, which all sessions map.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_IMAGES_H
#define TENSILE_IMAGES_H

#include "datatype/timestamp.h"
#include "port/atomics.h"

#define TENSILE_MAX_IMAGES 256

typedef struct TensileImage
{
	pg_atomic_uint64 serial;	/* of this use of the entry; 0: free */
	pg_atomic_uint64 last_used; /* a TimestampTz */
	pg_atomic_uint32 counted;	/* there are counts beside it that nobody has taken */
	Oid			database;
	int64		version;		/* model_versions.id in that database */
	uint64		identity;		/* of what is stored with the version */
	int64		bytes;
} TensileImage;

typedef char TensileImagePath[MAXPGPATH];

/*
 * The path of the image of a version in this database, below the data
 * directory, and that of its counts of rows.
 */
extern void tensile_image_path(TensileImagePath path, int64 version, uint64 identity);
extern void tensile_counts_path(TensileImagePath path, int64 version, uint64 identity);

/*
 * Enters an image whose file exists, unless it has been entered, and counts
 * its memory.  Makes room by removing those not used for the longest time, so
 * that all together have at most `most_bytes`.  Sets the serial.
 */
extern TensileImage *tensile_image_enter(int64 version, uint64 identity, int64 bytes,
										 int64 most_bytes, uint64 *serial);

/* Is this still the same image?  Then it counts as used now.  Needs no lock. */
extern bool tensile_image_use(TensileImage *image, uint64 serial);

/* In the postmaster: has images removed when the server ends. */
extern void tensile_install_images_hook(void);

/* The versions of this database that have images. */
extern int	tensile_image_versions(int64 versions[TENSILE_MAX_IMAGES]);

/* Removes the images of a version of this database, or of all (0). */
extern void tensile_images_remove(int64 version);

/* The memory of all images.  Caller holds shared->lock. */
extern int64 tensile_images_bytes(void);

/*
 * Removes images, those not used for the longest time first, until they have
 * given back this much, if all of them have as much.  Returns what they gave.
 */
extern int64 tensile_images_give_way(int64 bytes);

#endif
