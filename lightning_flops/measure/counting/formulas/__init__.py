"""From an operator and its shapes to FLOPs: how many it has, whether it has none, or whether that is unknown."""
