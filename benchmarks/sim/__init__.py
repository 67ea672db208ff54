"""Searches in virtual time over recorded tables."""
