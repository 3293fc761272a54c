"""What this package raises. It raises at construction only, never in a training loop."""

from lightning_flops.units import printable, shown


class LightningFlopsError(Exception):
    """Base of every error this package raises."""

    def __str__(self) -> str:
        """The message on one line, with unprintable characters escaped; ``args`` has it unchanged."""
        return printable(super().__str__())


class ConfigError(LightningFlopsError, ValueError):
    """A setting breaks its rule; the message names the setting, the rule and the value."""


def require(*rules: tuple[str, object, object]) -> None:
    """Raise a ConfigError of the first of *rules* that does not hold: what must be, what was given, whether it is."""
    for must, given, holds in rules:
        if not holds:
            raise ConfigError(f"{must}, got {shown(given)}")


class ProfileFormatError(LightningFlopsError, ValueError):
    """A saved profile cannot be read, or a profile cannot be written; the message names what is wrong and where."""


class ComparisonError(LightningFlopsError, ValueError):
    """Two runs, or a figure of theirs, cannot be compared; the message says why."""
