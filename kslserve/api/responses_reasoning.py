"""`encrypted_content` of reasoning items: the exact reasoning text, in a form of our own.

Clients carry it along unread. It holds no secret; a version and a digest make sure that what comes
back is what was sent, so that text of another vendor, or a damaged one, is never taken for ours.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

_PREFIX = "ksl1."
_DIGEST = 16
_PERSON = b"ksl reasoning 1"
TEXT_BYTES_MAX = 1 << 20
_SEALED_CHARS_MAX = len(_PREFIX) + 2 * TEXT_BYTES_MAX


def seal(text: str) -> str | None:
    """The text as `encrypted_content`; None for more than 1 MiB of it."""
    data = text.encode("utf-8", "replace")
    if len(data) > TEXT_BYTES_MAX:
        return None
    packed = zlib.compress(data, 1)
    return _PREFIX + base64.urlsafe_b64encode(_digest(packed) + packed).decode("ascii")


def unseal(sealed: str) -> str | None:
    """The text, or None for anything that `seal` did not make. Never raises; takes memory for at
    most 1 MiB of text."""
    if not sealed.startswith(_PREFIX) or len(sealed) > _SEALED_CHARS_MAX:
        return None
    try:
        data = base64.b64decode(sealed[len(_PREFIX) :].encode("ascii"), b"-_", validate=True)
        digest, packed = data[:_DIGEST], data[_DIGEST:]
        if digest != _digest(packed):
            return None
        inflate = zlib.decompressobj()
        text = inflate.decompress(packed, TEXT_BYTES_MAX)
        if not inflate.eof or inflate.unused_data:
            return None
        return text.decode("utf-8")
    except (ValueError, zlib.error):
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST, person=_PERSON).digest()
