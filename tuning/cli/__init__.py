"""What people type and see: commands, and the screen while a study runs."""
