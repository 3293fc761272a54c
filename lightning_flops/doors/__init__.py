"""A framework's events become calls on a session; no arithmetic."""
