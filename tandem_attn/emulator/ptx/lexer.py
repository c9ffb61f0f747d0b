"""PTX text -> tokens with their line. PTX manual, "Syntax", "Lexical Elements"."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from tandem_attn.emulator.errors import ParseError

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)
      |(?P<newline>\n)
      |(?P<comment>/\*.*?\*/)
      |(?P<string>"(?:\\.|[^"\\])*")
      |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
                 |\d+\.\d*(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)|\d+U?)
      |(?P<word>[A-Za-z_$%.][\w$]*(?:(?:::|\.)[\w$]+)*)
      |(?P<punct>[-+*/!~&^|=<>(){}\[\],;:@?])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str  # "word", "number", "string", "punct", "end"
    text: str
    line: int
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """All tokens of a PTX text, ending with one of kind "end". Raises ParseError on a character that begins no token."""
    tokens: list[Token] = []
    line, at, size = 1, 0, len(text)
    match = _TOKEN.match
    while at < size:
        found = match(text, at)
        if found is None:
            raise ParseError(f"unexpected character {text[at]!r}", line, text[at : at + 60].split("\n", maxsplit=1)[0])
        kind, end = found.lastgroup, found.end()
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += text.count("\n", at, end)
        elif kind != "skip":
            tokens.append(Token(str(kind), found.group(), line, at, end))
        at = end
    tokens.append(Token("end", "", line, size, size))
    return tokens


def number(text: str) -> tuple[int, int]:
    """The value of a number token: an integer and 0, or the bits of a float and its width."""
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16), 32
    if text[:2] in ("0d", "0D"):
        return int(text[2:], 16), 64
    if "." in text or ("e" in text.lower() and not text.lower().startswith("0x")):
        return struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64
    digits = text.rstrip("U")
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    return int(digits, 8 if octal else 0), 0
