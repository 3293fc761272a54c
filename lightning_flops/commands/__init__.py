"""What each command of ``lightning-flops`` takes and does: ``add`` tells argparse, and the rest is its work."""
