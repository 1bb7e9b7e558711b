/*
 * model.c: a model of any architecture that is evaluated in a session.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "evaluator/platform.h"

#include "evaluator/forest_compile.h"
#include "evaluator/model.h"

#define MOST_MEMBERS 16

static const char *const kinds[] = {"linear", "mlp", "tabular", "boosted"};

static void
compile_member(ImageWriter *writer, const ModelSource *source, const JsonNode *type)
{
	for (int kind = MODEL_LINEAR; kind <= MODEL_BOOSTED; kind++)
		if (json_equals(type, kinds[kind]))
		{
			image_write_whole(writer, kind);
			switch ((ModelKind) kind)
			{
				case MODEL_LINEAR:
					linear_compile(writer, source);
					break;
				case MODEL_MLP:
					mlp_compile(writer, source);
					break;
				case MODEL_TABULAR:
					tabular_compile(writer, source);
					break;
				case MODEL_BOOSTED:
					forest_compile(writer, source);
					break;
			}
			return;
		}
	compilation_unsuitable(source->compilation);
}

/* Members have the defaults of their architectures. */
static void
compile_average(ImageWriter *writer, const ModelSource *source)
{
	Compilation *compilation = source->compilation;
	const JsonNode *members = json_array(compilation, json_member(source->architecture, "members"));
	int			count;
	const double *weights = json_numbers(compilation, json_member(source->architecture, "weights"),
										 &count);
	ModelSource member = *source;
	int			number = 0;

	if (count != members->count || count == 0 || count > MOST_MEMBERS)
		compilation_damaged(compilation, "its average has not a weight for each model");
	if (!compilation_ready(compilation))
		return;
	image_write_whole(writer, count);
	member.architecture = NULL;
	json_for_each(type, members)
	{
		char		prefix[32];

		snprintf(prefix, sizeof(prefix), "members.%d.", number);
		member.prefix = prefix;
		image_write_double(writer, weights[number++]);
		compile_member(writer, &member, type);
	}
}

void
model_compile(ImageWriter *writer, const ModelSource *source)
{
	const JsonNode *type = json_member(source->architecture, "type");
	Weights    *weights = source->weights;

	if (json_equals(type, "ensemble"))
	{
		image_write_whole(writer, true);
		compile_average(writer, source);
	}
	else
	{
		image_write_whole(writer, false);
		compile_member(writer, source, type);
	}
	if (compilation_ready(source->compilation) && weights->taken != weights->count)
		compilation_damaged(source->compilation, "it has tensors that its model has not");
}

static void
open_member(Model *self, ModelMember *member, ImageReader *reader)
{
	member->kind = (ModelKind) image_whole(reader, MODEL_LINEAR, MODEL_BOOSTED);
	switch (member->kind)
	{
		case MODEL_LINEAR:
			linear_open(&member->linear, reader, self->features, self->outputs);
			break;
		case MODEL_MLP:
			mlp_open(&member->mlp, reader, self->features, self->outputs);
			self->extra = Max(self->extra, member->mlp.extra);
			self->widest = Max(self->widest, member->mlp.widest);
			break;
		case MODEL_TABULAR:
			tabular_open(&member->tabular, reader, self->features, self->outputs);
			self->extra = Max(self->extra, member->tabular.extra);
			self->widest = Max(self->widest,
							   Max(member->tabular.projection, member->tabular.hidden));
			break;
		case MODEL_BOOSTED:
			forest_open(&member->forest, reader, self->features, self->outputs);
			break;
	}
}

void
model_open(Model *self, ImageReader *reader, const Features *features, int outputs)
{
	memset(self, 0, sizeof(*self));
	self->features = features;
	self->outputs = outputs;
	self->widest = outputs;
	self->is_average = image_whole(reader, 0, 1) != 0;
	self->count = self->is_average ? (int) image_whole(reader, 1, MOST_MEMBERS) : 1;
	self->members = palloc0(sizeof(ModelMember) * self->count);
	for (int i = 0; i < self->count; i++)
	{
		if (self->is_average)
			self->members[i].weight = (float) image_double(reader);
		open_member(self, &self->members[i], reader);
	}
	self->widest = Max(self->widest, features->width + self->extra);
}

void
model_prepare(Model *self, int rows)
{
	rows_new(&self->y, rows, self->outputs);
	for (int i = 0; i < self->count; i++)
	{
		if (self->members[i].kind == MODEL_MLP)
			mlp_prepare(&self->members[i].mlp, rows);
		else if (self->members[i].kind == MODEL_TABULAR)
			tabular_prepare(&self->members[i].tabular, rows);
		else if (self->members[i].kind == MODEL_BOOSTED)
			forest_prepare(&self->members[i].forest, rows);
	}
}

void
model_close(Model *self)
{
	rows_free(&self->y);
	for (int i = 0; i < self->count; i++)
	{
		if (self->members[i].kind == MODEL_MLP)
			mlp_close(&self->members[i].mlp);
		else if (self->members[i].kind == MODEL_TABULAR)
			tabular_close(&self->members[i].tabular);
		else if (self->members[i].kind == MODEL_BOOSTED)
			forest_close(&self->members[i].forest);
	}
	pfree(self->members);
}

static void
member_outputs(ModelMember *member, const FeatureBlock *block, Rows *y)
{
	switch (member->kind)
	{
		case MODEL_LINEAR:
			linear_outputs(&member->linear, block, y);
			break;
		case MODEL_MLP:
			mlp_outputs(&member->mlp, block, y);
			break;
		case MODEL_TABULAR:
			tabular_outputs(&member->tabular, block, y);
			break;
		case MODEL_BOOSTED:
			forest_outputs(&member->forest, block, y->numbers, y->stride);
			break;
	}
}

void
model_outputs(Model *self, const FeatureBlock *block, Rows *y)
{
	if (!self->is_average)
	{
		member_outputs(&self->members[0], block, y);
		return;
	}
	for (int i = 0; i < self->count; i++)
	{
		float		weight = self->members[i].weight;

		member_outputs(&self->members[i], block, &self->y);
		for (int row = 0; row < block->rows; row++)
		{
			const float *own = self->y.numbers + (Size) row * self->y.stride;
			float	   *sum = y->numbers + (Size) row * y->stride;

			for (int k = 0; k < self->outputs; k++)
				sum[k] = i == 0 ? weight * own[k] : sum[k] + weight * own[k];
		}
	}
}
