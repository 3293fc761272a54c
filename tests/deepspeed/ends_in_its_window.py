"""A program that ends while two engines are profiled: one is in its window, the other has not reached its own."""

from __future__ import annotations

import deepspeed

import lightning_flops.deepspeed
from tests.deepspeed.engines import BLOCK, config, engine_of, train

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for a minute
lightning_flops.deepspeed.install()
in_its_window = engine_of(config(block={**BLOCK, "timing_steps": 20}))
waiting = engine_of(config(block={**BLOCK, "profile_step": 100}))
train(in_its_window, 7)
train(waiting, 3)
