-- Progress of jobs in shared memory

CREATE FUNCTION tensile_worker._report(phase text, epoch int, epochs int, step bigint, steps bigint, loss float8,
                                       samples_per_s float8, device_bytes bigint, device_peak_bytes bigint,
                                       bytes_swapped bigint, stall_us bigint, passive_swap_ins bigint,
                                       utilisation float8, raw_bytes_swapped bigint DEFAULT NULL,
                                       time_left_s float8 DEFAULT NULL, least_time_left_s float8 DEFAULT NULL)
    RETURNS void
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_report';

-- Shared memory; rows are filtered by role in C
CREATE FUNCTION tensile_worker._progress(OUT job bigint, OUT pid int, OUT phase text, OUT epoch int, OUT epochs int,
                                         OUT step bigint, OUT steps bigint, OUT loss float8, OUT samples_per_s float8,
                                         OUT device_bytes bigint, OUT device_peak_bytes bigint,
                                         OUT bytes_swapped bigint, OUT stall_us bigint, OUT passive_swap_ins bigint,
                                         OUT utilisation float8, OUT raw_bytes_swapped bigint, OUT time_left_s float8,
                                         OUT least_time_left_s float8, OUT plan_generation bigint,
                                         OUT heartbeat timestamptz) RETURNS SETOF record
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_progress';
