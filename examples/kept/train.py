"""Training with PyTorch that goes on from device memory after a neighbour's fault: it reads no checkpoint.

    gpumux run --trust team --class batch --restart on-collateral --keep-memory -- python examples/kept/train.py
"""

from __future__ import annotations

import argparse
import time

import torch

import gpumux.kept


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    """An optimizer that has its state before its first step, on the device: so it can be kept, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def main() -> None:
    """Trains until it is ended."""
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(options.width, options.width, device="cuda") for _ in range(options.layers)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
    optimizer = optimizer_of(model)
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = gpumux.kept.tensors("train", [*model.parameters(), *states])
    torch.cuda.synchronize()
    how = "from device memory" if kept.found else "from nothing"
    print(f"step {kept.step}, {how}, {time.monotonic() - began:.2f} s after the imports", flush=True)
    for step in range(kept.step + 1, options.steps + 1):
        torch.manual_seed(step)
        batch = torch.randn(256, options.width, device="cuda")
        loss = torch.nn.functional.mse_loss(model(batch), batch.flip(1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        kept.commit(step, torch.cuda.current_stream().cuda_stream)
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
