"""Around native collectives of libraries: the same call on all ranks, means, and what a root keeps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oneaccord.api import HeaderMismatch, agree_on_call, copy_own, divide_sum

DIGESTS = [bytes(range(8)), bytes(range(8)), bytes([0, 1, 2, 3, 4, 5, 6, 255])]


def least_of(digests: list[bytes], dtype: str) -> bytes:
    """Reduce as a library does."""
    pairs = [np.frombuffer(each + bytes(255 - byte for byte in each), dtype) for each in digests]
    return bytes(np.minimum.reduce(pairs).tobytes())


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_agree_on_call_returns_when_all_ranks_make_one_call(dtype: str):
    def gather(mine: bytes) -> bytes:
        raise AssertionError("all is well")

    for digest in DIGESTS:
        agree_on_call(digest, 3, lambda pair: least_of([digest] * 3, dtype), gather)  # noqa: B023


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize(("rank", "other"), [(0, 2), (1, 2), (2, 0)])
def test_agree_on_call_names_another_rank_on_every_rank(rank: int, other: int, dtype: str):
    def least(pair: bytes) -> bytes:
        assert pair == least_of([DIGESTS[rank]], dtype)
        return least_of(DIGESTS, dtype)

    with pytest.raises(HeaderMismatch) as caught:
        agree_on_call(DIGESTS[rank], 3, least, lambda mine: b"".join(DIGESTS))
    assert (caught.value.peer, caught.value.header) == (other, b"")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_divide_sum_rounds_once(dtype: type):
    total = np.array([1, 2, 3, 100], dtype)
    divide_sum(total, 3)
    assert (total == (np.array([1, 2, 3, 100], np.float64) / 3).astype(dtype)).all()
    before = total.copy()
    divide_sum(total, 1)
    divide_sum(total[:0], 3)
    assert (total == before).all()


def test_divide_sum_divides_by_a_count_that_the_dtype_lacks():
    total = np.array([257.0 * 2], ml_dtypes.bfloat16)
    assert float(ml_dtypes.bfloat16(257)) != 257
    expected = np.float32(total[0]) / np.float32(257)
    divide_sum(total, 257)
    assert total[0] == ml_dtypes.bfloat16(expected)


def test_copy_own_copies_what_is_elsewhere():
    source, target = np.arange(6), np.zeros((2, 3), np.int64)
    copy_own(source[:0], target)
    assert not target.any()
    copy_own(source, target)
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    copy_own(target.reshape(-1), target)
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
