"""Memory of a training step that does not run: every allocation of it, from fake tensors."""
