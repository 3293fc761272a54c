"""One run of training on one rank, whatever drives it."""
