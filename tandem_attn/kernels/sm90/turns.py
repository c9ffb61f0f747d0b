"""Ping-pong: consumers issue their products in turns, each told by the one before through a hardware barrier."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem_attn.kernels.common import ptx

THREADS = gl.constexpr(256)  # the consumer that waits and the one before it


@gluon.constexpr_function
def takes_turns(plan):
    return plan.ping_pong and plan.q_stages > 1


@gluon.jit
def open_turns(plan: gl.constexpr, index: gl.constexpr):
    """The last consumer lets the first one begin."""
    if takes_turns(plan):
        if index == plan.q_stages - 1:
            ptx.named_arrive(0, THREADS)


@gluon.jit
def take(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        ptx.named_sync(index, THREADS)


@gluon.jit
def pass_on(plan: gl.constexpr, index: gl.constexpr):
    if takes_turns(plan):
        ptx.named_arrive((index + 1) % plan.q_stages, THREADS)


@gluon.jit
def close_turns(plan: gl.constexpr, index: gl.constexpr):
    """The first consumer takes the turn that the last one left over."""
    if takes_turns(plan):
        if index == 0:
            ptx.named_sync(0, THREADS)
