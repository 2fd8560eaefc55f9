"""The pictures of docs/guides/divergences.md: python docs/build_pictures.py. Every number in them is computed here."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from kenpo.divergence import Divergence
from kenpo.ops.vocabulary import divergence

HERE = Path(__file__).resolve().parent / "pictures"
P, Q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.25, 0.5, 0.25]).double()


def direction() -> plt.Figure:
    """A student that can only be a bell over 40 tokens, fitted to a teacher with two peaks."""
    place = torch.arange(40).double()
    peaks = [(10, 2.0, 0.6), (28, 3.0, 0.4)]
    teacher = torch.stack([w * torch.exp(-((place - m) ** 2) / (2 * s * s)) / s for m, s, w in peaks]).sum(0)
    teacher = (teacher / teacher.sum()).log()
    figure, axis = plt.subplots(figsize=(7, 3.2), dpi=110)
    axis.fill_between(place, teacher.exp(), color="0.85", label="teacher")
    for kind in ("forward", "reverse", "jsd"):
        shape = torch.tensor([14.0, math.log(2.5)], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([shape], lr=0.05)
        for _ in range(2500):
            optimizer.zero_grad()
            logits = -((place - shape[0]) ** 2) / (2 * (2 * shape[1]).exp())
            divergence(logits[None], teacher[None], Divergence(kind)).sum().backward()
            optimizer.step()
        axis.plot(
            place,
            logits.detach().softmax(-1),
            label={"forward": "forward KL(q‖p)", "reverse": "reverse KL(p‖q)", "jsd": "JSD ½"}[kind],
        )
    axis.set_xlabel("token")
    axis.set_ylabel("probability")
    axis.legend(fontsize=8)
    return figure


def estimator() -> plt.Figure:
    """The expected logit gradient of each estimator on the sampled token, enumerated over three tokens."""
    g = (Q / P).log()
    coefficient = {
        "k1 sent backward": torch.ones(3).double(),
        "k2 sent backward": -g,
        "k3 sent backward": 1 - g.exp(),
        "score function, A = g": -g,
        "score function, A = −k3": g.exp() - 1 - g,
    }
    figure, axis = plt.subplots(figsize=(7, 3.2), dpi=110)
    for number, (name, c) in enumerate(coefficient.items()):
        gradient = P * (c - (P * c).sum())
        axis.bar(torch.arange(3).numpy() + 0.16 * (number - 2), gradient, 0.15, label=name)
    for target, line in ((P - Q, ":"), (P * ((P / Q).log() - (P * (P / Q).log()).sum()), "--")):
        for token in range(3):
            axis.plot([token - 0.42, token + 0.42], [target[token]] * 2, line, color="k", linewidth=1)
    axis.set_xticks(range(3), ["p .7, q .25", "p .2, q .5", "p .1, q .25"])
    axis.set_ylabel("expected gradient of the logit")
    axis.legend(fontsize=7)
    return figure


def temperature() -> plt.Figure:
    """Size of the gradient of each divergence when both models' logits are divided by T."""
    temperatures = torch.linspace(0.3, 4, 80).double()
    figure, axis = plt.subplots(figsize=(7, 3.2), dpi=110)
    for kind in ("forward", "reverse", "jsd"):
        sizes = []
        for t in temperatures:
            x = P.log()[None].clone().requires_grad_()
            divergence(x, Q.log()[None], Divergence(kind), float(t)).sum().backward()
            sizes.append(float(x.grad.norm()))
        axis.plot(temperatures, sizes, label=kind)
    axis.set_xlabel("temperature of both models")
    axis.set_ylabel("norm of the logits' gradient")
    axis.legend(fontsize=8)
    return figure


def support() -> plt.Figure:
    """Reverse KL on the student's top K of 200 tokens, by what becomes of the rest."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, 200, generator=g).double() * 2 for _ in range(2))
    tops = [1, 2, 5, 10, 20, 50, 100, 150, 199, 200]
    figure, axis = plt.subplots(figsize=(7, 3.2), dpi=110)
    for rest in ("tail", "renormalised", "generalised"):
        values = [float(divergence(p, q, Divergence("reverse", top=k, rest=rest))) for k in tops]
        axis.plot(tops, values, "o-", markersize=3, label=rest)
    x, y = p.log_softmax(-1)[0], q.log_softmax(-1)[0]
    order = x.argsort(descending=True)
    truncated = [float((x[order[:k]].exp() * (x - y)[order[:k]]).sum()) for k in tops]
    axis.plot(tops, truncated, "x--", color="0.5", label="truncated (no divergence, not offered)")
    axis.axhline(0, color="k", linewidth=0.5)
    axis.set_xscale("log")
    axis.set_xlabel("K")
    axis.set_ylabel("nats")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for make in (direction, estimator, temperature, support):
        figure = make()
        figure.tight_layout()
        figure.savefig(HERE / f"{make.__name__}.png", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
