"""Readers of the public on-disk formats, and the embedded samples."""
