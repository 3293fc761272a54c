"""What runs on CUDA alone, where there is none: a loop is profiled, and the corpus costs what it costs by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.measure.counting.test_device_threads import PATH, needs_a_compiler
from tests.ranks import REPOSITORY

LACKING = 11  #: Networks of convolutions that a GPU runs by kernels of its own.


@needs_a_compiler
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.timeout(400)
def test_a_loop_and_the_corpus_on_cuda_whose_memory_is_the_hosts() -> None:
    command = [sys.executable, "-m", "tests.cuda_of_host_memory"]
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    seen, corpus = answer["profiled"], answer["corpus"]
    assert seen["log"] == []
    assert (seen["device"], seen["memory"]) == ("NVIDIA H200", "allocated")
    # 32 rows: two products forward, 64 × 256 and 256 × 10; the batch needs no gradient, so three backward.
    first, second = 2 * 32 * 64 * 256, 2 * 32 * 256 * 10
    assert seen["flops"] == [first + second, first + 2 * second]
    assert seen["mfu"][0] == pytest.approx(seen["mfu"][1])
    assert seen["parts"] == pytest.approx(1.0)
    # Two weights and two biases in float32, their gradients and two moments of each; four steps and a loss; in blocks.
    assert seen["held"]["optimizer"] == 4 * (4 * 64 * 256 + 4 * 256 + 4 * 256 * 10 + 512) + 5 * 512
    lacking = [name for name, words in corpus.items() if words.startswith("no kernel")]
    assert len(lacking) <= LACKING
    assert {name: words for name, words in corpus.items() if words and name not in lacking} == {}
