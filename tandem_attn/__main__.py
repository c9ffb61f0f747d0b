"""``python -m tandem_attn`` is ``tandem``."""

from tandem_attn.cli.main import main

main(prog_name="tandem")
