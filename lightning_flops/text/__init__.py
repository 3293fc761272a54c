"""Makes text for people safe to show."""
