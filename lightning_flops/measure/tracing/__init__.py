"""Runs one step under torch.profiler."""
