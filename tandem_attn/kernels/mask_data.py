"""What a mask's leaves read, as arguments of the kernel, see ``spec.mask_tree``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem_attn.kernels import helpers
from tandem_attn.kernels.description import Extra, LaunchDescription
from tandem_attn.spec import mask_tree
from tandem_attn.spec.masks import And, Mask, Or
from tandem_attn.spec.plan import Plan
from tandem_attn.spec.problem import Problem


def mask_data(
    plan: Plan, problem: Problem, lengths: tuple[Tensor | None, ...], total_q: int, seqlen_k: int, device: torch.device
) -> tuple[tuple[Extra, ...], list[LaunchDescription]]:
    """What the mask's leaves read, in the order of its tree, and the launches that prepare it. See ``helpers.document_ranges``."""
    if not mask_tree.has_data(problem.mask):
        return (), []
    found: list[Extra] = []
    launches: list[LaunchDescription] = []
    for kind, tensors in _leaves(problem.mask):
        if kind != "document":
            found += [part for x in tensors for part in _table(_here(x, device))]
            continue
        ids = [_ids(x, problem.batch) for x in tensors]
        ranges, launch = helpers.document_ranges(plan, ids[0], ids[1], lengths, problem.batch, total_q, seqlen_k)
        found += [*_table(ids[0]), *_table(ids[1]), ranges]
        launches.append(launch)
    return tuple(found), launches


def _leaves(mask: Mask) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Each leaf that reads data, as what it is and the tensors that it reads."""
    if isinstance(mask, (And, Or)):
        yield from _leaves(mask.a)
        yield from _leaves(mask.b)
        return
    lowered, tensors = mask_tree.lower(mask)
    if isinstance(lowered, mask_tree.Opaque):
        yield lowered.text.partition("(")[0], tensors


def _here(x: Tensor, device: torch.device) -> Tensor:
    """A predicate's table on the device of the call; PyTorch, too, lets a single number lie on the host."""
    if x.device == device:
        return x
    if x.ndim == 0 and x.device.type == "cpu":
        return x.to(device, non_blocking=True)
    raise ValueError(f"mask predicate must read tensors on {device}, where q is, got one of shape {tuple(x.shape)} on {x.device}")


def _table(x: Tensor) -> tuple[Extra, ...]:
    return (x, *x.shape, *x.stride())


def _ids(x: Tensor, batch: int) -> Tensor:
    """Document ids (batch, seqlen), int32 or int64, side by side in a row."""
    x = x if x.dtype in (torch.int32, torch.int64) else x.int()
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.ndim == 2 else x.expand(batch, -1)
