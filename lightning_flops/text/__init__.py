"""Reads text from outside within bounds, and makes text for people safe to show."""
