/*
 * evaluator.c: models that a session evaluates itself.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/answers_compile.h"
#include "evaluator/evaluator.h"
#include "evaluator/histograms_compile.h"
#include "evaluator/model.h"

#define IMAGE_MAGIC UINT64CONST(0x31564C4156454750) /* PGEVALV1 */

typedef enum Section
{
	SECTION_FEATURES,
	SECTION_MODEL,
	SECTION_ANSWERS,
	SECTION_HISTOGRAMS,
	SECTIONS
} Section;

/* The beginning of an image; sections follow it, each at a multiple of IMAGE_ALIGNMENT. */
typedef struct ImageHeader
{
	uint64		magic;
	uint64		identity;
	uint64		bytes;			/* of the whole image */
	uint64		starts[SECTIONS];
	uint64		lengths[SECTIONS];
} ImageHeader;

struct Evaluator
{
	Features	features;
	Model		model;
	Answers		answers;
	Histograms	histograms;
	int			block_rows;
	Rows		numbers;		/* workspace of a block: features, codes and outputs */
	int32	   *codes;
	Rows		outputs;
};

/*
 * Rows are evaluated in blocks, so that what is computed of them stays in the
 * processor's cache from layer to layer.
 */
#define BLOCK_NUMBERS 32768
#define LEAST_BLOCK 16

static const JsonNode *
parsed(Compilation *compilation, const char *json, Size length)
{
	const JsonNode *node = json_parse(compilation, json, length);

	if (!json_is(node, JSON_IS_OBJECT))
		compilation_damaged(compilation, "its JSON is no object");
	return node;
}

/* The histograms of training rows; what is wrong with them is no problem of the version. */
static void
compile_histograms(const StoredVersion *version, ImageWriter *writer, const JsonNode *preprocessing)
{
	Compilation own = {.status = EVALUATOR_READY};
	const JsonNode *reference = version->reference == NULL ? NULL :
		json_parse(&own, version->reference, version->reference_length);

	histograms_compile(writer, reference, preprocessing);
	if (own.problem != NULL)
		pfree(unconstify(char *, own.problem));
	compilation_end(&own);
}

static void
compile_sections(const StoredVersion *version, Compilation *compilation, ImageWriter *sections)
{
	const JsonNode *architecture = parsed(compilation, version->architecture,
										  version->architecture_length);
	const JsonNode *preprocessing = parsed(compilation, version->preprocessing,
										   version->preprocessing_length);
	const JsonNode *list = json_member(preprocessing, "features");
	ImageReader reader;
	Features	features;
	Answers		answers;
	Weights		weights;

	if (json_member(preprocessing, "text") != NULL)
		compilation_unsuitable(compilation);
	features_compile(&sections[SECTION_FEATURES], json_array(compilation, list));
	answers_compile(&sections[SECTION_ANSWERS], preprocessing);
	if (!compilation_ready(compilation))
		return;
	/* The model is compiled for features and outputs as they will be opened. */
	reader = (ImageReader) {.bytes = sections[SECTION_ANSWERS].bytes,
							.length = sections[SECTION_ANSWERS].length};
	answers_open(&answers, &reader);
	reader = (ImageReader) {.bytes = sections[SECTION_FEATURES].bytes,
							.length = sections[SECTION_FEATURES].length};
	features_open(&features, &reader);
	if (reader.is_damaged)
		compilation_unsuitable(compilation);	/* it has too many */
	weights_open(&weights, compilation, version->weights, version->weight_bytes);
	if (compilation_ready(compilation))
		model_compile(&sections[SECTION_MODEL], &(ModelSource) {
			.compilation = compilation,
			.weights = &weights,
			.prefix = "",
			.architecture = architecture,
			.features = &features,
			.outputs = answers.outputs,
		});
	features_close(&features);
	if (compilation_ready(compilation))
		compile_histograms(version, &sections[SECTION_HISTOGRAMS], preprocessing);
}

/* Puts the sections behind a header. */
static char *
joined(const ImageWriter *sections, uint64 identity, Size *bytes)
{
	ImageHeader header = {.magic = IMAGE_MAGIC, .identity = identity};
	Size		end = TYPEALIGN(IMAGE_ALIGNMENT, sizeof(header));
	char	   *image;

	for (int i = 0; i < SECTIONS; i++)
	{
		header.starts[i] = end;
		header.lengths[i] = sections[i].length;
		end += TYPEALIGN(IMAGE_ALIGNMENT, sections[i].length);
	}
	header.bytes = end;
	if (end > IMAGE_MOST_BYTES)
		return NULL;
	image = palloc0(end);
	memcpy(image, &header, sizeof(header));
	for (int i = 0; i < SECTIONS; i++)
		memcpy(image + header.starts[i], sections[i].bytes, sections[i].length);
	*bytes = end;
	return image;
}

int
evaluator_interface(void)
{
	return EVALUATOR_INTERFACE;
}

EvaluatorStatus
evaluator_compile(const StoredVersion *version, uint64 identity, char **image, Size *bytes,
				  const char **problem)
{
	Compilation compilation = {.status = EVALUATOR_READY};
	ImageWriter sections[SECTIONS] = {{0}};

	*image = NULL;
	*bytes = 0;
#ifdef WORDS_BIGENDIAN
	compilation_unsuitable(&compilation);	/* tensors have the other order */
#else
	for (int i = 0; i < SECTIONS; i++)
		sections[i].compilation = &compilation;
	compile_sections(version, &compilation, sections);
#endif
	if (compilation_ready(&compilation))
	{
		*image = joined(sections, identity, bytes);
		if (*image == NULL)
			compilation_unsuitable(&compilation);
	}
	for (int i = 0; i < SECTIONS; i++)
		if (sections[i].bytes != NULL)
			pfree(sections[i].bytes);
	compilation_end(&compilation);
	*problem = compilation.problem;
	return compilation.status;
}

static bool
is_image(const ImageHeader *header, const void *image, Size bytes, uint64 identity)
{
	return (uintptr_t) image % IMAGE_ALIGNMENT == 0 && bytes >= sizeof(ImageHeader) &&
		bytes <= IMAGE_MOST_BYTES && header->magic == IMAGE_MAGIC &&
			header->identity == identity && header->bytes == bytes;
}

/* A section, damaged from the beginning if it is not inside of the image or if another one was. */
static ImageReader
section(const void *image, const ImageHeader *header, Section number, bool is_damaged)
{
	uint64		start = header->starts[number],
				length = header->lengths[number];

	if (start % IMAGE_ALIGNMENT != 0 || start > header->bytes || length > header->bytes - start)
		is_damaged = true;
	return (ImageReader) {
		.bytes = is_damaged ? NULL : (const char *) image + start,
		.length = is_damaged ? 0 : length,
		.is_damaged = is_damaged,
	};
}

Evaluator *
evaluator_open(const void *image, Size bytes, uint64 identity, const char **problem)
{
	const ImageHeader *header = image;
	Evaluator  *self;
	ImageReader reader;

	*problem = NULL;
	if (!is_image(header, image, bytes, identity))
	{
		*problem = "it is not the image of this version";
		return NULL;
	}
	self = palloc0(sizeof(Evaluator));
	reader = section(image, header, SECTION_ANSWERS, false);
	answers_open(&self->answers, &reader);
	reader = section(image, header, SECTION_FEATURES, reader.is_damaged);
	features_open(&self->features, &reader);
	reader = section(image, header, SECTION_MODEL, reader.is_damaged);
	model_open(&self->model, &reader, &self->features, self->answers.outputs);
	reader = section(image, header, SECTION_HISTOGRAMS, reader.is_damaged);
	histograms_open(&self->histograms, &reader, &self->features);
	if (reader.is_damaged || self->model.widest > EVALUATOR_MOST_WEIGHTS)
	{
		*problem = "the image of this version is damaged";
		evaluator_close(self);
		return NULL;
	}
	self->block_rows = Min(Max(BLOCK_NUMBERS / Max(self->model.widest, 1), LEAST_BLOCK),
						   NUMBERS_MOST_ROWS);
	model_prepare(&self->model, self->block_rows);
	rows_new(&self->numbers, self->block_rows, self->features.width + self->model.extra);
	rows_new(&self->outputs, self->block_rows, self->answers.outputs);
	self->codes =
		palloc0(sizeof(int32) * ((Size) self->block_rows * self->features.categories.count + 1));
	return self;
}

void
evaluator_close(Evaluator *self)
{
	features_close(&self->features);
	model_close(&self->model);
	histograms_close(&self->histograms);
	rows_free(&self->numbers);
	rows_free(&self->outputs);
	if (self->codes != NULL)
		pfree(self->codes);
	pfree(self);
}

void
evaluator_features(const Evaluator *self, int *scalars, int *categories, int *arrays)
{
	*scalars = self->features.numbers.count;
	*categories = self->features.categories.count;
	*arrays = self->features.arrays.count;
}

int
evaluator_outputs_per_row(const Evaluator *self)
{
	return self->answers.outputs;
}

int
evaluator_labels(const Evaluator *self)
{
	return self->answers.labels;
}

int32
evaluator_code(const Evaluator *self, int category, const char *utf8, int length, bool *unknown)
{
	const Categories *categories = &self->features.categories;

	if (category < 0 || category >= categories->count)
	{
		*unknown = true;
		return 0;
	}
	return category_code(&categories->items[category], utf8, length, unknown);
}

bool
evaluator_outputs(Evaluator *self, const EvaluatorRows *rows, double *outputs,
				  EvaluatorMismatch *mismatch)
{
	int			width = self->answers.outputs;

	if (!arrays_begin(&self->features.arrays, rows->arrays, rows->rows, mismatch))
		return false;
	for (int first = 0; first < rows->rows; first += self->block_rows)
	{
		FeatureBlock block = {
			.rows = Min(rows->rows - first, self->block_rows),
			.stride = self->numbers.stride,
			.numbers = self->numbers.numbers,
			.codes = self->codes,
		};

		features_apply(&self->features, rows, first, &block);
		model_outputs(&self->model, &block, &self->outputs);
		for (int row = 0; row < block.rows; row++)
			for (int i = 0; i < width; i++)
				*outputs++ = self->outputs.numbers[(Size) row * self->outputs.stride + i];
	}
	return true;
}

void
evaluator_answers(const Evaluator *self, const double *outputs, int rows, double *prediction,
				  double *probability, int32 *label)
{
	answers_find(&self->answers, outputs, rows, prediction, probability, label);
}

void
evaluator_probabilities(const Evaluator *self, const double *outputs, int rows,
						double *probabilities)
{
	answers_probabilities(&self->answers, outputs, rows, probabilities);
}

int64
evaluator_interval_rows(const Evaluator *self)
{
	return self->answers.rows;
}

EvaluatorInterval
evaluator_interval(const Evaluator *self, const double *outputs, int rows, double coverage,
				   double *lower, double *upper)
{
	return answers_interval(&self->answers, outputs, rows, coverage, lower, upper);
}

int
evaluator_bins(const Evaluator *self)
{
	return self->histograms.bins;
}

int
evaluator_histograms(const Evaluator *self)
{
	return self->histograms.count;
}

void
evaluator_row_bins(const Evaluator *self, const EvaluatorRows *rows, int row, double prediction,
				   int32 label, int *bins)
{
	histograms_find(&self->histograms, rows, row, prediction, label, bins);
}
