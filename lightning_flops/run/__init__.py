"""One profiled run on one rank: windows, the monitor, FLOPs of every step, reports and the other ranks."""
