"""The workloads that come with it, each a module with a `WORKLOAD`, as a file of one's own would be."""
