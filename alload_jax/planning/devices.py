"""Rates of accelerators for analytic predictions."""

from dataclasses import dataclass, replace

from alload_jax.errors import InputError

_MIB = 2**20


@dataclass(frozen=True)
class Device:
    """Rates of one device.

    Attributes:
      name: JAX's `device_kind`.
      peak_flops: dense matrix products in the compute dtype, FLOP/s, by the data sheet.
      bandwidth: memory bandwidth (reads plus writes), bytes/s, by the data sheet.
      memory: bytes, as the driver reports them.
      matmul_share: share of the peak that large matrix products reach.
      attention_share: share of the peak that fused attention reaches, forward and backward.
      attention_forward_share: share of the peak that the forward pass of attention reaches.
      elementwise_share: share of the bandwidth that norms, gates, rotary embedding and GELU reach
        in a whole step; their bytes are counted as if every fusion read and wrote once.
      kernel_seconds: minimum seconds of a kernel.
      link_bandwidth: bytes/s that one device sends to its peers in an all-to-all.
      host_bandwidth: bytes/s to the host's memory or from it, while the device computes.
      packs: whether attention on this device supports packed rows.
      compute_bytes: bytes of one activation: bfloat16, or float32 on CPUs.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory: float
    matmul_share: float
    attention_share: float
    attention_forward_share: float
    elementwise_share: float
    kernel_seconds: float
    link_bandwidth: float
    host_bandwidth: float
    packs: bool
    compute_bytes: int = 2


# Peak, bandwidth: NVIDIA's data sheet; memory: nvidia-smi, 143771 MiB. Measured with jax
# 0.11.2, cuDNN 9.19: 790 TFLOP/s of matrix products; attention of 12 heads × 128 over 32,768
# tokens 613 forward, 575 forward + backward; all-to-all over NVLink 76 GB/s, copies of layout
# included. The elementwise share is what the measured steps of Wan 1.3B leave over, those of
# images and of clips alike (benchmarks/results/step_bars_h200.json). To the host, tensors of
# 100 MB took 2.0 ms each in a step's profile. Assumed: the time of a kernel.
_H200 = Device(
    name="NVIDIA H200",
    peak_flops=989e12,
    bandwidth=4.8e12,
    memory=143_771 * _MIB,
    matmul_share=790 / 989,
    attention_share=575 / 989,
    attention_forward_share=613 / 989,
    elementwise_share=0.45,
    kernel_seconds=3e-6,
    link_bandwidth=76e9,
    host_bandwidth=50e9,
    packs=True,
)

DEVICES = {
    "h200": _H200,
    # Data sheet (SXM, 80 GB); memory: nvidia-smi, 81559 MiB. Assumed: all shares and the link, as
    # measured on the H200, whose processor is the same.
    "h100": replace(_H200, name="NVIDIA H100 80GB HBM3", bandwidth=3.35e12, memory=81_559 * _MIB),
    # Data sheet (SXM, 80 GB). Assumed: 0.8 of the peak for matrix products; attention as published
    # for FlashAttention-2 (arXiv 2307.08691: up to 225 TFLOP/s forward and backward); the link
    # with 600 GB/s in place of 900; to the host, four fifths of PCIe 4.0.
    "a100": Device(
        name="NVIDIA A100-SXM4-80GB",
        peak_flops=312e12,
        bandwidth=2.04e12,
        memory=81_920 * _MIB,
        matmul_share=0.8,
        attention_share=0.6,
        attention_forward_share=0.65,
        elementwise_share=0.3,
        kernel_seconds=4e-6,
        link_bandwidth=50e9,
        host_bandwidth=20e9,
        packs=False,
    ),
    # All assumed: some sixteen cores with AVX2, in float32. For trying plans, not for figures.
    "cpu": Device(
        name="cpu",
        peak_flops=1e12,
        bandwidth=50e9,
        memory=16e9,
        matmul_share=0.5,
        attention_share=0.2,
        attention_forward_share=0.2,
        elementwise_share=0.3,
        kernel_seconds=10e-6,
        link_bandwidth=5e9,
        host_bandwidth=5e9,
        packs=False,
        compute_bytes=4,
    ),
}
"""By short name."""


def device_named(text: str) -> Device:
    """The device of a short name (`h200`), or of the name that JAX gives it; in any case.

    Raises:
      InputError: it is not in the table.
    """
    wanted = text.strip().lower()
    for short, device in DEVICES.items():
        if wanted in (short, device.name.lower()):
            return device
    names = ", ".join(f"{short} ({device.name})" for short, device in DEVICES.items())
    raise InputError(f"device {text!r} is unknown; choose one of {names}")
