"""The history of a run: records on disk, the time of its stages, the folders of runs."""
