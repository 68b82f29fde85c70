from __future__ import annotations

import _thread
import errno
import gc
import os
import resource
import signal
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul.errors import TransferError
from backhaul.runtime import copy_thread, spill_file
from backhaul.runtime.disk import DiskLink

NBYTES = 100_000


@pytest.fixture
def link(tmp_path: Path) -> Iterator[DiskLink]:
    link = DiskLink(tmp_path)
    yield link
    link.close()


def random_bytes(nbytes: int = NBYTES) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def offload(arena: Any, source: Tensor, offset: int = 0) -> None:
    arena.start_offload(offset, source)
    arena.wait_offload(offset)


def reload(arena: Any, nbytes: int = NBYTES, offset: int = 0) -> Tensor:
    destination = torch.zeros(nbytes, dtype=torch.uint8)
    arena.start_reload(offset, destination)
    arena.wait_reload(offset)
    return destination


class Gate:
    """Holds the first `os.pwrite` until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.call_count = 0
        self._pwrite = os.pwrite
        monkeypatch.setattr(copy_thread.os, "pwrite", self)

    def __call__(self, descriptor: int, chunk: memoryview, offset: int) -> int:
        self.call_count += 1
        self.reached.set()
        self.opened.wait()
        return self._pwrite(descriptor, chunk, offset)


def failing(code: int) -> Callable[..., int]:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_bytes_come_back_and_have_been_in_the_file(link: DiskLink) -> None:
    first, second = random_bytes(), random_bytes()
    arena: Any = link.reserve(2 * NBYTES)
    offload(arena, first)
    offload(arena, second, NBYTES)
    assert os.pread(arena.file.descriptor, NBYTES, NBYTES) == bytes(second.numpy())
    assert torch.equal(reload(arena), first)
    assert torch.equal(reload(arena, offset=NBYTES), second)


def test_a_slot_can_be_reloaded_again(link: DiskLink) -> None:
    source = random_bytes()
    arena = link.reserve(NBYTES)
    offload(arena, source)
    assert torch.equal(reload(arena), source)
    assert torch.equal(reload(arena), source)


def test_a_wait_covers_every_reload_that_was_started(link: DiskLink) -> None:
    source = random_bytes()
    arena = link.reserve(NBYTES)
    offload(arena, source)
    destinations = [torch.zeros_like(source) for _ in range(3)]
    for destination in destinations:
        arena.start_reload(0, destination)
    arena.wait_reload(0)
    assert all(torch.equal(destination, source) for destination in destinations)


def test_a_copy_larger_than_a_chunk_comes_back(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread, "CHUNK_BYTES", 4_099)
    source = random_bytes()
    arena = link.reserve(NBYTES)
    offload(arena, source)
    assert torch.equal(reload(arena), source)


def test_short_writes_and_reads_are_continued(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(copy_thread.os, "pwrite", lambda fd, b, at: pwrite(fd, b[:999], at))
    monkeypatch.setattr(copy_thread.os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:777]], at))
    source = random_bytes()
    arena = link.reserve(NBYTES)
    offload(arena, source)
    assert torch.equal(reload(arena), source)


def test_the_file_is_private_and_has_no_name(link: DiskLink, tmp_path: Path) -> None:
    arena: Any = link.reserve(NBYTES)
    status = os.fstat(arena.file.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_without_nameless_files_the_name_goes_at_once(
    link: DiskLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_nameless(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(spill_file.os, "open", refuse_nameless)
    arena: Any = link.reserve(NBYTES)
    status = os.fstat(arena.file.descriptor)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_preallocated(link: DiskLink) -> None:
    arena: Any = link.reserve(NBYTES)
    assert os.fstat(arena.file.descriptor).st_blocks * 512 >= NBYTES


def test_where_nothing_can_be_preallocated_the_file_grows(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file.os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    arena: Any = link.reserve(NBYTES)
    assert os.fstat(arena.file.descriptor).st_size == NBYTES


def test_a_full_disk_is_an_error_that_names_bytes_and_folder(
    link: DiskLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file.os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(TransferError, match=r"spill file.*100,000 bytes.*are free.*No space") as e:
        link.reserve(NBYTES)
    assert str(tmp_path) in str(e.value)
    assert (e.value.tier, e.value.nbytes) == ("spill file", NBYTES)
    assert (link.open_arena_count, link.idle_arena_count) == (0, 0)


def test_a_file_size_limit_is_an_error_at_the_reserve(link: DiskLink) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(TransferError, match="File too large"):
            link.reserve(2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_given_capacity_bounds_all_open_arenas(tmp_path: Path) -> None:
    link = DiskLink(tmp_path, capacity_bytes=2 * NBYTES)
    arenas = [link.reserve(NBYTES), link.reserve(NBYTES)]
    with pytest.raises(TransferError, match="200,000 of the 200,000 allowed"):
        link.reserve(NBYTES)
    for arena in arenas:
        arena.release()
    link.reserve(2 * NBYTES).release()  # Idle arenas make room.
    assert link.capacity_bytes == 2 * NBYTES
    link.close()


@pytest.mark.parametrize("folder", ["/nowhere/at/all", "/proc", __file__])
def test_a_folder_that_takes_no_file_is_an_error_that_names_it(folder: str) -> None:
    link = DiskLink(Path(folder))
    with pytest.raises(TransferError, match=f"{folder}: .*BACKHAUL_SPILL_DIR"):
        link.reserve(NBYTES)


def test_an_unwritable_folder_says_so(link: DiskLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file.os, "open", failing(errno.EACCES))
    with pytest.raises(TransferError, match="Permission denied"):
        link.reserve(NBYTES)


def test_a_failed_write_is_raised_by_its_wait_and_by_a_reload(
    link: DiskLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread.os, "pwrite", failing(errno.EIO))
    arena = link.reserve(NBYTES)
    arena.start_offload(0, random_bytes())
    message = f"cannot write 100,000 bytes of a file in {tmp_path}: Input/output error"
    with pytest.raises(TransferError, match=message) as error:
        arena.wait_offload(0)
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(TransferError, match=r"cannot read .* Input/output error"):
        reload(arena)


def test_a_failed_read_is_raised_by_its_wait(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = link.reserve(NBYTES)
    offload(arena, random_bytes())
    monkeypatch.setattr(copy_thread.os, "preadv", failing(errno.EIO))
    with pytest.raises(TransferError, match=r"cannot read 100,000 bytes .* Input/output error"):
        reload(arena)


def test_a_file_that_ends_early_is_an_error(link: DiskLink) -> None:
    arena: Any = link.reserve(NBYTES)
    offload(arena, random_bytes())
    os.ftruncate(arena.file.descriptor, NBYTES - 5)
    with pytest.raises(TransferError, match="ends 5 bytes early"):
        reload(arena)


def test_a_failed_write_does_not_keep_the_tensor(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread.os, "pwrite", failing(errno.EIO))
    arena = link.reserve(NBYTES)
    source = random_bytes()
    is_alive = weakref.ref(source)
    arena.start_offload(0, source)
    del source
    with pytest.raises(TransferError):
        arena.wait_offload(0)
    assert is_alive() is None


@pytest.mark.parametrize("name", ["_writer", "_reader"])
def test_a_dead_thread_is_an_error_at_the_wait(link: DiskLink, name: str) -> None:
    arena = link.reserve(NBYTES)
    getattr(link, name)._queue.put(None)  # The thread ends before its first copy.
    with pytest.raises(TransferError, match="the thread that copies has died"):
        offload(arena, random_bytes())
        reload(arena)


def test_a_wait_without_a_start_is_an_error(link: DiskLink) -> None:
    arena = link.reserve(NBYTES)
    for use in (arena.wait_offload, arena.wait_reload):
        with pytest.raises(TransferError, match="was started at offset 7"):
            use(7)
    with pytest.raises(TransferError, match="no offload was started"):
        arena.start_reload(0, torch.zeros(1, dtype=torch.uint8))


def test_a_start_does_not_wait_and_a_source_lives_until_its_wait(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    arena = link.reserve(NBYTES)
    source = random_bytes()
    is_alive = weakref.ref(source)
    arena.start_offload(0, source)
    del source
    gate.reached.wait()
    assert is_alive() is not None
    gate.opened.set()
    arena.wait_offload(0)
    assert is_alive() is None


def test_a_reload_waits_for_the_write_of_its_slot(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    is_reader_waiting = threading.Event()
    settle = copy_thread.Copy.settle

    def note_reader(copy: copy_thread.Copy) -> None:
        if threading.current_thread().name == "backhaul-spill-reader":
            is_reader_waiting.set()
            gate.opened.set()
        settle(copy)

    monkeypatch.setattr(copy_thread.Copy, "settle", note_reader)
    source, destination = random_bytes(), torch.zeros(NBYTES, dtype=torch.uint8)
    arena = link.reserve(NBYTES)
    arena.start_offload(0, source)
    arena.start_reload(0, destination)
    arena.wait_reload(0)
    assert is_reader_waiting.is_set()
    assert torch.equal(destination, source)


def test_an_interrupted_wait_can_be_waited_for_again(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    source = random_bytes()
    arena = link.reserve(NBYTES)
    arena.start_offload(0, source)
    interrupter = threading.Thread(target=lambda: (gate.reached.wait(), _thread.interrupt_main()))
    # A process that was started in the background may ignore the signal.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupter.start()
            arena.wait_offload(0)
    finally:
        signal.signal(signal.SIGINT, earlier)
    interrupter.join()
    gate.opened.set()
    arena.wait_offload(0)
    assert torch.equal(reload(arena), source)


def test_a_released_file_is_used_again(link: DiskLink) -> None:
    first: Any = link.reserve(NBYTES)
    assert (link.open_arena_count, link.idle_arena_count) == (1, 0)
    first.release()
    first.release()
    assert (link.open_arena_count, link.idle_arena_count) == (0, 1)
    second: Any = link.reserve(NBYTES - 1)
    assert second.file is first.file
    assert (link.open_arena_count, link.idle_arena_count) == (1, 0)


def test_idle_files_that_are_too_small_make_way(link: DiskLink) -> None:
    link.reserve(NBYTES).release()
    arena = link.reserve(2 * NBYTES)
    assert (link.open_arena_count, link.idle_arena_count) == (1, 0)
    arena.release()


def test_an_arena_that_nobody_holds_is_released(link: DiskLink) -> None:
    link.reserve(NBYTES)
    assert (link.open_arena_count, link.idle_arena_count) == (0, 1)


def test_a_file_is_used_again_only_after_its_last_copy(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    arena: Any = link.reserve(NBYTES)
    settle = arena.file.settle
    # The first write ends only once somebody settles the file.
    monkeypatch.setattr(arena.file, "settle", lambda: (gate.opened.set(), settle()))
    try:
        arena.start_offload(0, random_bytes())
        gate.reached.wait()
        last_write = arena.file.last_write
        arena.release()
        link.reserve(NBYTES)
        assert last_write._done.is_set()
    finally:
        gate.opened.set()


def test_copies_of_a_released_step_are_cut_short(
    link: DiskLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    arena = link.reserve(3 * NBYTES)
    for index in range(3):
        arena.start_offload(index * NBYTES, random_bytes())
    gate.reached.wait()
    arena.release()
    gate.opened.set()
    link.close()
    assert gate.call_count == 1


def test_a_release_inside_the_pool_itself_does_not_block(link: DiskLink) -> None:
    arena = link.reserve(NBYTES)

    def release_as_a_finaliser_would() -> None:
        with link._pool._lock:
            arena.release()

    thread = threading.Thread(target=release_as_a_finaliser_would, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert link.idle_arena_count == 1


def test_close_ends_threads_files_and_later_use(link: DiskLink) -> None:
    arena: Any = link.reserve(NBYTES)
    offload(arena, random_bytes())
    reload(arena)
    threads = (link._writer._thread, link._reader._thread)
    link.close()
    link.close()
    assert not any(thread.is_alive() for thread in threads if thread)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena.file.descriptor)
    for use in (lambda: link.reserve(1), lambda: arena.start_offload(0, random_bytes())):
        with pytest.raises(TransferError, match="is closed"):
            use()
    arena.release()


def test_a_dropped_link_takes_its_threads_and_files_along(tmp_path: Path) -> None:
    link = DiskLink(tmp_path)
    arena: Any = link.reserve(NBYTES)
    idle: Any = link.reserve(NBYTES)
    offload(arena, random_bytes())
    reload(arena)
    idle.release()
    threads = (link._writer._thread, link._reader._thread)
    descriptors = (arena.file.descriptor, idle.file.descriptor)
    gc.disable()  # References alone must do it.
    try:
        del link, arena, idle
    finally:
        gc.enable()
    for thread in threads:
        assert thread
        thread.join(timeout=10)
        assert not thread.is_alive()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_descriptors_and_threads_stay_flat_over_1000_steps(link: DiskLink) -> None:
    counts = set()
    source = random_bytes(1000)
    for _ in range(1000):
        arena = link.reserve(1000)
        offload(arena, source)
        assert torch.equal(reload(arena, 1000), source)
        arena.release()
        counts.add((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(counts) == 1


def test_a_fork_is_an_error_and_no_hang(link: DiskLink) -> None:
    arena = link.reserve(NBYTES)
    offload(arena, random_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork.
        child = os.fork()
    if child == 0:
        refused_count = 0
        for use in (
            lambda: link.reserve(1),
            lambda: arena.wait_offload(0),
            lambda: arena.start_reload(0, random_bytes()),
        ):
            try:
                use()
            except TransferError as error:
                refused_count += "forked" in str(error)
        link.close()
        os._exit(refused_count)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    arena.wait_offload(0)


def test_the_folder_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKHAUL_SPILL_DIR", str(tmp_path))
    assert DiskLink().folder == tmp_path


def test_a_memory_backed_default_makes_way_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BACKHAUL_SPILL_DIR", raising=False)
    monkeypatch.setattr(spill_file.tempfile, "gettempdir", lambda: "/some/tmpfs")
    monkeypatch.setattr(spill_file, "DISK_FOLDER", tmp_path)
    monkeypatch.setattr(spill_file, "is_memory_backed", lambda folder: str(folder) == "/some/tmpfs")
    assert DiskLink().folder == tmp_path
    assert DiskLink(Path("/some/tmpfs")).folder == Path("/some/tmpfs")


@pytest.mark.parametrize(("file_system", "expected"), [("tmpfs", True), ("ext4", False)])
def test_a_folder_is_memory_backed_if_its_mount_is(
    file_system: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:999 / /elsewhere rw - ramfs none rw\n"
        f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {file_system} /dev/x rw\n"
    )
    monkeypatch.setattr(spill_file, "MOUNTS", mounts)
    assert DiskLink(tmp_path).is_memory_backed is expected


def test_capacity_is_what_the_folder_has_free(link: DiskLink, tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    total_bytes = status.f_blocks * status.f_frsize
    assert 0 < link.capacity_bytes <= total_bytes


def test_empty_arenas_work(link: DiskLink) -> None:
    link.reserve(0).release()
    assert link.idle_arena_count == 1
