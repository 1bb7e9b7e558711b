-- Public function: calibration

CREATE FUNCTION @extschema@.calibrate_device(seconds int DEFAULT 240) RETURNS bigint
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_calibrate';
COMMENT ON FUNCTION @extschema@.calibrate_device(int) IS
    'submit a job that measures operators on the device, so that latencies are predicted well before anything '
    'has run; for superusers';

-- The name in 0.1.0
CREATE FUNCTION tensile.calibrate(device_seconds int DEFAULT 240) RETURNS bigint
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT @extschema@.calibrate_device(device_seconds)
$$;
COMMENT ON FUNCTION tensile.calibrate(int) IS 'deprecated: calibrate_device';
