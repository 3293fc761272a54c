"""What this package raises, at construction only: nothing of it reaches a training loop."""


class LightningFlopsError(Exception):
    """Base of every error this package raises."""


class ConfigError(LightningFlopsError, ValueError):
    """A setting breaks its rule; the message names the setting, the rule and the value."""
