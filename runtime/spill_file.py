"""Files without a name that hold the bytes of one step, and the folder that they lie in.

A file has no name from the start where the file system can do that, and loses it at once where
not, so that nobody else opens it and a killed process leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from pathlib import Path

__all__ = ["FOLDER_VARIABLE", "SpillFile", "default_folder", "free_bytes", "is_memory_backed"]

FOLDER_VARIABLE = "BACKHAUL_SPILL_DIR"
DISK_FOLDER = Path("/var/tmp")
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
MOUNTS = Path("/proc/self/mountinfo")


class SpillFile:
    """An open nameless file, closed by `close` or with its last reference.

    Args:
        folder: Where its bytes lie.
        nbytes: Its size; `preallocate` makes sure of it.

    Raises:
        OSError: The folder is missing, or not writable.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = _open_nameless(folder)
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)

    def preallocate(self) -> None:
        """Take the whole size from the file system.

        Raises:
            OSError: There is not so much room.
        """
        if self.nbytes == 0:
            return  # The system call refuses a length of zero.
        try:
            os.posix_fallocate(self.descriptor, 0, self.nbytes)
        except OSError as error:
            # Some file systems cannot preallocate at all; there, and only there, a full disk
            # is found by the write.
            if error.errno != errno.EOPNOTSUPP:
                raise
            os.ftruncate(self.descriptor, self.nbytes)

    def close(self) -> None:
        """Close the file, once."""
        self._finalizer()


def default_folder() -> Path:
    """Choose where files lie when nobody says: a folder on a disk if there is one."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir())
    if is_memory_backed(folder) and DISK_FOLDER.is_dir() and not is_memory_backed(DISK_FOLDER):
        return DISK_FOLDER
    return folder


def is_memory_backed(folder: Path) -> bool:
    """Say whether the folder's file system lies in memory; False where nobody can tell."""
    try:
        device = folder.stat().st_dev
        mounts = MOUNTS.read_text()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    # A line reads `id parent major:minor root mount-point options [tags] - type source options`.
    for line in mounts.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            return file_system.split()[0] in MEMORY_FILE_SYSTEMS
    return False


def free_bytes(folder: Path) -> int:
    """Count the bytes that this user can still write in the folder; 0 if it is missing."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _open_nameless(folder: Path) -> int:
    # O_EXCL forbids to give the file a name later.
    flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(folder, flags, mode=0o600)
    except OSError as error:
        # EISDIR comes from kernels, EOPNOTSUPP from file systems that do not know O_TMPFILE.
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
    # Random name, mode 0600, O_EXCL, and no link is followed.
    descriptor, name = tempfile.mkstemp(prefix="backhaul-", dir=folder)
    os.unlink(name)
    return descriptor
