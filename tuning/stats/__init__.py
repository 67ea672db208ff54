"""Pareto geometry and intervals."""
