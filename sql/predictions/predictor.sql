-- The predictor: its socket, loaded models, device memory and counters

CREATE FUNCTION tensile_internal._inference_memory(device text, total_bytes bigint, least_bytes bigint,
                                                   wanted_bytes bigint) RETURNS bigint
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_inference_memory';
CREATE FUNCTION tensile_internal._report_loaded(models bigint[], devices text[]) RETURNS void
    LANGUAGE C STRICT AS 'MODULE_PATHNAME', 'tensile_report_loaded';
CREATE FUNCTION tensile_internal._predictor_socket() RETURNS text
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_predictor_socket';
CREATE FUNCTION tensile_worker._predictions(OUT version bigint, OUT rows bigint, OUT requests bigint,
                                            OUT unknown_categories bigint) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_predictions';
CREATE FUNCTION tensile_worker._loaded_models(OUT version bigint, OUT memory_budget bigint, OUT device_bytes bigint,
                                              OUT planned_bytes bigint, OUT host_bytes bigint, OUT device text)
    RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_loaded_models';
