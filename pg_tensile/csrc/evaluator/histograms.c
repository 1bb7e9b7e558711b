/*
 * histograms.c: the bins of features and predictions.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/histograms.h"

#define MOST_HISTOGRAMS (1 << 18)
#define MOST_BINS 65536			/* of a histogram */
#define MOST_ALL_BINS (1 << 28)

void
histograms_open(Histograms *self, ImageReader *reader, const Features *features)
{
	memset(self, 0, sizeof(*self));
	self->count = (int) image_whole(reader, 0, MOST_HISTOGRAMS);
	self->items = palloc0(sizeof(Histogram) * self->count + 1);
	for (int i = 0; i < self->count && !reader->is_damaged; i++)
	{
		Histogram  *item = &self->items[i];
		int			features_of_kind;
		Size		cuts,
					labels;

		item->kind = (HistogramKind) image_whole(reader, HISTOGRAM_NUMBERS, HISTOGRAM_LABELS);
		features_of_kind = item->kind == HISTOGRAM_NUMBERS ? features->numbers.count :
			item->kind == HISTOGRAM_CODES ? features->categories.count : 1;
		item->feature = (int) image_whole(reader, 0, features_of_kind - 1);
		item->cuts = image_some(reader, sizeof(double), MOST_BINS, &cuts);
		item->labels = image_some(reader, sizeof(int32), MOST_BINS, &labels);
		item->count = (int) (item->kind == HISTOGRAM_LABELS ? labels : cuts);
		item->bins = (int) image_whole(reader, 1, 2 * MOST_BINS);
		item->start = self->bins;
		self->bins += item->bins;
		if (features_of_kind == 0 || self->bins > MOST_ALL_BINS)
			reader->is_damaged = true;
	}
}

void
histograms_close(Histograms *self)
{
	pfree(self->items);
}

/* The number of smaller cuts, behind the bin of what is not finite. */
static int
number_bin(const Histogram *self, double number)
{
	int			bin = 1;

	if (!is_finite_number(number))
		return 0;
	for (int i = 0; i < self->count; i++)
		bin += self->cuts[i] < number;
	return bin;
}

static int
code_bin(const Histogram *self, int32 code)
{
	int			others = self->bins - 1;

	return code < 0 ? 0 : code > 0 && code < others ? code : others;
}

static int
label_bin(const Histogram *self, int32 label)
{
	int			bin = 0;

	while (bin < self->count && self->labels[bin] != label)
		bin++;
	return bin;
}

void
histograms_find(const Histograms *self, const EvaluatorRows *rows, int row, double prediction,
				int32 label, int *bins)
{
	for (int i = 0; i < self->count; i++)
	{
		const Histogram *item = &self->items[i];
		Size		place = (Size) item->feature * rows->capacity + row;
		int			bin = 0;

		switch (item->kind)
		{
			case HISTOGRAM_NUMBERS:
				bin = number_bin(item, rows->scalars[place]);
				break;
			case HISTOGRAM_CODES:
				bin = code_bin(item, rows->codes[place]);
				break;
			case HISTOGRAM_PREDICTIONS:
				bin = number_bin(item, prediction);
				break;
			case HISTOGRAM_LABELS:
				bin = label_bin(item, label);
				break;
		}
		/* Which none exceeds that was compiled */
		bins[i] = item->start + Min(bin, item->bins - 1);
	}
}
