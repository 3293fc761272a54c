"""What touches the running model: counts, clocks and the recorder; the only torch code of the core."""
