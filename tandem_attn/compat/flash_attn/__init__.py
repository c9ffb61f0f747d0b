"""FlashAttention-2's functions (package flash-attn 2.8) on Tandem: same names, argument order, defaults and window convention.

    from tandem_attn.compat.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

``docs/compat.md`` lists what differs. Interface: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
"""

from tandem_attn.compat.flash_attn.cache import flash_attn_with_kvcache
from tandem_attn.compat.flash_attn.padded import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from tandem_attn.compat.flash_attn.varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
