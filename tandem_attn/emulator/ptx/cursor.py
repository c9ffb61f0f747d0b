"""A place in the tokens of a module, and errors that name the line."""

from __future__ import annotations

from tandem_attn.emulator.errors import ParseError
from tandem_attn.emulator.ptx.lexer import Token, number, tokenize


class Cursor:
    """Reads tokens one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.at = 0

    def peek(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text == text and self.tokens[self.at].kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise self.error(f"expected {text!r}, found {token.text!r}", token)
        return token

    def error(self, message: str, token: Token | None = None) -> ParseError:
        token = token or self.peek()
        lines = self.text.split("\n")
        return ParseError(message, token.line, lines[token.line - 1] if token.line <= len(lines) else "")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "number":
            raise self.error(f"expected a number, found {token.text!r}", token)
        return sign * number(token.text)[0]
