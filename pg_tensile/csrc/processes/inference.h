/*
 * inference.h: starting the inference process, and the predictor's socket.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#ifndef TENSILE_INFERENCE_H
#define TENSILE_INFERENCE_H

struct sockaddr_un;

/*
 * Registers the inference process unless it runs.  Raises 55000 in another
 * database than pg_tensile.database, 53000 without a free background worker.
 */
extern void tensile_start_inference(void);

/* Has the postmaster remove the socket of a predictor that a crash has ended. */
extern void tensile_install_inference_hook(void);

/*
 * Sets the path that the predictor listens at; relative to the data directory
 * if it is among the temporary files.
 */
extern void tensile_set_predictor_address(struct sockaddr_un *address);

#endif
