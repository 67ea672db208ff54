"""A training as it stands, run as a command: counted, timed and changed from outside, without an edit."""
