"""What launch.sh, the tests and the benchmarks share; recipes do not import it."""
