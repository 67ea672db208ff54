"""The history of a run: records on disk, their timeline, the folders of runs."""
