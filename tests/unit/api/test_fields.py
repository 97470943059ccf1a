"""Typed readers and their error paths."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api.fields import Fields, load_object
from kslserve.errors import InvalidRequest

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"a": NaN}',
        b"\xff\xfe",
        rb'{"a": "\ud83d"}',
        b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        load_object(body)


def test_last_of_a_repeated_key_counts() -> None:
    assert load_object(b'{"a": 1, "a": 2}').integer("a") == 2


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_load_equals_the_standard_library(value: dict[str, object]) -> None:
    try:
        body = json.dumps(value).encode()
    except UnicodeEncodeError:
        return
    try:
        assert load_object(body).value == json.loads(body)
    except InvalidRequest:
        assert b"\\ud" in body.lower()  # lone surrogates only


def test_absent_and_null_are_none() -> None:
    fields = Fields({"a": None})
    for name in ("a", "b"):
        assert fields.text(name) is None
        assert fields.boolean(name) is None
        assert fields.integer(name) is None
        assert fields.number(name) is None
        assert fields.items(name) is None
        assert fields.object(name) is None
        assert list(fields.objects(name)) == []
        assert not fields.has(name)


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("text", 1),
        ("text", []),
        ("boolean", 1),
        ("boolean", "true"),
        ("integer", True),
        ("integer", 1.5),
        ("integer", "1"),
        ("integer", 1e300),
        ("number", True),
        ("number", "0.5"),
        ("items", {}),
        ("object", []),
    ],
)
def test_wrong_types_name_the_path(reader: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        getattr(Fields({"x": value}, "a[0].b"), reader)("x")
    assert caught.value.param == "a[0].b.x"
    assert "a[0].b.x must be" in str(caught.value)


def test_numbers() -> None:
    fields = Fields({"whole": 3.0, "int": 7, "half": 0.5})
    assert fields.integer("whole") == 3
    assert type(fields.integer("whole")) is int
    assert fields.number("int") == 7.0
    assert fields.number("half") == 0.5
    with pytest.raises(InvalidRequest, match="at least 8"):
        fields.integer("int", low=8)
    with pytest.raises(InvalidRequest, match="at most 6"):
        fields.integer("int", high=6)


def test_objects_carry_their_index() -> None:
    entries = list(Fields({"m": [{"a": 1}, {"a": "x"}]}).objects("m"))
    assert [e.path for e in entries] == ["m[0]", "m[1]"]
    with pytest.raises(InvalidRequest) as caught:
        entries[1].integer("a")
    assert caught.value.param == "m[1].a"
    with pytest.raises(InvalidRequest) as caught:
        list(Fields({"m": [{}, 3]}).objects("m"))
    assert caught.value.param == "m[1]"
