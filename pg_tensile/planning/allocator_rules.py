"""Rules of PyTorch's caching allocator with expandable segments, as far as plans count with them.

The defaults are those of PyTorch 2.11 to 2.13. In 2.13, `large_segment_size_mb` in PYTORCH_ALLOC_CONF changes the pages
for large blocks. The rules of the allocator at hand are measured with the device (measuring/allocator.py).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from pg_tensile.errors import DeviceError

MOST_BYTES = 1 << 40  # of any rule
# Of a process, besides what its plan is granted: the last page of each segment, of the stream that computes and of
# those that copy, where samples of tensors are taken and compressed.
MARGIN_BYTES = 64 << 20
STREAMS = 3  # that such pages belong to


@dataclass(frozen=True)
class AllocatorRules:
    """Sizes of blocks and pages in bytes.

    Blocks are rounded up to multiples of `block_bytes`. Those of up to `small_bytes` are in a segment of their own.
    Each segment takes memory from the device in pages. `is_followed` is False if the allocator did something else when
    it was tried. Raises DeviceError for impossible sizes."""

    block_bytes: int = 512
    small_bytes: int = 1 << 20
    small_page_bytes: int = 2 << 20
    large_page_bytes: int = 20 << 20
    is_followed: bool = True

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not all(isinstance(size, int) and 0 < size <= MOST_BYTES for size in sizes):
            raise DeviceError("the sizes of an allocator's blocks and pages are impossible", detail=str(sizes))
        if any(size % self.block_bytes for size in sizes):
            raise DeviceError("an allocator's pages are not whole blocks", detail=str(sizes))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        block, small, small_page, large_page, _ = astuple(self)
        return block, small, small_page, large_page

    @property
    def pages(self) -> tuple[int, int]:
        """The bytes of a page of the segment for small and of the one for large blocks."""
        return self.small_page_bytes, self.large_page_bytes

    @property
    def margin_bytes(self) -> int:
        """The bytes that the allocator may take besides what a plan is granted; more with larger pages."""
        return MARGIN_BYTES + STREAMS * max(0, sum(self.pages) - sum(DEFAULT_PAGES))


DEFAULT_PAGES = AllocatorRules.small_page_bytes, AllocatorRules.large_page_bytes
DEFAULT_RULES = AllocatorRules()
