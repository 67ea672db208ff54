"""The configuration of a study: files, command line, schema, search space, cards, completion; and the errors."""
