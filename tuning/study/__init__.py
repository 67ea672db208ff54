"""A study: its set-up, its limits, its stages in order."""
