"""The file in which W&B keeps a run on this machine: reading its records, and closing it after its writer was killed.

The format is LevelDB's log in blocks of 32 KiB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a
header of 7 bytes, with zlib's CRC-32 of type and data. W&B does not promise to keep it, so header and every checksum
are checked before anything is written.
"""

import struct
import zlib
from pathlib import Path

from tracking import whole

HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32768
FRAME = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Unreadable(ValueError):
    """Not a file that this module knows how to change; the message is one sentence."""


def read(path: Path) -> list[bytes]:
    """The records of a run's file, each one a serialized `Record`; a last one that was cut off is left out.

    Raises Unreadable for another format, and for damage before the end: rewriting would lose what comes after it.
    """
    content = path.read_bytes()
    if not content.startswith(HEADER):
        raise Unreadable(f"{path} is not in the format that W&B 0.31 writes.")
    records, parts, position = [], [], len(HEADER)
    while position + FRAME.size <= len(content):
        if (left := BLOCK - position % BLOCK) < FRAME.size:
            position += left
            continue
        checksum, length, kind = FRAME.unpack_from(content, position)
        data = content[position + FRAME.size : position + FRAME.size + length]
        if len(data) < length or checksum != _checksum(kind, data):
            break
        parts = [*parts, data] if kind in (MIDDLE, LAST) else [data]
        if kind in (FULL, LAST):
            records.append(b"".join(parts))
        position += FRAME.size + length
    if len(content) - position > BLOCK:
        raise Unreadable(f"{path} is damaged at byte {position}.")
    return records


def write(path: Path, records: list[bytes]) -> None:
    """Replaces the file by one with these records; at every moment one of the two is there, complete."""
    content = bytearray(HEADER)
    for record in records:
        begun = False
        while not begun or record:
            left = BLOCK - len(content) % BLOCK
            if left < FRAME.size:
                content += bytes(left)
                left = BLOCK
            data, record = record[: left - FRAME.size], record[left - FRAME.size :]
            kind = (MIDDLE if record else LAST) if begun else (FIRST if record else FULL)
            content += FRAME.pack(_checksum(kind, data), len(data), kind) + data
            begun = True
    whole.write(path, bytes(content))


def _checksum(kind: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(bytes([kind])))
