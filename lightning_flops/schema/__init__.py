"""The shape of every report, and its JSON."""
