"""The built-in workloads, each a module with a `WORKLOAD`, like a user's own file."""
