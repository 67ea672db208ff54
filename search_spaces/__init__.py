"""The YAML that describes workloads, cards and budgets; read with importlib.resources."""
