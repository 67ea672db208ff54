"""The stages of a study, each a function of the records so far (docs/design.md section 4). No Ray, no torch."""
