/*
 * predict_features_tuple.c: features given as columns of a tuple.
 *
 * Each feature has a column of the same name, and a conversion that depends
 * on the column's type and the feature's kind.  Both are looked up once for a
 * row type (feature_sources_create), and used for each of its rows.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include "access/tupmacs.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/float.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include "base/convert.h"
#include "rows/predict_features.h"
#include "rows/predict_features_tuple.h"

static void
set_bytea(FeatureBatch *batch, int feature, Datum value)
{
	struct varlena *bytes = PG_DETOAST_DATUM_PACKED(value);
	const uint8 *from = (const uint8 *) VARDATA_ANY(bytes);
	int			count = VARSIZE_ANY_EXHDR(bytes);
	double	   *to = feature_set_array(batch, feature, count);

	for (int i = 0; i < count; i++)
		to[i] = from[i];
}

/* Stores an array or bytea as float64 elements. */
static void
set_array(FeatureBatch *batch, int feature, const FeatureSource *source, Datum value)
{
	ArrayType  *array;
	const char *from;
	const uint8 *present;
	double	   *to;
	int			count;
	int16		width;
	bool		by_value;
	char		align;

	if (source->element == BYTEAOID)
	{
		set_bytea(batch, feature, value);
		return;
	}
	array = DatumGetArrayTypeP(value);
	count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	to = feature_set_array(batch, feature, count);
	from = ARR_DATA_PTR(array);
	present = ARR_NULLBITMAP(array);
	if (source->element == FLOAT8OID && present == NULL)
	{
		memcpy(to, from, sizeof(double) * count);
		return;
	}
	get_typlenbyvalalign(source->element, &width, &by_value, &align);
	for (int i = 0; i < count; i++)
	{
		if (present != NULL && (present[i / 8] & (1 << (i % 8))) == 0)
			to[i] = get_float8_nan();
		else
		{
			to[i] = source->to_float8(fetch_att(from, by_value, width));
			from = att_addlength_pointer(from, width, from);
			from = (const char *) att_align_nominal(from, align);
		}
	}
}

/* ---- columns ---- */

/*
 * Decides how a column of this type becomes the feature; 42804 if it cannot.
 */
static FeatureSource
source_of_type(const FeatureSet *set, int feature, Oid type, MemoryContext context)
{
	FeatureKind kind = set->features[feature].kind;
	Oid			base = getBaseType(type);
	const char *wire_type = tensile_wire_type(base);
	bool		is_array = wire_type != NULL && strchr(wire_type, '[') != NULL;
	bool		is_timestamp = wire_type != NULL && strcmp(wire_type, "timestamp") == 0;
	FeatureSource source = {0};
	bool		fits;

	switch (kind)
	{
		case FEATURE_NUMERIC:
		case FEATURE_TIMESTAMP:
			source.to_float8 = tensile_to_float8(base);
			source.is_float8 = base == FLOAT8OID;
			fits = source.to_float8 != NULL && is_timestamp == (kind == FEATURE_TIMESTAMP);
			break;
		case FEATURE_CATEGORY:
			fits = !OidIsValid(get_element_type(base)) && base != BYTEAOID &&
				!type_is_rowtype(base);
			if (fits)
				text_converter_init(&source.text, base, context);
			source.is_utf8 = (base == TEXTOID || base == VARCHAROID) &&
				GetDatabaseEncoding() == PG_UTF8;
			break;
		default:
			fits = is_array;
			if (fits)
			{
				source.element = base == BYTEAOID ? base : getBaseType(get_element_type(base));
				source.to_float8 = tensile_to_float8(source.element);
			}
	}
	if (!fits)
		feature_type_mismatch(set, feature, format_type_be(type));
	return source;
}

/* Raises the error of a feature without a column. */
static void
missing_feature(const FeatureSet *set, int feature, TupleDesc desc)
{
	const char **names = palloc(sizeof(char *) * desc->natts);
	int			nnames = 0;

	for (int i = 0; i < desc->natts; i++)
		if (!TupleDescAttr(desc, i)->attisdropped)
			names[nnames++] = NameStr(TupleDescAttr(desc, i)->attname);
	feature_missing(set, feature, names, nnames,
					"The row must have a column with the name of every feature that the model "
					"was trained on.");
}

FeatureSource *
feature_sources_create(const FeatureSet *set, TupleDesc desc, MemoryContext context)
{
	FeatureSource *sources = MemoryContextAllocZero(context,
													sizeof(FeatureSource) * Max(set->count, 1));

	for (int feature = 0; feature < set->count; feature++)
	{
		int			column = -1;

		for (int i = 0; i < desc->natts; i++)
		{
			Form_pg_attribute attribute = TupleDescAttr(desc, i);

			if (attribute->attisdropped ||
				strcmp(NameStr(attribute->attname), set->names[feature]) != 0)
				continue;
			if (column >= 0)
				ereport(ERROR,
						(errcode(ERRCODE_AMBIGUOUS_COLUMN),
						 errmsg("feature \"%s\" appears more than once", set->names[feature]),
						 errhint("Give every column its own name with AS.")));
			column = i;
		}
		if (column < 0)
			missing_feature(set, feature, desc);
		sources[feature] = source_of_type(set, feature, TupleDescAttr(desc, column)->atttypid,
										  context);
		sources[feature].attribute = column;
	}
	return sources;
}

static inline void
set_category(FeatureBatch *batch, int feature, FeatureSource *source, Datum value)
{
	const char *string;
	int			length;

	if (source->is_utf8 && VARATT_IS_SHORT(DatumGetPointer(value)))
	{
		string = VARDATA_SHORT(DatumGetPointer(value));
		length = VARSIZE_SHORT(DatumGetPointer(value)) - VARHDRSZ_SHORT;
	}
	else
		string = text_convert(&source->text, value, &length);
	feature_set_string(batch, feature, string, length);
}

void
feature_batch_add_tuple(FeatureBatch *batch, FeatureSource *sources, const Datum *values,
						const bool *nulls)
{
	MemoryContext old = MemoryContextSwitchTo(batch->scratch);

	feature_batch_start_row(batch);
	for (int i = 0; i < batch->set->count; i++)
	{
		FeatureSource *source = &sources[i];
		Datum		value = values[source->attribute];

		if (nulls[source->attribute])
			continue;
		switch (batch->set->features[i].kind)
		{
			case FEATURE_NUMERIC:
			case FEATURE_TIMESTAMP:
				feature_set_number(batch, i, source->is_float8 ? DatumGetFloat8(value)
								   : source->to_float8(value));
				break;
			case FEATURE_CATEGORY:
				set_category(batch, i, source, value);
				break;
			case FEATURE_ARRAY:
				set_array(batch, i, source, value);
				break;
		}
	}
	batch->row++;
	MemoryContextSwitchTo(old);
	MemoryContextReset(batch->scratch);
}
