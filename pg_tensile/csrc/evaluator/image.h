/*
 * image.h: writing and reading the sections of an image.
 *
 * A section is a stream of numbers of 8 bytes and of arrays, each of which has
 * its length in front and begins at a multiple of 64 bytes, as the section does.
 * What reads a section gets no pointer that leads out of it, and after a
 * problem zeros.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_IMAGE_H
#define TENSILE_IMAGE_H

#include "evaluator/compilation.h"

#define IMAGE_ALIGNMENT 64
#define IMAGE_MOST_BYTES ((Size) 0x30000000)	/* 768 MB: less than palloc() gives */

typedef struct ImageWriter
{
	Compilation *compilation;
	char	   *bytes;
	Size		length;
	Size		room;
} ImageWriter;

extern void image_write_whole(ImageWriter *self, int64 number);
extern void image_write_double(ImageWriter *self, double number);

/* Adds an array of zeros and returns it, to be filled before the next call. */
extern void *image_write_items(ImageWriter *self, Size count, Size item_bytes);
extern void image_write_copy(ImageWriter *self, const void *items, Size count, Size item_bytes);

typedef struct ImageReader
{
	const char *bytes;
	Size		length;
	Size		place;
	bool		is_damaged;
} ImageReader;

/* A number in a range; the least one if it is out of it, and the image is damaged. */
extern int64 image_whole(ImageReader *self, int64 least, int64 most);
extern double image_double(ImageReader *self);

/* An array of this many items, or NULL and the image is damaged. */
extern const void *image_items(ImageReader *self, Size count, Size item_bytes);

/* The same with any number of items that it has, up to a limit. */
extern const void *image_some(ImageReader *self, Size item_bytes, Size most, Size *count);

#define image_array(self, type, count) ((const type *) image_items(self, count, sizeof(type)))

#endif
