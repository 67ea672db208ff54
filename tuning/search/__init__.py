"""What is measured and trained next: probes, sampler, pruner, scheduler, selection."""
