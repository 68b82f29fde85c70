"""What benchmarks ask of the C library's allocator."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as an accelerator's caching allocator does.

    By default it returns large tensors to the system at once, and each step then pays for
    faulting fresh pages in: a cost of the process's history, not of its ops.
    Elsewhere than on Linux this does nothing.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 1 << 26)):
            if not libc.mallopt(option, value):
                raise OSError(f"mallopt({option}, {value}) was refused")
