"""Train the forum's model: an nn.Module whose forward is a chain of matrices in log space.

The user multiplied n stacks of v - 1 matrices in pairs, which took gigabytes. Here the forward is

    bulk = self.bulk.softmax(-1)  # [1, t, v-1, c, c], probabilities
    p0 = self.p0.softmax(-1)  # [1, t, c]
    return alc.LogChain(x, transitions=bulk, initial=p0).log_partition()  # [n, t]

and is differentiable. Its gradients with respect to ``x``, ``bulk`` and ``p0`` come from one
backward recursion over vectors of c numbers a row.

The data are drawn from a chain of hidden states that is known, one matrix for each step, and so is
the table that says how likely a state shows each symbol. The log weights are read off that table,
``x[..., i, k] = log p(symbol at step i | state k)``, the result is the log-likelihood, and training
finds the matrices.

    python examples/forum_model.py --plot loss.png
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

import arraylogchain as alc


class ForumModel(torch.nn.Module):
    """The forum's model, with parameters that softmax makes probabilities."""

    def __init__(self, t: int, v: int, c: int) -> None:
        super().__init__()
        # All equal: it is the data that tell the states apart, as what they show is known.
        self.bulk = torch.nn.Parameter(torch.zeros(1, t, v - 1, c, c))
        self.p0 = torch.nn.Parameter(torch.zeros(1, t, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log(p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}), [n, t], for x [n, t, v, c]."""
        bulk = self.bulk.softmax(-1)
        p0 = self.p0.softmax(-1)
        return alc.LogChain(x, transitions=bulk, initial=p0).log_partition()


class Truth(NamedTuple):
    """What the data are drawn from."""

    bulk: torch.Tensor  # [v-1, c, c]
    p0: torch.Tensor  # [c]
    emission: torch.Tensor  # [c, symbols]


def random_truth(v: int, c: int, symbols: int) -> Truth:
    """Draw transitions that prefer some states, and symbols that mostly tell the state."""
    return Truth(
        bulk=(1.5 * torch.randn(v - 1, c, c)).softmax(-1),
        p0=torch.randn(c).softmax(-1),
        emission=(3 * torch.randn(c, symbols)).softmax(-1),
    )


def draw(truth: Truth, n: int) -> torch.Tensor:
    """Return the symbols that n sequences of hidden states show, [n, v]."""
    state = torch.multinomial(truth.p0, n, replacement=True)
    symbols = [torch.multinomial(truth.emission[state], 1)[:, 0]]
    for matrix in truth.bulk:
        state = torch.multinomial(matrix[state], 1)[:, 0]
        symbols.append(torch.multinomial(truth.emission[state], 1)[:, 0])
    return torch.stack(symbols, -1)


class Outcome(NamedTuple):
    """What training led to; losses are negative log-likelihoods per sequence."""

    losses: list[float]
    true_loss: float  # of the probabilities that the data were drawn from
    error: float  # mean distance of a learned transition probability from the true one
    error_at_start: float


def main(
    n: int = 2000, v: int = 20, c: int = 4, steps: int = 120, plot: str | None = None
) -> Outcome:
    """Draw n sequences of v symbols, train the model on them, and compare it with the truth."""
    torch.manual_seed(0)
    truth = random_truth(v, c, symbols=3 * c)
    symbols = draw(truth, n)
    x = truth.emission.log().T[symbols].unsqueeze(1)  # [n, t, v, c] with t = 1

    model = ForumModel(1, v, c)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = -model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    chain = alc.LogChain(x, transitions=truth.bulk[None, None], initial=truth.p0[None, None])
    true_loss = -chain.log_partition().mean().item()
    learned = model.bulk.detach().softmax(-1)[0, 0]
    error = (learned - truth.bulk).abs().mean().item()
    error_at_start = (1 / c - truth.bulk).abs().mean().item()

    print(f"loss per sequence: {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    print(f"loss of the true probabilities: {true_loss:.3f}")
    print(f"mean error of a probability: {error_at_start:.3f} at first, {error:.3f} at last")
    print("last matrix, learned and true:")
    print(torch.cat([learned[-1], truth.bulk[-1]], -1).numpy().round(2))
    if plot:
        draw_losses(losses, true_loss, plot)
    return Outcome(losses, true_loss, error, error_at_start)


def draw_losses(losses: list[float], true_loss: float, path: str) -> None:
    """Write a picture of the loss at each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        title="Training the forum's model",
        xlabel="step",
        ylabel="negative log-likelihood per sequence",
    )
    axes.plot(losses, label="model")
    axes.axhline(true_loss, color="gray", linestyle="--", label="true probabilities")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the loss")
    main(**vars(parser.parse_args()))
