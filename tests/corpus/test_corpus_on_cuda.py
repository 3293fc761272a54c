"""The corpus on a GPU: the same products, found in the backward by autograd's own threads."""

from __future__ import annotations

import pytest
import torch

from . import Network
from .on_a_gpu import differences, networks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NETWORKS = networks()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning:torch.utils.checkpoint")
@pytest.mark.filterwarnings("ignore:`torch.jit.(script|trace):DeprecationWarning")
@pytest.mark.parametrize("network", NETWORKS, ids=[f"{network.family}.{network.name}" for network in NETWORKS])
def test_a_network_costs_the_same_on_a_gpu(network: Network) -> None:
    """Phase by phase and module by module."""
    assert differences(network, "cuda") == {}
