"""Fills the README's marked blocks with real output: ``python tools/readme.py NAME COMMAND...`` runs a command and stores what it prints.

``python tools/readme.py support`` regenerates the support table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tandem_attn.cli.support import markdown

README = Path(__file__).parents[1] / "README.md"


def replace(start: str, end: str, body: str) -> None:
    text = README.read_text()
    block = re.compile(f"({re.escape(start)}\n).*?({re.escape(end)})", re.DOTALL)
    if not block.search(text):
        raise SystemExit(f"README.md has no block {start}")
    README.write_text(block.sub(lambda m: f"{m[1]}{body}\n{m[2]}", text))


def main() -> None:
    name, *command = sys.argv[1:]
    if name == "support":
        replace("<!-- tandem support --device cpu --markdown -->", "<!-- end -->", markdown("cpu"))
        return
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"})
    shown = "\n".join(f"    {line}".rstrip() for line in [f"$ {' '.join(command)}", *run.stdout.rstrip().splitlines()])
    replace(f"<!-- {name} -->", f"<!-- end {name} -->", f"\n{shown}\n")


if __name__ == "__main__":
    main()
