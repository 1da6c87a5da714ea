"""The machinery that launch.sh, the tests and the benchmarks share; recipes know nothing of it."""
