"""Functions of ours stay out of torch's compiler, with and without its help."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_COMPILER = """
import sys
import torch
sys.modules["torch._dynamo"] = None
from lightning_flops import count_flops
layer = torch.nn.Linear(3, 4)
with count_flops(layer) as counts:
    layer(torch.ones(2, 3)).sum().backward()
print(counts.total.forward, counts.total.backward)
"""


def test_where_the_compiler_cannot_be_imported_counting_goes_on_as_nothing_is_compiled() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True)
    # 2 x 3 x 4 for each of 2 rows, and as many for the weight's gradient; and no word, because nothing is lost.
    assert (done.stdout, done.stderr) == ("48 48\n", "")
