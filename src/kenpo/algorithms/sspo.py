"""SSPO — Soft Sequence Policy Optimization (arXiv:2602.19327, first version).

SAPO fades each token out with a smooth gate; GMPO pools a response by the geometric mean. SSPO does both: the geometric
mean of the gates stands for the response.

    w_i = (Π_t f(r_it))^(1/n_i),   f(r) = (4/τ) σ(τ(r−1)),   J = (1/N) Σ_i w_i A_i,   τ = 1.0 where A > 0, else 1.05

From SAPO: ``pool="geometric"``. Later versions of the paper report a gate on the log-ratio by the arctangent; its
formula is not public. `sspo-arctan` is a gate of ours with the reported properties, not the paper's:
log f = atan(κ log r)/κ. The name is also that of a sub-sentence method (arXiv:2511.04256), unrelated.
"""

from kenpo.algorithms.sapo import SAPO
from kenpo.stages import ArctanGate, SoftGate

SSPO = SAPO.but(
    name="sspo",
    source="arXiv:2602.19327",
    surrogate=SoftGate(tau_pos=1.0, tau_neg=1.05, pool="geometric"),
)

SSPO_ARCTAN = SSPO.but(name="sspo-arctan", status="reconstruction", surrogate=ArctanGate(kappa=1.0))
