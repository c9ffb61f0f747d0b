"""Waiting for MMAs where several warpgroups share a warp partition."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper


@builtin
def wait(num_outstanding: Any, deps: Any, _semantic: Any = None) -> Any:
    """``warpgroup_mma_wait`` for the products of the own warpgroup only.

    Gluon's follows it with a barrier of the whole partition, for the case that a warpgroup reuses memory that another still reads. Here
    ``Channel`` sees to that. Triton's operation has an attribute for it, which Gluon's function does not offer.
    """
    out = hopper.warpgroup_mma_wait(num_outstanding, deps, _semantic=_semantic)
    first = out[0] if isinstance(out, tuple) else out
    first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return out
