"""Adapters: the hooks of one framework each, which call a ``Run``. No arithmetic is done here."""
