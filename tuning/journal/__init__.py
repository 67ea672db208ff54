"""What happened: records on disk, their timeline, the folders of runs."""
