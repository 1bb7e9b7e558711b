-- Public function: calibration

CREATE FUNCTION tensile.calibrate(device_seconds int DEFAULT 240) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_calibrate';
COMMENT ON FUNCTION tensile.calibrate(int) IS
    'submit a job that measures operators on the device, so that latencies are predicted well before anything '
    'has run';
