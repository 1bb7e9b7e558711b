\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit

-- predictor
DROP VIEW tensile.loaded_models;
DROP TABLE tensile._loaded_models;
