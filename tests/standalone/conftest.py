import torch._dynamo  # noqa: F401  adds to the warning filters when it is first imported, which is not ours to undo
