"""The contract's accuracy rule for a forward's results."""

from __future__ import annotations

import torch

from tandem_attn.reference import dense
from tandem_attn.reference.compare import plainly
from tandem_attn.spec.inputs import Inputs
from tandem_attn.spec.problem import Problem


def assert_accurate(p: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Error against fp64 at most twice that of ``plainly``, and LSE to 1e-3 or 1e-6 of it.

    Everything is computed where the inputs lie, one sequence at a time, whose scores are in memory: float64 is fast on a data-centre GPU.
    """
    truth, truth_lse = dense.attention(p, inputs)
    plain = plainly(p, inputs)["out"]
    error, allowed = (out.double() - truth).abs(), (plain.double() - truth).abs()
    worst = torch.unravel_index(error.argmax(), error.shape) if error.numel() else ()
    at = tuple(int(i) for i in worst)
    message = f"worst at {at}: {out[at].item()} instead of {truth[at].item()}" if at else ""
    assert not out.isnan().any(), "O has NaN"
    assert error.norm() <= 2 * allowed.norm() + 1e-6, f"Frobenius error {error.norm():.3e}, plain {allowed.norm():.3e}; {message}"
    assert error.max() <= 2 * allowed.max() + 1e-3, f"largest error {error.max():.3e}, plain {allowed.max():.3e}; {message}"
    finite = truth_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite), "LSE is -inf elsewhere"
    wrong = (lse.double() - truth_lse)[finite].abs() > 1e-3 + 1e-6 * truth_lse[finite].abs()
    assert not wrong.any(), f"LSE {lse[finite][wrong][:3].tolist()} instead of {truth_lse[finite][wrong][:3].tolist()}"
