"""Our search against the others, really trained, in one run (`python -m benchmarks.tuners`)."""
