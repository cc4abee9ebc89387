"""The named shapes that tests and benchmarks share."""

from typing import NamedTuple


class Workload(NamedTuple):
    """A shape of x, as a transformer's block meets it.

    Attributes:
      batch: rows.
      seq_len: tokens of each.
      dim: width.
      about: where such a shape comes from.
    """

    batch: int
    seq_len: int
    dim: int
    about: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, S, D]."""
        return (self.batch, self.seq_len, self.dim)


WORKLOADS = {
    "wan-1.3b-480p": Workload(1, 32760, 1536, "Wan 2.1 1.3B, 81 frames of 480×832"),
    "dit-xl": Workload(8, 4096, 1152, "DiT-XL, 8 images of 1024×1024"),
    "mmdit-3072": Workload(4, 8190, 3072, "width 3072, 4 clips of 17 frames of 480×832"),
    "wan-14b-720p": Workload(1, 75600, 5120, "Wan 2.1 14B, 81 frames of 720×1280"),
}
