"""torch.autocast around the calls that PyTorch's own attention takes part in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cast(device_type: str, *tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where it is on; as PyTorch does, float64, integers and booleans stay.

    A model under autocast may bring queries and keys in float32 (out of a norm or a rotary embedding) and values in bfloat16.
    """
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
