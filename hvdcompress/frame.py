"""Frames: the header before every payload that one rank sends to another.

A header is 28 bytes, little-endian:

    magic    4 bytes  b"HVDC"
    format   uint8    version of this layout and of the codecs
    codec    uint8    who wrote the payload
    bucket   uint16
    step     uint32   modulo 2**32
    elements uint64   that the payload stands for
    length   uint64   bytes of the payload

So a peer that is a step off, a payload that was cut, or bytes that are no frame are found out and said, and a rank
with nothing to say still sends something.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from .core import Bytes
from .errors import CompressionError, PayloadError

FORMAT = 1
MAGIC = b"HVDC"
HEADER = struct.Struct("<4sBBHIQQ")

STATUS, EXCUSE = 0, 255  # codec numbers that no codec may have


class Excused(CompressionError):
    """A peer could not make its payload, and said why in place of it."""


class Address(NamedTuple):
    """Which payload is meant: it must be equal at both ends."""

    codec: int
    bucket: int
    step: int
    elements: int


def pack(address: Address, payload: Bytes) -> Bytes:
    """Puts the header before a payload; uint8[28 + payload.size]."""
    header = HEADER.pack(
        MAGIC, FORMAT, address.codec, address.bucket & 0xFFFF, address.step & 0xFFFFFFFF, address.elements, payload.size
    )
    return np.concatenate([np.frombuffer(header, np.uint8), payload])


def excuse(bucket: int, step: int, message: str) -> Bytes:
    """A frame in place of a payload that could not be made; whoever unpacks it raises the message."""
    return pack(Address(EXCUSE, bucket, step, 0), np.frombuffer(message.encode(), np.uint8))


def unpack(buffer: Bytes, address: Address, sender: int) -> Bytes:
    """Takes the header off and checks it.

    Args:
        buffer: uint8, one whole frame, as received.
        address: what is expected.
        sender: the rank that it came from, for the message.

    Raises:
        PayloadError: the bytes are cut, foreign, of another format, codec, bucket, step or size.
        Excused: the sender could not make its payload, and says why.
    """
    found, length = _header(buffer, sender)
    if buffer.size != HEADER.size + length:
        raise PayloadError(
            f"the frame from rank {sender} has {buffer.size - HEADER.size} bytes of payload where its header says {length}"
        )
    if found.codec == EXCUSE:
        raise Excused(f"rank {sender}: {bytes(buffer[HEADER.size :]).decode(errors='replace')}")
    wanted = address._replace(bucket=address.bucket & 0xFFFF, step=address.step & 0xFFFFFFFF)
    for field, is_, should in zip(Address._fields, found, wanted):
        if is_ != should:
            raise PayloadError(
                f"the frame from rank {sender} is of {field} {is_}, expected {should}: "
                "the ranks are not in the same step of the same training"
            )
    return buffer[HEADER.size :]


def split(buffer: Bytes, ranks: int) -> list[Bytes]:
    """Cuts frames that were gathered into one buffer, one of each rank, by their lengths.

    Raises:
        PayloadError: the buffer does not hold exactly `ranks` frames.
    """
    frames, start = [], 0
    for rank in range(ranks):
        _, length = _header(buffer[start:], rank)
        stop = start + HEADER.size + length
        if stop > buffer.size:
            raise PayloadError(
                f"the frame from rank {rank} says {length} bytes of payload, but only "
                f"{buffer.size - start - HEADER.size} bytes are left"
            )
        frames.append(buffer[start:stop])
        start = stop
    if start != buffer.size:
        raise PayloadError(f"{buffer.size - start} bytes are left over after the frames of {ranks} ranks")
    return frames


def _header(buffer: Bytes, sender: int) -> tuple[Address, int]:
    if buffer.size < HEADER.size:
        raise PayloadError(f"the frame from rank {sender} has {buffer.size} bytes, less than its header of {HEADER.size}")
    magic, version, codec, bucket, step, elements, length = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise PayloadError(f"the frame from rank {sender} starts with {magic!r}, not {MAGIC!r}: it is not of hvdcompress")
    if version != FORMAT:
        raise PayloadError(
            f"the frame from rank {sender} is of format {version}, this is {FORMAT}: "
            "install one version of hvdcompress everywhere"
        )
    return Address(codec, bucket, step, elements), length
