"""Benchmark suites: their files, runs, results, tables, and the claims of the papers tested on them."""
