"""What is asked for: files, command line, schema, search space, cards, errors."""
