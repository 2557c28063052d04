"""Mutations of input that know its structure: of bytes, JSON, lines, safetensors, archives, CSV and TOML.

Each takes a valid input and a generator, and returns a changed one. The same seed makes the same change.
"""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]
NUMBERS = (0, 1, -1, 2, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 5e-324, 1e300, 1e999, float("nan"))
TEXTS = ("", "a", "A" * 5_000, "\n", "\r\n\0", "/", "../x", "é\u2028", "\ud800", "nan", "1e5", "[", '"', "__class__")
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [None], {"": None})


# Bytes


def flip_bits(data: bytes, rng: Random) -> bytes:
    content = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def set_bytes(data: bytes, rng: Random) -> bytes:
    """Write odd bytes, or an odd number of 4 or 8 bytes, over some."""
    content, place = bytearray(data or b"\0"), rng.randrange(max(len(data), 1))
    number = rng.choice((0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1, rng.getrandbits(32)))
    size = rng.choice((1, 1, 4, 8))
    content[place : place + size] = (number % 256**size).to_bytes(size, rng.choice(("little", "big")))
    return bytes(content)


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def delete(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 2, 4, 16, 100)) :]


def repeat(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + rng.choice((1, 4, 16, 100))] * rng.choice((2, 3, 50)) + data[start:]


def splice(data: bytes, rng: Random) -> bytes:
    """Put a part of the input elsewhere in it."""
    one, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    return data[:one] + data[other : other + rng.choice((1, 8, 64, 512))] + data[one:]


def insert(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    some = rng.choice((b"\0", b"\n", b'"', b",", b"\xff\xfe", b"[" * 5_000, b'{"a":' * 3_000, rng.randbytes(8)))
    return data[:start] + some + data[start:]


BYTES: tuple[Mutate, ...] = (flip_bits, set_bytes, cut, delete, repeat, splice, insert)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(BYTES)(data, rng)
    return data


# JSON


def _list_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys or positions."""
    waiting = [tree]
    while waiting:
        held = waiting.pop()
        keys = list(held) if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ()
        for key in keys:
            yield held, key
            waiting.append(held[key])


def _make_near(value: Any, rng: Random) -> Any:
    """Return a value of the same type, or of a near one."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value)))
    if isinstance(value, int | float):
        return rng.choice(
            (-value, value * 2, str(value), [value], rng.choice(NUMBERS), float(value) if abs(value) < 2**60 else 0)
        )
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), [value], rng.choice(TEXTS), 3))
    if isinstance(value, list):
        return rng.choice(
            (value[:-1], value + value, value[::-1], dict.fromkeys(map(str, range(3)), value), "", [value])
        )
    return rng.choice((list(value), list(value.items()), "", None)) if isinstance(value, dict) else 0


def _nest(value: Any, depth: int, rng: Random) -> Any:
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutate_tree(tree: Any, rng: Random) -> Any:
    """Return a JSON value with a few edits: swapped, deleted, doubled and other values, other keys, more depth."""
    tree = {"": copy.deepcopy(tree)}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_list_places(tree))
        held, key = rng.choice(places)
        way = rng.randrange(8)
        if way == 0:
            held[key] = rng.choice(VALUES)
        elif way <= 3:
            held[key] = _make_near(held[key], rng)
        elif way == 4 and len(places) > 1:
            del held[key]
        elif way == 5:
            other, place = rng.choice(places)
            held[key] = copy.deepcopy(other[place])
        elif way == 6 and isinstance(held, dict):
            held[rng.choice((*TEXTS, *(str(name) for name in list(held)[:3])))] = held.pop(key)
        elif way == 7:
            held[key] = _nest(held[key], rng.choice((1, 2, 70, 300)), rng)
        if not tree:
            return {}
    return next(iter(tree.values()))


def write_json(tree: Any) -> bytes:
    """Return JSON, whatever it holds; lone surrogates and NaN as Python writes them."""
    return json.dumps(tree).encode(errors="surrogatepass")


def mutate_json(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    try:
        written = write_json(mutate_tree(json.loads(data), rng))
    except RecursionError:  # it was changed before, and is as deep as Python can go
        return mutate_bytes(data, rng)
    return nest_deeply(written, rng) if rng.random() < 0.02 else written


def nest_deeply(data: bytes, rng: Random) -> bytes:
    """Put brackets around a value, thousands of times; sometimes they do not close."""
    depth = rng.choice((100, 2_000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return opening * depth + data + closing * (depth if rng.random() < 0.7 else 0)


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """Change lines of JSON: one of them, or which there are and in which order."""
    lines = data.splitlines(keepends=True)
    place, way = rng.randrange(len(lines)), rng.randrange(8)
    if way == 0:
        return mutate_bytes(data, rng)
    if way == 1:
        del lines[place]
    elif way == 2:
        lines.insert(rng.randrange(len(lines) + 1), lines[place])
    elif way == 3:
        rng.shuffle(lines)
    else:
        lines[place] = mutate_json(lines[place], rng).replace(b"\n", b"") + b"\n"
    return b"".join(lines)


# Files with headers


def mutate_page(data: bytes, rng: Random) -> bytes:
    """Change a safetensors file: its header, the facts in it, its numbers, or bytes anywhere."""
    way, size = rng.randrange(6), int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    if way == 0:
        return mutate_bytes(data, rng)
    if way == 1:
        return rng.choice((0, 1, size - 1, 2**40, 2**64 - 1)).to_bytes(8, "little") + data[8:]
    if way == 2:
        header = mutate_tree(header, rng)
    elif way == 3 and "__metadata__" in header and "facts" in header["__metadata__"]:
        facts = header["__metadata__"]["facts"].encode()
        header["__metadata__"]["facts"] = mutate_json(facts, rng).decode(errors="replace")
    elif body:
        numbers = bytearray(body)
        odd = rng.choice((float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e308, 5e-324))
        for _ in range(rng.choice((1, 1, 3, len(body) // 8))):
            place = 8 * rng.randrange(max(len(body) // 8, 1))
            numbers[place : place + 8] = struct.pack("<d", odd)
        body = bytes(numbers[: len(body)])
    written = write_json(header)
    return len(written).to_bytes(8, "little") + written + body


def mutate_footer(data: bytes, rng: Random) -> bytes:
    """Change the footer of a Parquet file, or bytes anywhere."""
    size = int.from_bytes(data[-8:-4], "little")
    if rng.random() < 0.4 or size + 12 > len(data):
        return mutate_bytes(data, rng)
    body, footer = data[: -8 - size], mutate_bytes(data[-8 - size : -8], rng)
    return body + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def mutate_archive(data: bytes, rng: Random) -> bytes:
    """Change the members of a zip archive, whose checksums are then right, or bytes anywhere."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name, way = rng.choice(list(members)), rng.randrange(5)
    if way == 0:
        del members[name]
    elif way == 1:
        members[rng.choice(list(members))] = members[name]
    else:
        end = members[name].find(b"\n") + 1
        head, body = members[name][:end], members[name][end:]
        members[name] = mutate_bytes(head, rng) + body if rng.random() < 0.6 else head + mutate_bytes(body, rng)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return written.getvalue()


# Texts


def mutate_csv(data: bytes, rng: Random) -> bytes:
    """Change the dialect, the header, cells or the encoding of a CSV file, or bytes anywhere."""
    way = rng.randrange(9)
    if way <= 1:
        return mutate_bytes(data, rng)
    if way == 2:
        return data.replace(b",", rng.choice((b";", b"\t", b"|", b" ", b",,", b'","')))
    if way == 3:
        return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\n\r", b"\0\n")))
    if way == 4:
        return data.decode().encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp500")))
    if way == 5:
        return data.replace(b".", b",") if rng.random() < 0.5 else data.replace(b"1", b'"1"')
    rows = [line.split(b",") for line in data.split(b"\n")]
    for _ in range(rng.choice((1, 1, 5))):
        row = rows[0 if way == 6 else rng.randrange(len(rows))]
        cell = rng.choice((b"", b"NA", b"nan", b"inf", b"007", b"1e999", b"2020-01-01", b"\xff", b'"', b"x" * 140_000))
        row[rng.randrange(len(row))] = rng.choice((cell, *row))
        if rng.random() < 0.3:
            row.append(cell)
    return b"\n".join(b",".join(row) for row in rows)


def mutate_toml(data: bytes, rng: Random) -> bytes:
    """Change lines of a TOML file, the values of its keys, or bytes anywhere."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, way = rng.randrange(len(lines)), rng.randrange(6)
        if way == 0 and len(lines) > 1:
            del lines[place]
        elif way == 1:
            lines.insert(rng.randrange(len(lines)), lines[place])
        elif way == 2:
            lines[place] = lines[place].lstrip(b"# ")
        elif b"=" in lines[place]:
            key, _, value = lines[place].lstrip(b"# ").partition(b"=")
            depth = rng.choice((1, 3, 100, 3_000))
            odd = (b"0", b"-1", b"1e999", b"nan", b'""', b"[]", b"{}", b"true", b"1979-05-27", b'"x"', b"[1, 'a']")
            more = (b"[" * depth + b"]" * depth, b"{a." + b"a." * depth + b"b = 1}", value.strip() + b"0")
            lines[place] = key + b"= " + rng.choice((*odd, *odd, *more)) + b"\n"
    return b"".join(lines)
