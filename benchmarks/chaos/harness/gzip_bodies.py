"""Bodies that are small until they are expanded."""

import gzip
import zlib

MAX_EXPANSION = 100  # limits.max_expansion
EXPANSION = 95  # of an attacker who knows the limit


def smallest(body: bytes) -> bytes:
    """A thousandth of the body, if it repeats itself."""
    return gzip.compress(body, 9, mtime=0)


def allowed(body: bytes) -> bytes:
    """As small as the server's limit lets it be: the rest is a comment in gzip's own header."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(body) + packer.flush()
    comment = b"x" * max(0, len(body) // EXPANSION - len(packed))
    header = b"\x1f\x8b\x08\x10\0\0\0\0\0\xff" + comment + b"\0"
    sizes = zlib.crc32(body).to_bytes(4, "little") + (len(body) % 2**32).to_bytes(4, "little")
    return header + packed + sizes
