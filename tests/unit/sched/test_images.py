"""The memory of images is used again, never while somebody can see it, and bounded."""

from __future__ import annotations

import gc
import mmap
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kslserve.sched.cache.images import LINE, ImagePool
from tests.resident import resident

PAGE = mmap.PAGESIZE


def address(image: np.ndarray) -> int:
    return image.ctypes.data


def test_memory_comes_back_with_the_last_part_of_an_image() -> None:
    pool = ImagePool(most=1 << 30)
    (image,) = pool.take(1000)
    part = image[100:200]
    half = part[:50].view("<u2")
    place = address(image)
    del image
    assert address(pool.take(1000)[0]) != place
    del part
    assert address(pool.take(1000)[0]) != place
    del half
    assert address(pool.take(1000)[0]) == place
    assert pool.take(0)[0].nbytes == 0


def test_images_do_not_meet() -> None:
    """Under random takes and drops of several sizes, each keeps what was written to it."""
    rng = random.Random(1)
    pool = ImagePool(most=3 * PAGE)
    held: list[tuple[int, np.ndarray]] = []
    for step in range(3000):
        if held and rng.random() < 0.5:
            mark, image = held.pop(rng.randrange(len(held)))
            assert (image == mark).all()
        else:
            for image in pool.take(rng.choice([1, 63, 64, 65, 4000, PAGE, PAGE + 1]), 2):
                image[:] = step % 251
                assert address(image) % LINE == 0
                held.append((step % 251, image))
    assert all((image == mark).all() for mark, image in held)


def test_free_pages_are_kept_up_to_a_bound() -> None:
    pool = ImagePool(most=6 * PAGE)
    images = pool.take(PAGE, 8) + pool.take(2 * PAGE - 5)
    for one in images:
        one[:] = 7
    assert pool.held == 10 * PAGE
    del one
    del images[4:]  # four of a page and one of two
    assert pool.held == 6 * PAGE
    # What was kept is used first; then pages that the system has cleared.
    again = pool.take(2 * PAGE) + pool.take(PAGE, 4)
    assert pool.held == 10 * PAGE
    assert sum(int(image[0] == 7) for image in again) == 1
    images.clear()
    again.clear()
    assert pool.held == 6 * PAGE
    pool.give_back()
    assert pool.held == 0


@pytest.mark.parametrize("nbytes", [1 << 20, 40 << 20])
def test_pages_really_go(nbytes: int) -> None:
    pool = ImagePool(most=0)
    before = resident()
    images = pool.take(nbytes, (80 << 20) // nbytes)
    for image in images:
        image[:] = 1
    del image
    assert resident() - before > 70 << 20
    images.clear()
    assert pool.held == 0
    assert resident() - before < 30 << 20


def test_any_thread_may_drop_and_take() -> None:
    pool = ImagePool(most=1 << 30)

    def work(mark: int) -> None:
        rng = random.Random(mark)
        for _ in range(300):
            images = pool.take(rng.choice([100, 5000]), rng.randrange(1, 4))
            for image in images:
                image[:] = mark
            assert all((image == mark).all() for image in images)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, mark) for mark in range(8)]:
            done.result()
    gc.collect()
    assert pool.held <= 4 * 6 * (2 * PAGE + 2 * LINE)


def test_images_outlive_their_pool() -> None:
    (image,) = ImagePool(most=0).take(3 * PAGE)
    gc.collect()
    image[:] = 9
    assert (image == 9).all()
