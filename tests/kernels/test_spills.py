"""How many loads and stores of the stack ptxas leaves in the kernel of every plan: none, but for what is listed. Needs no GPU.

``judge`` (make matrix) compiles the plans of every problem list; make test a few that had spills before, or have some left.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulation import PROBLEMS as BLACKWELL
from features import FEATURES, MANY_QUERIES, make
from float8 import PAIRS
from float8 import PROBLEMS as FLOAT8
from problems import PROBLEMS as HOPPER
from sass import disassemble

from tandem_attn.kernels import backend
from tandem_attn.kernels.compile import compiled
from tandem_attn.spec.mask_tree import lower
from tandem_attn.spec.plan import FORWARD, Plan
from tandem_attn.spec.planner import plan as make_plan

BLACKWELL_PROBLEMS = {**HOPPER, **BLACKWELL, **{f"8 bits: {name}": p for name, p in (FLOAT8 | PAIRS).items()}}
