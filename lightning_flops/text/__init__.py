"""Text from outside, and text for people: read within bounds, shown without tricks."""
