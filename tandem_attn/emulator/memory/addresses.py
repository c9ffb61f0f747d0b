"""How the emulator lays out addresses: windows of the generic address space and of shared memory."""

from __future__ import annotations

# A shared address is 32 bits: the CTA's rank in its cluster in bits 24 and up, the byte offset below. `mapa` changes the rank, and a
# kernel that clears bit 24 (as CUTLASS does to name the even CTA of a pair) gets what it expects.
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# The system's reserved shared memory: the first KiB of each CTA's window (CUDA programming guide, "Shared Memory"; sm_90 and later).
RESERVED_SHARED = 1024
# Windows of the generic address space; host pointers stay below 2^47.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 1 << 57
PARAM_WINDOW = 1 << 58
WINDOW_MASK = (1 << 56) - 1

# Shared memory of one CTA, opt-in maximum, and of one SM (CUDA programming guide, technical specifications, 9.0, 10.0 and 10.3).
MAX_SHARED_PER_CTA = 227 * 1024
SHARED_PER_SM = 228 * 1024
