-- Drift of predicted rows from training rows

-- The share of rows that the predictor counts: none where nothing can be stored
CREATE FUNCTION tensile_internal._drift_rate() RETURNS float8
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN pg_is_in_recovery() THEN 0 ELSE current_setting('pg_tensile.drift_sample_rate')::float8 END
$$;

-- Number of counted rows below which nothing counts as drifted, and the threshold of models without one of their own
CREATE FUNCTION tensile_worker._drift_limits(OUT least_rows bigint, OUT threshold float8)
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 200, 0.2::float8
$$;

-- Population stability index of numbers of rows in the same bins: the sum of (q - p) * ln(q / p) over shares p and q,
-- less its expectation for two samples of one distribution, (bins - 1) * (1 / m + 1 / n), and at least 0. So that no
-- share is 0, half a row for each bin is added to both samples, divided as both together are. Bins that are empty in
-- both are left out. Null without rows.
CREATE FUNCTION tensile_worker._psi(expected bigint[], actual bigint[]) RETURNS float8
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN min(t.m) > 0 AND min(t.n) > 0 THEN
        greatest(sum((t.q - t.p) * ln(t.q / t.p)) - (count(*) - 1) * (1 / min(t.m) + 1 / min(t.n)), 0) END
    FROM (SELECT s.m, s.n, (s.e + s.added) / (s.m + s.bins / 2) AS p, (s.a + s.added) / (s.n + s.bins / 2) AS q
          FROM (SELECT o.*, o.bins / 2 * (o.e + o.a) / (o.m + o.n) AS added
                FROM (SELECT u.e::float8 AS e, u.a::float8 AS a, (sum(u.e) OVER ())::float8 AS m,
                             (sum(u.a) OVER ())::float8 AS n, (count(*) OVER ())::float8 AS bins
                      FROM unnest($1, $2) u (e, a) WHERE u.e + u.a > 0) o) s) t
$$;

-- Kolmogorov-Smirnov statistic of numbers of rows in the same ordered bins: the largest distance of the cumulative
-- shares
CREATE FUNCTION tensile_worker._ks(expected bigint[], actual bigint[]) RETURNS float8
    LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT max(abs(c.e / nullif(c.m, 0) - c.a / nullif(c.n, 0)))
    FROM (SELECT (sum(u.e) OVER w)::float8 AS e, (sum(u.a) OVER w)::float8 AS a, (sum(u.e) OVER ())::float8 AS m,
                 (sum(u.a) OVER ())::float8 AS n
          FROM unnest($1, $2) WITH ORDINALITY u (e, a, bin) WINDOW w AS (ORDER BY u.bin)) c
$$;

-- Begin of the time in which predicted rows count
CREATE FUNCTION tensile_worker._drift_begin() RETURNS timestamptz
    LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT clock_timestamp() - current_setting('pg_tensile.drift_window')::interval
$$;

-- Whether sessions have counted rows, and what they have counted since the last call, for the controller
CREATE FUNCTION tensile_internal._counts_pending() RETURNS bool
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_counts_pending';
CREATE FUNCTION tensile_internal._take_counts() RETURNS TABLE (version bigint, rows bigint, counts bigint[])
    LANGUAGE C AS 'MODULE_PATHNAME', 'tensile_take_counts';

-- Sum of numbers of rows, bin by bin
CREATE FUNCTION tensile_worker._add_counts(counts bigint[], others bigint[]) RETURNS bigint[]
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(u.a + u.b ORDER BY u.bin) FROM unnest($1, $2) WITH ORDINALITY u (a, b, bin)
$$;
CREATE AGGREGATE tensile_worker._sum_counts(pg_catalog.int8[]) (SFUNC = tensile_worker._add_counts,
                                                                STYPE = pg_catalog.int8[]);

-- The drift of each column of a version with that reference, of rows that were counted; no rows if none were
CREATE FUNCTION tensile_worker._drift(reference jsonb, counts bigint[])
    RETURNS TABLE (column_name text, kind text, psi float8, ks float8)
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.name, d.kind, tensile_worker._psi(d.counts, a.counts),
           CASE WHEN d.is_number THEN tensile_worker._ks(d.counts[2:], a.counts[2:]) END
    FROM (SELECT c.value->>'name' AS name, c.value->>'kind' AS kind, c.value ? 'edges' AS is_number, e.counts,
                 sum(cardinality(e.counts)) OVER (ORDER BY c.number)::int AS stop, c.number
          FROM jsonb_array_elements($1->'columns') WITH ORDINALITY c (value, number)
               CROSS JOIN LATERAL (SELECT array_agg(u.text::bigint ORDER BY u.bin)
                                   FROM jsonb_array_elements_text(c.value->'counts') WITH ORDINALITY u (text, bin)
                                  ) e (counts)
         ) d
         CROSS JOIN LATERAL (SELECT $2[d.stop - cardinality(d.counts) + 1 : d.stop]) a (counts)
    ORDER BY d.number
$$;

-- The column of a model's deployed version that has drifted most, by rows that were counted after that time; null if
-- they are too few. Times do not count: they always go on.
CREATE FUNCTION tensile_internal._most_drifted(model bigint, after timestamptz, OUT column_name text, OUT psi float8)
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.column_name, d.psi
    FROM tensile_internal.models m
         JOIN tensile_internal.model_versions v ON v.model_id = m.id AND v.version = m.deployed_version
         CROSS JOIN LATERAL (SELECT sum(x.rows) AS rows, tensile_worker._sum_counts(x.counts) AS counts
                             FROM tensile_internal.drift_counts x WHERE x.version = v.id AND x.since >= $2) c
         CROSS JOIN LATERAL tensile_worker._drift(v.reference, c.counts) d CROSS JOIN tensile_worker._drift_limits() l
    WHERE m.id = $1 AND d.kind <> 'time' AND c.rows >= l.least_rows AND d.psi IS NOT NULL
    ORDER BY d.psi DESC, d.column_name LIMIT 1
$$;

-- Add counts of rows that the predictor has counted. A schedule that was run begins to count anew.
CREATE FUNCTION tensile_internal._count_drift(version bigint, rows bigint, counts bigint[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v record;
    bins bigint;
BEGIN
    SELECT o.id, o.model_id, o.reference INTO v FROM tensile_internal.model_versions o
        WHERE o.id = _count_drift.version AND o.weight_bytes IS NOT NULL FOR KEY SHARE SKIP LOCKED;
    bins := (SELECT sum(jsonb_array_length(c->'counts')) FROM jsonb_array_elements(v.reference->'columns') c);
    IF bins IS DISTINCT FROM cardinality(counts) THEN
        RETURN; -- the version was dropped, or another transaction is about to drop it
    END IF;
    INSERT INTO tensile_internal.drift_counts AS d (version, since, rows, counts)
        VALUES (v.id, greatest(date_bin(current_setting('pg_tensile.drift_window')::interval / 24, clock_timestamp(),
                                        '2000-01-01'),
                               (SELECT s.last_run FROM tensile_internal.schedules s WHERE s.model_id = v.model_id)),
                _count_drift.rows, _count_drift.counts)
        ON CONFLICT ON CONSTRAINT drift_counts_pkey DO UPDATE SET rows = d.rows + EXCLUDED.rows,
            counts = tensile_worker._add_counts(d.counts, EXCLUDED.counts);
    PERFORM tensile_internal._check_drift(v.id);
END $$;

-- Store what sessions have counted. What cannot be stored is lost.
CREATE FUNCTION tensile_internal._store_counts() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tensile_internal._count_drift(c.version, c.rows, c.counts) FROM tensile_internal._take_counts() c
$$;

-- Keep the alarm of a version, if it is deployed, and wake the controller if a training is due.
CREATE FUNCTION tensile_internal._check_drift(version bigint) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m tensile_internal.models;
    s tensile_internal.schedules;
    number int;
    most record;
    threshold float8;
BEGIN
    SELECT v.version INTO number FROM tensile_internal.model_versions v WHERE v.id = _check_drift.version;
    SELECT o.* INTO m FROM tensile_internal.models o
         JOIN tensile_internal.model_versions v ON v.model_id = o.id AND v.version = o.deployed_version
        WHERE v.id = _check_drift.version;
    IF NOT FOUND THEN
        DELETE FROM tensile_internal.drift_alarms a WHERE a.version = _check_drift.version;
        RETURN;
    END IF;
    SELECT * INTO s FROM tensile_internal.schedules o WHERE o.model_id = m.id;
    threshold := coalesce(s.drift, (SELECT l.threshold FROM tensile_worker._drift_limits() l));
    SELECT * INTO most FROM tensile_internal._most_drifted(m.id, tensile_worker._drift_begin());
    IF most.psi > threshold THEN
        INSERT INTO tensile_internal.drift_alarms (version, column_name, psi, threshold)
            VALUES (_check_drift.version, most.column_name, most.psi, threshold)
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            PERFORM tensile_internal._announce_drift(m.id, number, most.psi);
        END IF;
    ELSIF most.psi < 0.8 * threshold THEN
        DELETE FROM tensile_internal.drift_alarms a WHERE a.version = _check_drift.version;
    END IF;
    IF s.drift IS NOT NULL AND tensile_internal._due_reason(s) IS NOT NULL THEN
        PERFORM tensile_internal._notify(-1); -- wakes the controller
    END IF;
END $$;

-- Notify sessions that LISTEN to tensile_drift. Any role may listen, so the payload has no names. A full queue would
-- abort the transaction.
CREATE FUNCTION tensile_internal._announce_drift(model bigint, version int, psi float8) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('tensile_drift', json_build_object('model', $1, 'version', $2, 'psi', $3)::text)
    WHERE pg_notification_queue_usage() < 0.95
$$;

-- Delete counts that are too old to count, and alarms of versions that have no others.
CREATE FUNCTION tensile_internal._forget_drift() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM tensile_internal.drift_counts d WHERE d.since < tensile_worker._drift_begin();
    DELETE FROM tensile_internal.drift_alarms a
        WHERE NOT EXISTS (SELECT FROM tensile_internal.drift_counts d WHERE d.version = a.version);
$$;
