"""`encrypted_content`: what we sealed comes back, anything else does not, and nothing raises."""

from __future__ import annotations

import base64
import hashlib
import zlib

from hypothesis import given
from hypothesis import strategies as st

from kslserve.api import responses_reasoning
from kslserve.api.responses_reasoning import TEXT_BYTES_MAX, seal, unseal


@given(st.text())
def test_text_comes_back(text: str) -> None:
    sealed = seal(text)
    assert sealed is not None
    assert unseal(sealed) == text.encode("utf-8", "replace").decode()


@given(st.text() | st.text().map(lambda text: "ksl1." + text))
def test_foreign_text_is_none(text: str) -> None:
    assert unseal(text) is None


@given(st.text(min_size=1), st.data())
def test_a_changed_character_is_noticed(text: str, data: st.DataObject) -> None:
    sealed = seal(text)
    assert sealed is not None
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != sealed[at]))
    changed = sealed[:at] + other + sealed[at + 1 :]
    # The last character before padding may hold bits that mean nothing.
    assert unseal(changed) in (None, text)
    assert unseal(sealed[:at]) is None


def test_size_is_capped() -> None:
    assert unseal(seal("x" * TEXT_BYTES_MAX) or "") == "x" * TEXT_BYTES_MAX
    assert seal("x" * (TEXT_BYTES_MAX + 1)) is None


def packed(data: bytes, digest: bytes | None = None) -> str:
    digest = (
        digest or hashlib.blake2b(data, digest_size=16, person=responses_reasoning._PERSON).digest()
    )
    return "ksl1." + base64.urlsafe_b64encode(digest + data).decode()


def test_whoever_does_not_know_the_digest_is_not_us() -> None:
    assert unseal(packed(zlib.compress(b"y"), b"0" * 16)) is None


def test_a_bomb_does_not_unfold() -> None:
    assert unseal(packed(zlib.compress(b"y" * 7))) == "y" * 7
    assert unseal(packed(zlib.compress(b"x" * (TEXT_BYTES_MAX + 1)))) is None
    assert unseal(packed(zlib.compress(b"y") + b"more")) is None
    assert unseal(packed(b"not zlib")) is None
    assert unseal(packed(zlib.compress(b"\xff"))) is None
    assert unseal("ksl1." + "A" * (4 * TEXT_BYTES_MAX)) is None
