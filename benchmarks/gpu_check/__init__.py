"""One command that says what is true on the card at hand: `python -m benchmarks.gpu_check`; see `__main__`."""
