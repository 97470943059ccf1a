"""Done records, as the library writes them, into values.

Nearly every wave is one token of each of its rows and nothing else: such a one is read without an
object per row."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from kslserve.engine.marshal import DONE, IDS, Pending
from kslserve.engine.types import Done, RowDone

# Of a DONE: status and flags in one, accepted and proposed in one, the number of tokens, the first.
PLAIN = struct.Struct("=16xq4xqii164x")


class DoneReader:
    """Room for the records of a full ring; the library writes them to `memory`, `capacity` at
    most."""

    def __init__(self, lib: Any, capacity: int) -> None:
        self.capacity = capacity
        self.memory = bytearray(capacity * DONE.size)
        self._view = memoryview(self.memory)
        self._lib = lib
        self._wave_end: int = lib.KSL_DONE_WAVE_END
        self._rows: list[RowDone] = []  # of a wave that did not end yet

    def read(self, n: int, pending: dict[int, Pending]) -> list[Done]:
        """The waves that end with the first n records, oldest first; takes what waited for them out
        of `pending`. A failed wave has an empty `error`, for which the library is to be asked."""
        if n and not self._rows:
            done = self._read_plain(n - 1, pending)
            if done is not None:
                return [done]
        return self._read_all(n, pending)

    def _read_plain(self, rows: int, pending: dict[int, Pending]) -> Done | None:
        """One wave that ended, with so many rows, of which each sampled one token and no more is to
        be told; None where there is anything else."""
        records = self._view[: rows * DONE.size]
        sampled = [
            token
            for state, drafts, tokens, token in PLAIN.iter_unpack(records)
            if tokens == 1 and not (state or drafts)
        ]
        end = DONE.unpack_from(self._view, rows * DONE.size)
        if len(sampled) != rows or end[4] != self._wave_end or end[3]:
            return None
        wave = pending[end[0]]
        if wave.logprobs or wave.taps:
            return None
        del pending[end[0]]
        unpack = partial(_unpack_rows, bytes(records), self._lib)
        queued_ns, started_ns, ended_ns, drafts_ns = end[13:]
        return Done(end[0], unpack, queued_ns, started_ns, ended_ns, drafts_ns, sampled)

    def _read_all(self, n: int, pending: dict[int, Pending]) -> list[Done]:
        ended: list[Done] = []
        for record in DONE.iter_unpack(self._view[: n * DONE.size]):
            if not record[4] & self._wave_end:
                self._rows.append(unpack_row(record, self._lib))
                continue
            rows, self._rows = self._rows, []
            wave = pending.pop(record[0])
            done = Done(record[0], rows, *record[13:17])
            if record[3] != self._lib.KSL_OK:
                done.error = ""
            else:
                _unpack_logprobs(rows, wave)
                for (name, data), tap in zip(wave.taps, wave.tap_structs or (), strict=True):
                    done.taps[name] = data[: tap.written]
            ended.append(done)
        return ended


def _unpack_rows(records: bytes, lib: Any) -> list[RowDone]:
    return [unpack_row(record, lib) for record in DONE.iter_unpack(records)]


def unpack_row(record: tuple[Any, ...], lib: Any) -> RowDone:
    """One done record, a tuple of DONE, as a RowDone."""
    n, flags = record[8], record[4]
    tokens = record[9:10] if n == 1 else (record[9], *IDS.unpack(record[10]))[:n]
    done = RowDone(record[2], tokens, record[5], record[6])
    if record[7]:
        done.drafts = IDS.unpack(record[11])[: record[7]]
    if flags:
        done.stop = bool(flags & lib.KSL_DONE_STOP)
        done.latched = bool(flags & lib.KSL_DONE_LATCHED)
        done.bad_logits = bool(flags & lib.KSL_DONE_BAD_LOGITS)
        done.bad_draft = bool(flags & lib.KSL_DONE_BAD_DRAFT)
    return done


def _unpack_logprobs(rows: list[RowDone], pending: Pending) -> None:
    """Add the log-probabilities to the rows of a wave that asked for them."""
    for index, (entries, all_filled) in pending.logprobs.items():
        row = rows[index]
        # A VERIFY row has room for every draft, but entries only for what was sampled.
        row.logprobs = (entries if all_filled else entries[: len(row.tokens)]).tolist()
