/*
 * image.c: writing and reading the sections of an image.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/image.h"

#define FIRST_ROOM ((Size) 4096)

/*
 * Room for some bytes at a multiple of the alignment, zeros.  What is too large
 * is written into memory that is not part of the image.
 */
static char *
added(ImageWriter *self, Size bytes, Size alignment)
{
	Size		start = TYPEALIGN(alignment, self->length);
	char	   *place;

	if (bytes > IMAGE_MOST_BYTES - start)
	{
		compilation_unsuitable(self->compilation);
		return compilation_items(self->compilation, bytes, 1);
	}
	if (start + bytes > self->room)
	{
		Size		room = Max(Max(FIRST_ROOM, self->room * 2), start + bytes);

		room = Min(room, IMAGE_MOST_BYTES);
		self->bytes = self->bytes == NULL ? palloc(room) : repalloc(self->bytes, room);
		self->room = room;
	}
	place = self->bytes + start;
	memset(self->bytes + self->length, 0, start + bytes - self->length);
	self->length = start + bytes;
	return place;
}

void
image_write_whole(ImageWriter *self, int64 number)
{
	memcpy(added(self, sizeof(number), sizeof(number)), &number, sizeof(number));
}

void
image_write_double(ImageWriter *self, double number)
{
	memcpy(added(self, sizeof(number), sizeof(number)), &number, sizeof(number));
}

void *
image_write_items(ImageWriter *self, Size count, Size item_bytes)
{
	image_write_whole(self, count);
	return added(self, count * item_bytes, IMAGE_ALIGNMENT);
}

void
image_write_copy(ImageWriter *self, const void *items, Size count, Size item_bytes)
{
	void	   *place = image_write_items(self, count, item_bytes);

	if (count > 0)
		memcpy(place, items, count * item_bytes);
}

/* The next bytes at a multiple of the alignment, or NULL. */
static const char *
next(ImageReader *self, Size bytes, Size alignment)
{
	Size		start = TYPEALIGN(alignment, self->place);

	if (self->is_damaged || start > self->length || bytes > self->length - start)
	{
		self->is_damaged = true;
		return NULL;
	}
	self->place = start + bytes;
	return self->bytes + start;
}

int64
image_whole(ImageReader *self, int64 least, int64 most)
{
	const char *bytes = next(self, sizeof(int64), sizeof(int64));
	int64		number;

	if (bytes == NULL)
		return least;
	memcpy(&number, bytes, sizeof(number));
	if (number >= least && number <= most)
		return number;
	self->is_damaged = true;
	return least;
}

double
image_double(ImageReader *self)
{
	const char *bytes = next(self, sizeof(double), sizeof(double));
	double		number = 0.0;

	if (bytes != NULL)
		memcpy(&number, bytes, sizeof(number));
	return number;
}

const void *
image_some(ImageReader *self, Size item_bytes, Size most, Size *count)
{
	Size		given = image_whole(self, 0, IMAGE_MOST_BYTES);

	*count = 0;
	if (given > most)
		self->is_damaged = true;
	if (!self->is_damaged)
	{
		const void *items = next(self, given * item_bytes, IMAGE_ALIGNMENT);

		*count = items == NULL ? 0 : given;
		return items;
	}
	return NULL;
}

const void *
image_items(ImageReader *self, Size count, Size item_bytes)
{
	Size		given;
	const void *items = image_some(self, item_bytes, count, &given);

	if (given != count)
		self->is_damaged = true;
	return self->is_damaged ? NULL : items;
}
