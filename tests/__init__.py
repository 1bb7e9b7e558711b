"""Tests of pg_tensile. A package, because a dependency of benchmarks installs a package of the same name."""
