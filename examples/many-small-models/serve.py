"""A model behind HTTP: `POST /` with a prompt answers with the most likely next tokens.

    python serve.py --port 8001 --gib 12

Nothing in it knows of gpumux. The weights are random, so that nothing must be downloaded: put your own model in their place.
"""

from __future__ import annotations

import argparse
import http.server
import json
import threading
import time

import torch

WIDTH, VOCABULARY = 4096, 32000


class Model(torch.nn.Module):
    """Feed-forward layers in half precision that fill so many GiB."""

    def __init__(self, gib: float) -> None:
        super().__init__()
        layer_bytes = 2 * WIDTH * 4 * WIDTH * 2
        count = max(1, round(gib * 2**30 / layer_bytes))
        half = {"device": "cuda", "dtype": torch.float16, "bias": False}
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, device="cuda", dtype=torch.float16)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH, **half), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH, **half)
            )
            for _ in range(count)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = self.embedding(tokens).mean(0)
        for layer in self.layers:
            state = torch.nn.functional.normalize(state + layer(state), dim=0)
        return self.embedding.weight @ state


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--gib", type=float, default=12.0)
    options = parser.parse_args()
    torch.manual_seed(options.port)
    model, lock = Model(options.gib).eval(), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"?"
            begin = time.monotonic()
            with lock, torch.no_grad():
                tokens = torch.tensor(list(prompt), device="cuda")
                best = model(tokens).float().topk(3).indices.tolist()
            body = json.dumps({"tokens": best, "ms": (time.monotonic() - begin) * 1e3}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    print(f"serving on port {options.port}", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
