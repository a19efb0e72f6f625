"""Train one linear layer per head, without a copy of the weights for every row of the batch.

``torch.matmul`` of x [n, heads, 1, d] and weights [heads, d, e] expands the weights to
[n, heads, d, e] if a gradient is required, and its backward pass makes a gradient of that
size too. ``alc.matmul`` folds the batch into rows instead, in both directions:

    return alc.matmul(x, self.weight) + self.bias

The layer is fitted to another one. Then the memory of a forward and backward pass is measured with
both functions, for several batch sizes.

    python examples/batched_linear.py --plot memory.png
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Keeps torch's profiler from reporting its own start and stop; read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.profiler import ProfilerActivity, profile

import arraylogchain as alc

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class BatchedLinear(torch.nn.Module):
    """One linear layer per head."""

    def __init__(self, heads: int, d: int, e: int, matmul: Matmul = alc.matmul) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(heads, d, e) / d**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(heads, 1, e))
        self.matmul = matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, heads, 1, e] for x [n, heads, 1, d]."""
        return self.matmul(x, self.weight) + self.bias


def train(layer: BatchedLinear, target: BatchedLinear, n: int, steps: int) -> list[float]:
    """Fit a layer to another one on random inputs; return the mean squared errors by step."""
    heads, d, _ = layer.weight.shape
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(n, heads, 1, d)
        with torch.no_grad():
            targets = target(x)
        loss = (layer(x) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def peak_bytes(layer: BatchedLinear, x: torch.Tensor) -> int:
    """Return the peak memory of torch during a forward and backward pass, without x.

    The profiler records every allocation on the CPU, including results and gradients.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        layer(x).square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in trace if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


class Outcome(NamedTuple):
    """Training errors, and peak bytes of a forward and backward pass by batch size."""

    losses: list[float]
    sizes: list[int]
    peaks: dict[str, list[int]]
    difference: float  # of the gradients of the weights, relative to the largest


def main(
    n: int = 2048,
    heads: int = 8,
    d: int = 64,
    e: int = 64,
    steps: int = 40,
    plot: str | None = None,
) -> Outcome:
    """Train with batches of 64; then measure the memory of batches of up to n."""
    torch.manual_seed(0)
    layer = BatchedLinear(heads, d, e)
    losses = train(layer, BatchedLinear(heads, d, e), 64, steps)
    print(f"mean squared error: {losses[0]:.3f} at first, {losses[-1]:.5f} after {steps} steps")

    plain = BatchedLinear(heads, d, e, torch.matmul)
    plain.load_state_dict(layer.state_dict())
    layers = {"alc.matmul": layer, "torch.matmul": plain}
    sizes = [n // 8, n // 4, n // 2, n]
    peaks: dict[str, list[int]] = {name: [] for name in layers}
    for size in sizes:
        x = torch.randn(size, heads, 1, d, requires_grad=True)
        for name, candidate in layers.items():
            candidate.zero_grad()
            x.grad = None
            peaks[name].append(peak_bytes(candidate, x))
    ours, theirs = layer.weight.grad, plain.weight.grad
    difference = float((ours - theirs).abs().max() / theirs.abs().max())

    print(f"forward and backward of ({n}, {heads}, 1, {d}) @ {tuple(layer.weight.shape)}:")
    for name, result in peaks.items():
        print(f"  {name:12} {result[-1] / 1e6:8.1f} MB")
    print(f"  gradients of the weights differ by {difference:.1e} of the largest")
    if plot:
        draw_peaks(sizes, peaks, plot)
    return Outcome(losses, sizes, peaks, difference)


def draw_peaks(sizes: list[int], peaks: dict[str, list[int]], path: str) -> None:
    """Plot memory against batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        title="Memory of a linear layer per head, forward and backward",
        xlabel="rows in the batch",
        ylabel="peak, MB",
    )
    for name, result in peaks.items():
        axes.loglog(sizes, [peak / 1e6 for peak in result], "o-", label=name)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="plot memory to this file")
    main(**vars(parser.parse_args()))
