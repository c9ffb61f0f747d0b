"""The group of all subcommands."""

from __future__ import annotations

import io
import sys

import click

from tandem_attn._version import __version__
from tandem_attn.cli.bench import bench
from tandem_attn.cli.check import check
from tandem_attn.cli.demo import demo
from tandem_attn.cli.doctor import doctor
from tandem_attn.cli.emulate import emulate
from tandem_attn.cli.plan import plan
from tandem_attn.cli.precompile import command as precompile
from tandem_attn.cli.roofline import roofline
from tandem_attn.cli.support import support


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tandem")
def main() -> None:
    """Exact attention for PyTorch: what it covers, whether it is right, and how Hopper and Blackwell kernels are planned.

    \b
    Start with:
      tandem doctor                 what works on this machine
      tandem support                what each backend covers
      tandem check --mask causal    a problem's errors against float64
      tandem emulate --seqlen-q 300 the GPU kernel, executed and judged on this CPU
      tandem plan --chip b200       how a kernel is built, and why
      tandem roofline --chip b200   what bounds it
      tandem bench                  how fast it is, beside other libraries
      tandem precompile             kernels compiled before their first call
      tandem demo                   a language model running on Tandem
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character of a table shows ?


for command in (bench, check, demo, doctor, emulate, plan, precompile, roofline, support):
    main.add_command(command)
