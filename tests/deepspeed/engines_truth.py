"""FLOPs of ``tests.deepspeed.engines.Net`` by hand, for a micro-batch of two samples; needs no DeepSpeed."""

FORWARD_BY_MODULE = {"": 2 * 2 * (8 * 8 + 8 * 16 + 16 * 4), "first": 2 * 2 * 8 * 16, "second": 2 * 2 * 16 * 4}
FORWARD = FORWARD_BY_MODULE[""]
# Once more for every weight, and once more for the inputs of the two layers, whose inputs need gradients.
BACKWARD = FORWARD + FORWARD_BY_MODULE["first"] + FORWARD_BY_MODULE["second"]
PARAMS = 8 * 8 + (8 * 16 + 16) + (16 * 4 + 4)
