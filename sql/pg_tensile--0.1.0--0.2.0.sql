\echo Use "ALTER EXTENSION pg_tensile UPDATE" to load this file. \quit
