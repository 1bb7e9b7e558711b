/*
 * check.c: the JSON that users write, checked key by key before anything is stored.
 *
 * One static table of keys for each architecture and one for the options of train_model; docs/internals.md lists the same
 * for readers. A walker compares an object with its table. Every error is 22023, names the key by its path
 * ("early_stopping.patience", "hidden[2]") and says what would be right. What only PyTorch can know (does the callable
 * exist?) is found by the child.
 */
#include "postgres.h"

#include <math.h>

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"

#include "query.h"

PG_FUNCTION_INFO_V1(tensile_check_architecture);
PG_FUNCTION_INFO_V1(tensile_check_options);

/* ---- what a value must be ---- */

typedef enum KeyKind
{
	KEY_INT,					/* min ... max; odd only if so marked */
	KEY_NUMBER,					/* min ... max, with or without the ends */
	KEY_BOOL,
	KEY_TEXT,					/* not empty */
	KEY_CALLABLE,				/* package.module:function */
	KEY_CHOICE,					/* one of choices */
	KEY_INTS,					/* an array of min_items ... max_items integers of min ... max */
	KEY_OBJECT,					/* any object */
	KEY_RULES					/* an object with keys of its own */
} KeyKind;

typedef struct Key
{
	const char *name;
	KeyKind		kind;
	bool		required;
	double		min;
	double		max;
	bool		open_min;		/* the minimum itself is excluded */
	bool		open_max;
	bool		odd;
	int			min_items;
	int			max_items;
	const char *const *choices;
	const struct Key *keys;
} Key;

static const char *const activations[] = {"relu", "gelu", "silu", "tanh", NULL};
static const char *const norms[] = {"none", "batch", "layer", NULL};
static const char *const tasks[] = {"regression", "classification", NULL};
static const char *const scalings[] = {"accudnn", "linear", "none", NULL};
static const char *const compressions[] = {"none", "auto", "zvc", "rle", "csr", "lz4", NULL};

#define HIDDEN {"hidden", KEY_INTS, .min = 1, .max = 65536, .max_items = 64}
#define ACTIVATION {"activation", KEY_CHOICE, .choices = activations}
#define DROPOUT {"dropout", KEY_NUMBER, .min = 0, .max = 1, .open_max = true}
#define NORM {"norm", KEY_CHOICE, .choices = norms}
#define EMBEDDING {"embedding", KEY_INT, .min = 1, .max = 1024}

static const Key mlp_keys[] = {HIDDEN, ACTIVATION, DROPOUT, NORM, EMBEDDING, {NULL}};
static const Key cnn_keys[] = {
	{"channels", KEY_INTS, .min = 1, .max = 4096, .min_items = 1, .max_items = 16},
	{"kernel", KEY_INT, .min = 1, .max = 15, .odd = true},
	{"shape", KEY_INTS, .min = 1, .max = 65536, .min_items = 2, .max_items = 3},
	HIDDEN, ACTIVATION, DROPOUT, NORM, EMBEDDING, {NULL}
};
static const Key transformer_keys[] = {
	{"dim", KEY_INT, .min = 1, .max = 8192},
	{"heads", KEY_INT, .min = 1, .max = 128},
	{"layers", KEY_INT, .min = 1, .max = 64},
	{"feedforward", KEY_INT, .min = 1, .max = 65536},
	{"length", KEY_INT, .min = 1, .max = 65536},
	{"vocabulary", KEY_INT, .min = 1, .max = 1000000},
	DROPOUT, EMBEDDING, {NULL}
};
static const Key import_keys[] = {{"callable", KEY_CALLABLE, .required = true}, {"kwargs", KEY_OBJECT}, {NULL}};
static const Key python_keys[] = {{"source", KEY_TEXT, .required = true}, {NULL}};

static const Key early_stopping_keys[] = {
	{"patience", KEY_INT, .min = 1, .max = 1000000},
	{"min_delta", KEY_NUMBER, .min = 0, .max = 1e300},
	{NULL}
};
static const Key option_keys[] = {
	{"task", KEY_CHOICE, .choices = tasks},
	{"early_stopping", KEY_RULES, .keys = early_stopping_keys},
	{"weight_decay", KEY_NUMBER, .min = 0, .max = 1e6},
	{"momentum", KEY_NUMBER, .min = 0, .max = 1, .open_max = true},
	{"clip", KEY_NUMBER, .min = 0, .max = 1e300, .open_min = true},
	{"checkpoint_interval", KEY_NUMBER, .min = 0, .max = 86400},
	{"threads", KEY_INT, .min = 1, .max = 1024},
	{"deploy", KEY_BOOL},
	{"batch_size_range", KEY_INTS, .min = 1, .max = 10000000, .min_items = 2, .max_items = 2},
	{"learning_rate_scaling", KEY_CHOICE, .choices = scalings},
	{"compression", KEY_CHOICE, .choices = compressions},
	{"search_time", KEY_NUMBER, .min = 1, .max = 86400},
	{NULL}
};

static const struct
{
	const char *type;
	const Key  *keys;
}			architectures[] = {
	{"mlp", mlp_keys}, {"cnn", cnn_keys}, {"transformer", transformer_keys}, {"import", import_keys}, {"python", python_keys}
};

#define MAX_NAMES 32			/* more than any table has keys */

/* ---- saying what is wrong ---- */

/* "an integer from 1 to 100", for the hint */
static char *
describe(const Key *key)
{
	StringInfoData text;

	initStringInfo(&text);
	switch (key->kind)
	{
		case KEY_INT:
			appendStringInfo(&text, "an %sinteger from %.0f to %.0f", key->odd ? "odd " : "", key->min, key->max);
			break;
		case KEY_NUMBER:
			appendStringInfo(&text, "a number %s %g and %s %g", key->open_min ? "greater than" : "of at least", key->min,
							 key->open_max ? "less than" : "at most", key->max);
			break;
		case KEY_BOOL:
			appendStringInfoString(&text, "true or false");
			break;
		case KEY_TEXT:
			appendStringInfoString(&text, "a text that is not empty");
			break;
		case KEY_CALLABLE:
			appendStringInfoString(&text, "a text such as \"package.module:function\"");
			break;
		case KEY_CHOICE:
			for (const char *const *choice = key->choices; *choice; choice++)
				appendStringInfo(&text, "%s\"%s\"", choice == key->choices ? "one of " : ", ", *choice);
			break;
		case KEY_INTS:
			appendStringInfo(&text, "an array of %d to %d integers, each from %.0f to %.0f", key->min_items, key->max_items,
							 key->min, key->max);
			break;
		case KEY_OBJECT:
		case KEY_RULES:
			appendStringInfoString(&text, "an object {...}");
			break;
	}
	return text.data;
}

static char *
value_text(JsonbValue *value)
{
	Jsonb	   *jsonb = JsonbValueToJsonb(value);
	char	   *text = JsonbToCString(NULL, &jsonb->root, VARSIZE(jsonb));

	if (strlen(text) > 60)
		strcpy(text + pg_mbcliplen(text, strlen(text), 57), "...");
	return text;
}

static void
bad_value(const char *what, const char *path, const Key *key, JsonbValue *value)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid value for key \"%s\" in the %s: %s", path, what, value_text(value)),
			 errhint("Use %s.", describe(key))));
}

/* Names of the keys of a table, for hints */
static int
key_names(const Key *keys, const char **names)
{
	int			n = 0;

	for (; keys->name; keys++)
		names[n++] = keys->name;
	Assert(n <= MAX_NAMES);
	return n;
}

static const char *
all_names(const char *const *names, int n)
{
	StringInfoData text;

	initStringInfo(&text);
	for (int i = 0; i < n; i++)
		appendStringInfo(&text, "%s\"%s\"", i ? ", " : "", names[i]);
	return text.data;
}

/* ---- checking ---- */

static bool check_object(const char *what, const char *path, JsonbContainer *object, const Key *keys, bool is_architecture);

static char *
text_of(const JsonbValue *value)
{
	return pnstrdup(value->val.string.val, value->val.string.len);
}

static bool
number_fits(const Key *key, const JsonbValue *value, bool integer)
{
	double		number;

	if (value->type != jbvNumeric)
		return false;
	number = DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(value->val.numeric)));
	if (integer && (number != floor(number) || (key->odd && fmod(number, 2) != 1)))
		return false;
	return (key->open_min ? number > key->min : number >= key->min) && (key->open_max ? number < key->max : number <= key->max);
}

/* package.module:function, all of them identifiers */
static bool
is_callable(const char *text)
{
	bool		start = true;
	int			colons = 0;

	for (; *text; text++)
	{
		bool		letter = IS_HIGHBIT_SET(*text) || isalpha((unsigned char) *text) || *text == '_';

		if (letter || (!start && isdigit((unsigned char) *text)))
			start = false;
		else if (!start && (*text == ':' || *text == '.'))
		{
			start = true;
			colons += *text == ':';
		}
		else
			return false;
	}
	return !start && colons == 1;
}

static bool
is_choice(const Key *key, const JsonbValue *value)
{
	for (const char *const *choice = key->choices; *choice; choice++)
		if (value->type == jbvString && strcmp(*choice, text_of(value)) == 0)
			return true;
	return false;
}

static bool
is_container(const JsonbValue *value, bool array)
{
	return value->type == jbvBinary && (array ? JsonContainerIsArray(value->val.binary.data) :
										JsonContainerIsObject(value->val.binary.data));
}

static void
check_ints(const char *what, const char *path, JsonbValue *value, const Key *key)
{
	uint32		n;

	if (!is_container(value, true))
		bad_value(what, path, key, value);
	n = JsonContainerSize(value->val.binary.data);
	if (n < key->min_items || n > key->max_items)
		bad_value(what, path, key, value);
	for (uint32 i = 0; i < n; i++)
	{
		JsonbValue *item = getIthJsonbValueFromContainer(value->val.binary.data, i);

		if (!number_fits(key, item, true))
			bad_value(what, psprintf("%s[%u]", path, i), key, item);
	}
}

static void
check_value(const char *what, const char *path, JsonbValue *value, const Key *key)
{
	bool		good = false;

	switch (key->kind)
	{
		case KEY_INT:
		case KEY_NUMBER:
			good = number_fits(key, value, key->kind == KEY_INT);
			break;
		case KEY_BOOL:
			good = value->type == jbvBool;
			break;
		case KEY_TEXT:
			good = value->type == jbvString && value->val.string.len > 0;
			break;
		case KEY_CALLABLE:
			good = value->type == jbvString && is_callable(text_of(value));
			break;
		case KEY_CHOICE:
			good = is_choice(key, value);
			break;
		case KEY_INTS:
			check_ints(what, path, value, key);
			return;
		case KEY_OBJECT:
			good = is_container(value, false);
			break;
		case KEY_RULES:
			good = is_container(value, false) && check_object(what, path, value->val.binary.data, key->keys, false);
			break;
	}
	if (!good)
		bad_value(what, path, key, value);
}

/* Compares an object with its table; "type" was looked at by the caller in an architecture. Returns true or raises. */
static bool
check_object(const char *what, const char *path, JsonbContainer *object, const Key *keys, bool is_architecture)
{
	const char *names[MAX_NAMES];
	int			nnames = key_names(keys, names);
	JsonbIterator *iterator = JsonbIteratorInit(object);
	JsonbIteratorToken token;
	JsonbValue	item;
	const Key  *key = NULL;
	char	   *key_path = NULL;

	while ((token = JsonbIteratorNext(&iterator, &item, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
		{
			char	   *name = text_of(&item);

			key_path = *path ? psprintf("%s.%s", path, name) : name;
			for (key = keys; key->name && strcmp(key->name, name) != 0; key++)
				;
			if (key->name == NULL && !(is_architecture && strcmp(name, "type") == 0))
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("unknown key \"%s\" in the %s", key_path, what),
						 tensile_hint_nearest(name, names, nnames,
											  psprintf("The keys are %s.", all_names(names, nnames)))));
		}
		else if (token == WJB_VALUE && key->name)
			check_value(what, key_path, &item, key);
	}

	for (key = keys; key->name; key++)
		if (key->required && getKeyJsonValueFromContainer(object, key->name, strlen(key->name), NULL) == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("key \"%s\" is missing in the %s", key->name, what),
					 errhint("It must be %s.", describe(key))));
	return true;
}

static void
require_object(Jsonb *jsonb, const char *what, const char *example)
{
	if (!JB_ROOT_IS_OBJECT(jsonb))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be a JSON object", what),
				 errhint("For example '%s'.", example)));
}

static int
integer_or(JsonbContainer *object, const char *name, int otherwise)
{
	JsonbValue *value = getKeyJsonValueFromContainer(object, name, strlen(name), NULL);

	return value ? DatumGetInt32(DirectFunctionCall1(numeric_int4, NumericGetDatum(value->val.numeric))) : otherwise;
}

/* The one rule that spans two keys; 64 and 4 are their defaults. */
static void
check_heads(JsonbContainer *transformer)
{
	int			dim = integer_or(transformer, "dim", 64);
	int			heads = integer_or(transformer, "heads", 4);

	if (dim % heads != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key \"dim\" in the architecture \"transformer\" is not divisible by \"heads\": %d, %d", dim, heads),
				 errhint("Use a multiple of the number of heads, for example %d.", heads * Max(1, dim / heads))));
}

/* The smallest batch size comes first. */
static void
check_range(JsonbContainer *options)
{
	JsonbValue *range = getKeyJsonValueFromContainer(options, "batch_size_range", strlen("batch_size_range"), NULL);
	int			ends[2];

	if (range == NULL)
		return;
	for (int i = 0; i < 2; i++)
	{
		JsonbValue *end = getIthJsonbValueFromContainer(range->val.binary.data, i);

		ends[i] = DatumGetInt32(DirectFunctionCall1(numeric_int4, NumericGetDatum(end->val.numeric)));
	}
	if (ends[0] > ends[1])
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key \"batch_size_range\" in the options is empty: from %d to %d", ends[0], ends[1]),
				 errhint("The first number is the least batch size, the second the most: [%d, %d].", ends[1], ends[0])));
}

/* tensile._check_architecture(architecture) */
Datum
tensile_check_architecture(PG_FUNCTION_ARGS)
{
	Jsonb	   *jsonb = PG_GETARG_JSONB_P(0);
	const char *types[lengthof(architectures)];
	JsonbValue *type;
	char	   *name;

	for (int i = 0; i < lengthof(architectures); i++)
		types[i] = architectures[i].type;
	require_object(jsonb, "architecture", "{\"type\": \"mlp\", \"hidden\": [128, 64]}");
	type = getKeyJsonValueFromContainer(&jsonb->root, "type", 4, NULL);
	if (type == NULL || type->type != jbvString)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key \"type\" is missing in the architecture, or not a text"),
				 errhint("The types are %s.", all_names(types, lengthof(types)))));

	name = text_of(type);
	for (int i = 0; i < lengthof(architectures); i++)
		if (strcmp(name, architectures[i].type) == 0)
		{
			check_object(psprintf("architecture \"%s\"", name), "", &jsonb->root, architectures[i].keys, true);
			if (architectures[i].keys == transformer_keys)
				check_heads(&jsonb->root);
			PG_RETURN_VOID();
		}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("unknown architecture type \"%s\"", name),
			 tensile_hint_nearest(name, types, lengthof(types), psprintf("The types are %s.", all_names(types, lengthof(types))))));
}

/* tensile._check_options(options), those of train_model */
Datum
tensile_check_options(PG_FUNCTION_ARGS)
{
	Jsonb	   *jsonb = PG_GETARG_JSONB_P(0);

	require_object(jsonb, "options", "{\"early_stopping\": {\"patience\": 3}}");
	check_object("options", "", &jsonb->root, option_keys, false);
	check_range(&jsonb->root);
	PG_RETURN_VOID();
}
