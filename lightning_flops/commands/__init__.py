"""What each command of ``lightning-flops`` takes and does: ``add`` is the part for argparse, the rest is its work."""
