"""The training step on fake tensors: every storage's birth and death, with the kernels of a card that is not there.

Imports torch and patches it, hence runs in a process of its own: `python -m tuning.memory.tracing`, started by
`tuning.memory.predictor`.
"""
