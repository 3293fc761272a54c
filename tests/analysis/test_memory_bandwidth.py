from __future__ import annotations

import pytest

from lightning_flops.analysis.devices import memory_bytes_per_sec


@pytest.mark.parametrize(
    ("device", "gigabytes_per_sec"),
    [
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA H200", 4800),
        ("Tesla V100-SXM2-16GB", 900),
        ("Tesla V100-DGXS-32GB", 900),
        ("NVIDIA A2", 200),
        ("NVIDIA GeForce RTX 3090 Ti", 1008),
        ("AMD Instinct MI100", 1228.8),
        ("NVIDIA L40S", 864),
        ("AMD Instinct MI300X", 5300),
        ("AMD Instinct MI250X", 3276.8 / 2),  # one of the board's two dies, which is what a program sees
    ],
)
def test_bandwidth_is_that_of_exactly_this_device(device: str, gigabytes_per_sec: float) -> None:
    assert memory_bytes_per_sec(device) == gigabytes_per_sec * 1e9


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA A16", "NVIDIA B100", "NVIDIA B200", "NVIDIA H20", "GAUDI2"])
def test_a_bandwidth_that_is_published_in_two_versions_is_not_known(device: str) -> None:
    assert memory_bytes_per_sec(device) is None


@pytest.mark.parametrize("device", ["", "cpu", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GH200 480GB"])
def test_no_device_takes_anothers_bandwidth(device: str) -> None:
    assert memory_bytes_per_sec(device) is None
