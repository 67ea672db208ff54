"""Finds the fastest configuration of a training loop that keeps its accuracy and fits its card."""

__version__ = "0.1.0"
