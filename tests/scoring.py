"""Short ways to score with a model that is used once: for tests that need no scorer of their own."""

from kenpo.models.scorer import Scorer


def policy_terms(model, rollouts, *, temperature, want=frozenset(), reference=None, **how):
    """`Scorer.graph` of a new scorer; ``logp`` is always wanted. ``reference`` is a model or a scorer."""
    scorer = scorer_of(model, temperature=temperature, reference=reference, **how)
    return scorer.graph(rollouts, frozenset(want) | {"logp"})


def policy_backward(
    model, rollouts, coefficients, *, temperature, want=frozenset(), reference=None, packing="auto", **how
):
    """`Scorer.backward` of a new scorer; ``logp`` is always wanted."""
    scorer = scorer_of(model, temperature=temperature, reference=reference, packing=packing)
    scorer.backward(rollouts, coefficients, frozenset(want) | {"logp"}, **how)


def scorer_of(model, *, temperature=1.0, reference=None, **how):
    """A scorer of `model`; a reference that is a plain model becomes one too."""
    if reference is not None and not isinstance(reference, Scorer):
        reference = Scorer(reference, temperature=temperature)
    return Scorer(model, temperature=temperature, reference=reference, **how)
