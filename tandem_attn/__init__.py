"""Tandem: exact attention for PyTorch in the FlashAttention-4 style, with one API on a CPU and a GPU.

Start with ``attention``; ``attention_varlen`` takes packed sequences, ``attention_kvcache`` decodes, ``supports`` asks whether a call
would run. ``tandem --help`` (or ``python -m tandem_attn --help``) lists the commands.
"""

from tandem_attn._version import __version__
from tandem_attn.api import flops as _flops  # noqa: F401  (registers the operators with PyTorch's FLOP counter)
from tandem_attn.api.backends import Support, backends, supports
from tandem_attn.api.functions import attention, attention_kvcache, attention_varlen
from tandem_attn.spec.errors import UnsupportedError
from tandem_attn.spec.masks import Causal, Document, Full, Mask, Predicate, Window
from tandem_attn.spec.problem import Problem

__all__ = [
    "Causal",
    "Document",
    "Full",
    "Mask",
    "Predicate",
    "Problem",
    "Support",
    "UnsupportedError",
    "Window",
    "__version__",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "backends",
    "supports",
]
