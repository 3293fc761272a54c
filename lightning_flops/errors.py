"""What this package raises, at construction only: nothing of it reaches a training loop."""


class LightningFlopsError(Exception):
    """Base of every error this package raises."""


class ConfigError(LightningFlopsError, ValueError):
    """A setting breaks its rule; the message names the setting, the rule and the value."""


class ProfileFormatError(LightningFlopsError, ValueError):
    """A saved profile cannot be read, or a profile cannot be written; the message names what is wrong and where."""
