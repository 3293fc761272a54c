"""Measurements of this project beside its peers: how exact the counts are, and what counting costs."""
