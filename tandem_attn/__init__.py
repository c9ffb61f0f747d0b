"""Tandem: exact attention for NVIDIA Hopper and Blackwell, with the same API on a CPU."""

from tandem_attn._version import __version__

__all__ = ["__version__"]
