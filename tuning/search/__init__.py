"""The choice of what is measured and trained next: probes, sampler, pruner, scheduler, selection."""
