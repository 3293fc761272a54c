"""The commands of ``lightning-flops``, one a file: its options, help and work. A new one joins the list in ``cli``."""
