"""Counts FLOPs while operators run: by module, part of the step, operator and dtype."""
