"""Times the parts of a step, modules, and the whole run."""
