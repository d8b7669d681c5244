"""Boundaries of TLS records, by which a socket becomes readable when enough has arrived, and not before."""

from __future__ import annotations

import random

from dadplug.hub.secure_socket import _Records

BESIDE = 22  # bytes of a record beside its content


def record(content: int) -> bytes:
    return b"\x17\x03\x03" + (content + BESIDE - 5).to_bytes(2, "big") + bytes(content + BESIDE - 5)


def test_the_end_of_a_record_is_known_wherever_its_bytes_are_divided():
    chance = random.Random(0)
    contents = [chance.choice([1, 2, 700, 16384]) for _ in range(60)]
    stream = b"".join(map(record, contents))
    ends = [0]
    for content in contents:
        ends.append(ends[-1] + content + BESIDE)
    records, position = _Records(), 0
    while position < len(stream):
        count = min(len(stream) - position, chance.choice([1, 3, 4, 5, 6, 800, 40000]))
        records.count(memoryview(stream[position : position + count]))
        position += count
        last = max(number for number, end in enumerate(ends) if end <= position)
        begun = position - ends[last]
        if begun < 5:  # the head is incomplete, and the length unknown
            assert (records.missing, len(records.head)) == (0, begun)
            assert records.bytes_for(1) == 1
            continue
        assert (records.missing, records.content) == (ends[last + 1] - position, contents[last])
        assert records.bytes_for(1) == records.bytes_for(contents[last]) == records.missing


def test_what_has_to_arrive_is_known_to_the_byte_where_records_are_full():
    stream = record(16384) * 2 + record(100)
    for cut in (0, 3, 5, 16406, 16409, 20000):
        records = _Records()
        records.count(memoryview(stream[:cut]))
        decrypted = 16384 * (cut >= 16406)
        assert records.bytes_for(2 * 16384 + 100 - decrypted) == len(stream) - cut
