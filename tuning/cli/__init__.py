"""The user interface: commands, and the screen while a study runs."""
