"""Headers and signatures: what two ranks compare before a byte of an array moves."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaccord.arrays.dtypes import OP_NAMES
from oneaccord.contract.backend import HEADER_BYTES
from oneaccord.contract.header import OPERATIONS, CallSignature, pack_header, parse_header, split_header

SIGNATURE = CallSignature(
    "reduce_scatter", dtype=11, shape=(6, 2), op="sum", op_code=1, root=-1, counts=(1, 2, 3), algorithm="ring/1", count=12
)
signatures = st.builds(
    CallSignature,
    operation=st.sampled_from(OPERATIONS),
    dtype=st.integers(0, 255),
    shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    op=st.just(""),
    op_code=st.integers(0, 255),
    root=st.integers(-1, 2**31 - 1),
    counts=st.none() | st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    algorithm=st.sampled_from(["", "ring/1", "tree/4"]),
    count=st.integers(0, 2**64 - 1),
    reproducible=st.booleans(),
)


@given(
    signature=signatures,
    sender=st.integers(0, 2**32 - 1),
    channel=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    nbytes=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**32 - 1),
)
def test_a_header_says_what_was_packed(signature, sender, channel, sequence, nbytes, index):
    data = pack_header(signature, sender, channel, sequence, nbytes, index)
    assert len(data) == HEADER_BYTES
    header = parse_header(data)
    assert header is not None
    assert (header.operation, header.dtype, header.root) == (signature.operation, signature.dtype, signature.root)
    assert (header.sender, header.channel, header.sequence) == (sender, channel, sequence)
    assert (header.count, header.nbytes, header.index) == (signature.count, nbytes, index)
    assert header.digest == signature.digest
    head, tail = split_header(data)
    assert head + sequence.to_bytes(8, "little") + tail == data


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_goes_by_a_header_of_its_own(operation):
    data = pack_header(CallSignature(operation), 0, 0, 0, 0, 0)
    header = parse_header(data)
    assert header is not None
    assert header.operation == operation
    assert header.describe() == f"{operation}()"
    assert data[4] == OPERATIONS.index(operation) == CallSignature(operation).operation_code


def test_no_operation_is_named_twice_and_all_have_a_byte():
    assert len(set(OPERATIONS)) == len(OPERATIONS) <= 256


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data):
    """Random bytes may begin with anything but what oneaccord begins with."""
    if not data.startswith(b"OAC"):
        assert parse_header(data) is None


@given(data=st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4))
def test_any_bytes_after_the_magic_are_taken_apart_or_refused(data):
    good = pack_header(SIGNATURE, 1, 2, 3, 4, 5)
    header = parse_header(good[:4] + data)
    if data[0] >= len(OPERATIONS):
        assert header is None
    else:
        assert header is not None
        assert header.operation in header.describe()


@pytest.mark.parametrize("field", [field.name for field in fields(CallSignature) if field.name not in ("op_code", "count")])
def test_the_digest_differs_where_any_field_differs(field):
    other = {
        "operation": "all_reduce",
        "dtype": 12,
        "shape": (2, 6),
        "op": "max",
        "root": 0,
        "counts": (3, 2, 1),
        "algorithm": "ring/2",
        "part": "the counts",
        "reproducible": True,
        "device": "cuda",
        "fields": b"another one",
    }
    changed = replace(SIGNATURE, **{field: other[field]})
    assert changed.digest != SIGNATURE.digest
    assert changed.digest == replace(changed).digest
    assert len(changed.digest) == 8


def test_a_call_and_a_header_in_words():
    assert SIGNATURE.describe() == 'reduce_scatter(float32[6, 2], op="sum", counts=[1, 2, 3])'
    assert replace(SIGNATURE, part="the counts").describe().startswith("the counts of reduce_scatter(")
    reproducible = replace(SIGNATURE, counts=None, reproducible=True)
    assert reproducible.describe() == 'reduce_scatter(float32[6, 2], op="sum", reproducible=True)'
    assert CallSignature("barrier").describe() == "barrier()"
    assert CallSignature("broadcast", dtype=12, shape=(), root=0, count=1).describe() == "broadcast(float64[], root=0)"
    header = parse_header(pack_header(SIGNATURE, 1, 0, 7, 4, 0))
    assert header is not None
    assert header.describe() == 'reduce_scatter(float32, 12 elements, op="sum")'


@pytest.mark.parametrize(("code", "name"), [(0, ""), *enumerate(OP_NAMES, start=1), (254, "a function"), (255, "a ufunc")])
def test_the_reduction_of_a_header_in_words(code, name):
    header = parse_header(pack_header(replace(SIGNATURE, op_code=code), 0, 0, 0, 0, 0))
    assert header is not None
    assert header.op == name
