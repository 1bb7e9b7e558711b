/*
 * fuzz.c: damaged versions and images, which the evaluator has to survive.
 *
 *     fuzz CORPUS SEED CASES [FIRST]
 *
 * CORPUS is a file of valid versions, each four parts behind their lengths as
 * int32: architecture, preprocessing, reference and weights.  A case mutates
 * some of it, compiles it, opens what compiles and evaluates random rows; then
 * it does the same with damaged copies of the image.  A case depends on the
 * seed and its number only, so that FIRST repeats one.  Sanitizers end the
 * program at a fault, and the last line names the case.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres_fe.h"

#include <fcntl.h>
#include <math.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "evaluator/evaluator.h"

#include "memory.h"

#define PARTS 4
#define MOST_VERSIONS 1024
#define MOST_ROWS 70
#define MOST_ELEMENTS 4096

typedef struct Part
{
	char	   *bytes;
	Size		length;
} Part;

typedef struct Version
{
	Part		parts[PARTS];
} Version;

static Version versions[MOST_VERSIONS];
static int	version_count;
static uint64 random_state;
static int	number;				/* of the case */
static int	compiled,			/* numbers of images that were evaluated */
			damaged;

static void
tell(void)
{
	fprintf(stderr, "fuzz: case %d\n", number);
}

static void
fail(void)
{
	tell();
	abort();
}

static uint64
draw(void)
{
	uint64		x = (random_state += UINT64CONST(0x9E3779B97F4A7C15));

	x = (x ^ (x >> 30)) * UINT64CONST(0xBF58476D1CE4E5B9);
	x = (x ^ (x >> 27)) * UINT64CONST(0x94D049BB133111EB);
	return x ^ (x >> 31);
}

static Size
below(Size limit)
{
	return limit == 0 ? 0 : draw() % limit;
}

static Part
copied(const char *bytes, Size length)
{
	Part		part = {palloc(length + 1), length};

	memcpy(part.bytes, bytes, length);
	part.bytes[length] = '\0';
	return part;
}

/* Puts other bytes in place of some. */
static void
replace(Part *part, Size start, Size length, const char *bytes, Size count)
{
	Part		other = {palloc(part->length - length + count + 1), part->length - length + count};

	memcpy(other.bytes, part->bytes, start);
	memcpy(other.bytes + start, bytes, count);
	memcpy(other.bytes + start + count, part->bytes + start + length,
		   part->length - start - length);
	other.bytes[other.length] = '\0';
	*part = other;
}

static void
mutate_bytes(Part *part)
{
	Size		start = below(part->length);
	Size		length = below(9);

	length = Min(length, part->length - start);
	switch (below(4))
	{
		case 0:
			if (part->length > 0)
				part->bytes[start] = (char) draw();
			break;
		case 1:
			if (part->length > 0)
				part->bytes[start] ^= 1 << below(8);
			break;
		case 2:
			replace(part, start, length, "", 0);
			break;
		case 3:
			replace(part, start, 0, part->bytes + start, length);
			break;
	}
}

/* The end of the JSON value that begins at a place, as far as the text is valid. */
static Size
value_end(const Part *part, Size place)
{
	int			depth = 0;

	for (; place < part->length; place++)
	{
		char		c = part->bytes[place];

		if (c == '"')
			for (place++; place < part->length && part->bytes[place] != '"'; place++)
				place += part->bytes[place] == '\\';
		else if (c == '[' || c == '{')
			depth++;
		else if (c == ']' || c == '}')
		{
			if (--depth < 0)
				return place;
			if (depth == 0)
				return place + 1;
		}
		else if (c == ',' && depth == 0)
			return place;
	}
	return Min(place, part->length);
}

/* Finds a value behind a random place; false if there is none. */
static bool
find_value(const Part *part, Size from, Size to, Size *start, Size *end)
{
	for (Size place = from + below(to - from); place < to; place++)
		if (strchr(":,[", part->bytes[place]) != NULL && part->bytes[place] != '\0')
		{
			*start = place + 1;
			while (*start < to && part->bytes[*start] == ' ')
				++*start;
			*end = value_end(part, *start);
			return *end > *start && *end <= to;
		}
	return false;
}

static const char *const values[] = {
	"0", "1", "-1", "2", "3", "16", "17", "31", "32", "64", "100", "65535", "65536", "1000000",
	"2147483647", "2147483648", "4294967296", "-2147483649", "9223372036854775807", "1e308",
	"-1e308", "1e999", "-1e999", "1e-320", "0.5", "null", "true", "false", "\"\"", "\"numeric\"",
	"\"category\"", "\"array\"", "\"timestamp\"", "[]", "{}", "[0]", "[1,2]", "[[]]",
	"\"\xC3\xA9\"", "\"\\u0041\"", "\"batch\"", "\"layer\"", "\"gelu\"", "\"ensemble\"",
	"\"boosted\"", "\"tabular\"", "\"mlp\"", "\"linear\"", "\"quantile\"", "\"log\"",
	"\"multiclass\"", "\"binary\"", "\"regression\"", "-1.5", "1e10", "7", "8", "9",
};

/* Replaces a value by another one, of the same text or any. */
static void
mutate_value(Part *part)
{
	Size		start,
				end,
				other_start,
				other_end;

	if (!find_value(part, 0, part->length, &start, &end))
		return;
	switch (below(4))
	{
		case 0:
			if (find_value(part, 0, part->length, &other_start, &other_end))
				replace(part, start, end - start, part->bytes + other_start,
						other_end - other_start);
			break;
		case 1:
			replace(part, start, end - start, "", 0);	/* and the comma behind it */
			if (start < part->length && part->bytes[start] == ',')
				replace(part, start, 1, "", 0);
			break;
		case 2:
			replace(part, end, 0, part->bytes + start - 1, end - start + 1);
			if (part->bytes[end] != ',')
				part->bytes[end] = ',';
			break;
		default:
			{
				const char *value = values[below(lengthof(values))];

				replace(part, start, end - start, value, strlen(value));
			}
	}
}

/* The same in JSON that is a part of other bytes, whose length has to stay. */
static void
overwrite_value(Part *part, Size from, Size to)
{
	Size		start,
				end;
	const char *value = values[below(lengthof(values))];
	Size		length = strlen(value);

	if (!find_value(part, from, to, &start, &end))
		return;
	if (below(4) == 0)
	{
		Size		other_start,
					other_end;

		if (find_value(part, from, to, &other_start, &other_end) &&
			other_end - other_start <= end - start)
		{
			Part		other = copied(part->bytes + other_start, other_end - other_start);

			memset(part->bytes + start, ' ', end - start);
			memcpy(part->bytes + start, other.bytes, other.length);
		}
	}
	else if (length <= end - start)
	{
		memset(part->bytes + start, ' ', end - start);
		memcpy(part->bytes + start, value, length);
	}
}

/* Mutates a safetensors file: its table of contents, or trees or numbers behind it. */
static void
mutate_weights(Part *part)
{
	uint64		head = 0;
	Size		behind;

	if (part->length < sizeof(head) || below(8) == 0)
	{
		mutate_bytes(part);
		return;
	}
	memcpy(&head, part->bytes, sizeof(head));
	if (head > part->length - sizeof(head))
		return;
	behind = sizeof(head) + head;
	if (below(3) == 0)
	{
		Part		object = copied(part->bytes + sizeof(head), head);

		mutate_value(&object);
		replace(part, sizeof(head), head, object.bytes, object.length);
		head = object.length;
		memcpy(part->bytes, &head, sizeof(head));
	}
	else if (memmem(part->bytes + behind, part->length - behind, "\"feature\"", 9) != NULL &&
			 below(4) != 0)
		overwrite_value(part, behind, part->length);
	else if (part->length - behind >= sizeof(float))
	{
		static const float numbers[] = {0.0f, -1.0f, 1e38f, -1e38f, INFINITY, NAN, 1e-40f};
		float		weight = numbers[below(lengthof(numbers))];

		memcpy(part->bytes + behind + below(part->length - behind - sizeof(weight) + 1), &weight,
			   sizeof(weight));
	}
}

static void
mutate_version(Version *version)
{
	int			which = (int) below(PARTS);
	Part	   *part = &version->parts[which];

	if (below(20) == 0)
		*part = versions[below(version_count)].parts[which];
	*part = copied(part->bytes, part->length);
	if (which == PARTS - 1)
		mutate_weights(part);
	else if (below(4) == 0)
		mutate_bytes(part);
	else
		mutate_value(part);
}

/* Mutates words and bytes of an image, and sometimes its length. */
static void
mutate_image(char *image, Size *bytes)
{
	static const int64 numbers[] = {0, 1, -1, 2, 3, 4, 7, 8, 15, 16, 31, 63, 64, 255, 256, 65535,
									65536, 1 << 20,
		PG_INT32_MAX, (int64) PG_UINT32_MAX + 1, PG_INT64_MAX, PG_INT64_MIN};
	int			count = 1 + (int) below(4);

	for (int i = 0; i < count; i++)
	{
		Size		width = (Size) 1 << below(4);
		Size		place = below(*bytes / width) * width;
		int64		word = below(3) == 0 ? (int64) draw() : numbers[below(lengthof(numbers))];

		/* Most of an image are numbers that may be any; what counts is mostly in front of them. */
		if (below(2) == 0)
			place = below(Min(*bytes, 2048) / width) * width;
		if (below(4) == 0)
			image[place] ^= 1 << below(8);
		else
			memcpy(image + place, &word, width);
	}
	if (below(20) == 0)
	{
		uint64		length = *bytes - below(Min(*bytes, 200));

		memcpy(image + 2 * sizeof(uint64), &length, sizeof(length));
		*bytes = length;
	}
}

static double
random_number(void)
{
	static const double numbers[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e308, -1e308, 5e-324,
									 9.3e18, -9.3e18, 1e15};

	if (below(4) == 0)
		return numbers[below(lengthof(numbers))];
	return ldexp((double) (int64) draw() / (double) PG_INT64_MAX, (int) below(70) - 5);
}

/* Random rows with exactly as many values as the evaluator takes; the lengths of arrays are 0. */
static void
make_rows(const Evaluator *evaluator, EvaluatorRows *rows)
{
	static const int32 numbers[] = {-1, 0, 1, 2, 3, 5, 9, 100, 65536, PG_INT32_MAX, PG_INT32_MIN};
	int			scalar_count,
				category_count,
				array_count;
	double	   *scalars;
	int32	   *codes;
	EvaluatorArrays *arrays;

	evaluator_features(evaluator, &scalar_count, &category_count, &array_count);
	scalars = palloc(sizeof(double) * scalar_count * rows->rows);
	codes = palloc(sizeof(int32) * category_count * rows->rows);
	arrays = palloc(sizeof(EvaluatorArrays) * array_count);
	for (int i = 0; i < scalar_count * rows->rows; i++)
		scalars[i] = random_number();
	for (int i = 0; i < category_count * rows->rows; i++)
		codes[i] = numbers[below(lengthof(numbers))];
	for (int i = 0; i < array_count; i++)
		arrays[i] = (EvaluatorArrays) {palloc0(sizeof(int32) * rows->rows), NULL};
	for (int category = -1; category <= Min(category_count, 4); category++)
	{
		const char *strings[] = {"", "a", "new york", "\xC3\xA9", "a string that no row has"};
		const char *string = strings[below(lengthof(strings))];
		bool		is_unknown;
		int32		code = evaluator_code(evaluator, category, string, strlen(string), &is_unknown);

		if (category_count * rows->rows > 0)
			codes[below(category_count * rows->rows)] = code;
	}
	rows->capacity = rows->rows;
	rows->scalars = scalars;
	rows->codes = codes;
	rows->arrays = arrays;
}

/* Gives an array feature the length that it is to have, but for nulls. */
static void
fit_arrays(const EvaluatorArrays *arrays, int rows, int expected)
{
	int32	   *lengths = unconstify(int32 *, arrays->lengths);
	Size		count = 0;
	double	   *elements;

	for (int row = 0; row < rows; row++)
	{
		lengths[row] = expected > MOST_ELEMENTS || below(5) == 0 ? -1 : expected;
		count += Max(lengths[row], 0);
	}
	elements = palloc(sizeof(double) * count);
	for (Size i = 0; i < count; i++)
		elements[i] = random_number();
	unconstify(EvaluatorArrays *, arrays)->elements = elements;
}

/* Asks for everything that follows from outputs. */
static void
answer(const Evaluator *evaluator, const EvaluatorRows *rows, const double *outputs)
{
	int			count = rows->rows;
	Size		labels = evaluator_labels(evaluator);
	double	   *prediction = palloc(sizeof(double) * count);
	double	   *probability = palloc(sizeof(double) * count);
	int32	   *label = palloc(sizeof(int32) * count);
	int		   *bins = palloc(sizeof(int) * evaluator_histograms(evaluator));

	evaluator_answers(evaluator, outputs, count, prediction, probability, label);
	for (int row = 0; row < count; row++)
	{
		evaluator_row_bins(evaluator, rows, row, prediction[row], label[row], bins);
		for (int i = 0; i < evaluator_histograms(evaluator); i++)
			if (bins[i] < 0 || bins[i] >= evaluator_bins(evaluator))
				fail();
	}
	if (labels > 0)
		evaluator_probabilities(evaluator, outputs, count, palloc(sizeof(double) * count * labels));
	else
		evaluator_interval(evaluator, outputs, count, 0.001 * below(1100), prediction, probability);
}

/* Whether an image was opened, and evaluated. */
static bool
evaluate(const char *image, Size bytes, bool must_open)
{
	const char *problem;
	EvaluatorRows rows;
	EvaluatorMismatch mismatch;
	Evaluator  *evaluator = evaluator_open(image, bytes, 1, &problem);
	double	   *outputs;

	if (evaluator == NULL)
	{
		if (must_open)
		{
			fprintf(stderr, "an image that was compiled is refused: %s\n", problem);
			fail();
		}
		return false;
	}
	rows.rows = 1 + (int) below(below(3) == 0 ? MOST_ROWS : 12);
	make_rows(evaluator, &rows);
	outputs = palloc(sizeof(double) * rows.rows * evaluator_outputs_per_row(evaluator));
	while (!evaluator_outputs(evaluator, &rows, outputs, &mismatch))
		fit_arrays(&rows.arrays[mismatch.array], rows.rows, mismatch.expected);
	answer(evaluator, &rows, outputs);
	evaluator_close(evaluator);
	return true;
}

static void
run_case(void)
{
	Version		version = versions[below(version_count)];
	int			mutations = (int) below(4);
	char	   *image;
	Size		bytes;
	const char *problem;
	StoredVersion stored;

	for (int i = 0; i < mutations; i++)
		mutate_version(&version);
	stored = (StoredVersion) {
		version.parts[0].bytes, version.parts[0].length,
		version.parts[1].bytes, version.parts[1].length,
		version.parts[2].bytes, version.parts[2].length,
		version.parts[3].bytes, version.parts[3].length,
	};
	if (evaluator_compile(&stored, 1, &image, &bytes, &problem) == EVALUATOR_READY)
	{
		char	   *aligned = (char *) TYPEALIGN(64, palloc(bytes + 64));

		memcpy(aligned, image, bytes);
		compiled += evaluate(aligned, bytes, true);
		for (int i = 0; i < 3; i++)
		{
			/* Nothing lies behind it, so that reading on is seen. */
			Size		length = bytes;
			char	   *copy = aligned_alloc(64, bytes);

			memcpy(copy, image, bytes);
			mutate_image(copy, &length);
			damaged += evaluate(copy, length, false);
			free(copy);
		}
	}
	memory_reset();
}

static void
read_corpus(const char *path)
{
	int			file = open(path, O_RDONLY);
	struct stat status;
	char	   *bytes;
	char	   *end;

	if (file < 0 || fstat(file, &status) != 0)
		exit(2);
	bytes = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
	end = bytes + status.st_size;
	while (bytes < end && version_count < MOST_VERSIONS)
	{
		Version    *version = &versions[version_count++];

		for (int i = 0; i < PARTS; i++)
		{
			int32		length;

			memcpy(&length, bytes, sizeof(length));
			version->parts[i] = (Part) {bytes + sizeof(length), length};
			bytes += sizeof(length) + length;
		}
	}
}

int
main(int argc, char **argv)
{
	uint64		seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
	int			cases = argc > 3 ? atoi(argv[3]) : 0;
	int			first = argc > 4 ? atoi(argv[4]) : 0;

	if (argc < 4)
		return 2;
	__sanitizer_set_death_callback(tell);
	read_corpus(argv[1]);
	for (number = first; number < first + cases; number++)
	{
		random_state =
			seed * UINT64CONST(0x9E3779B97F4A7C15) + number * UINT64CONST(0xD1B54A32D192ED03);
		run_case();
	}
	printf("%d versions and %d damaged images were evaluated\n", compiled, damaged);
	return 0;
}
