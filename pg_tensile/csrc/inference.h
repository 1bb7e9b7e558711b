/*
 * inference.h: starting the inference process.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_INFERENCE_H
#define TENSILE_INFERENCE_H

/*
 * Registers the inference process unless it runs.  Raises 55000 in another
 * database than pg_tensile.database, 53000 without a free background worker.
 */
extern void tensile_start_inference(void);

#endif
