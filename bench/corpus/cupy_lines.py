"""Operations of CuPy, each compared with NumPy. Prints a line for each: its name and right, wrong or refused.

    python cupy_lines.py [FIRST]     # begins at the line of that number; ends after the first that is refused
"""

import sys

import cupy as cp
import numpy as np

rng = np.random.default_rng(1)
X = rng.random(3000).astype(np.float32)
Y = rng.random(3000)
I = rng.integers(-50, 50, 3000).astype(np.int32)
M = rng.random((40, 30))

LINES = {
    "add": (lambda m, x, y, i, a: x + x),
    "multiply-add in double": (lambda m, x, y, i, a: y * 3 + y),
    "transcendental": (lambda m, x, y, i, a: m.sin(x) * m.exp(x)),
    "divide and remainder": (lambda m, x, y, i, a: i // 7 + i % 7),
    "half": (lambda m, x, y, i, a: x.astype(m.float16) + x.astype(m.float16)),
    "complex": (lambda m, x, y, i, a: (y + 1j * y) * (y - 2j)),
    "where": (lambda m, x, y, i, a: m.where(x > 0.5, x, -x)),
    "sum f32": (lambda m, x, y, i, a: x.sum()),
    "sum f64": (lambda m, x, y, i, a: y.sum()),
    "sum int": (lambda m, x, y, i, a: i.sum()),
    "sum axis 0": (lambda m, x, y, i, a: a.sum(axis=0)),
    "sum axis 1": (lambda m, x, y, i, a: a.sum(axis=1)),
    "max": (lambda m, x, y, i, a: x.max()),
    "argmax": (lambda m, x, y, i, a: x.argmax()),
    "mean and deviation": (lambda m, x, y, i, a: y.mean() + y.std()),
    "product": (lambda m, x, y, i, a: (1 + x[:50]).prod()),
    "any and all": (lambda m, x, y, i, a: (x > 0.5).any() & (x >= 0).all()),
    "cumulative sum": (lambda m, x, y, i, a: m.cumsum(y)),
    "cumulative sum int": (lambda m, x, y, i, a: m.cumsum(i)),
    "cumulative product": (lambda m, x, y, i, a: m.cumprod(1 + x[:50])),
    "nonzero": (lambda m, x, y, i, a: m.nonzero(i)[0]),
    "mask": (lambda m, x, y, i, a: x[x > 0.5]),
    "take": (lambda m, x, y, i, a: x[abs(i)]),
    "bincount": (lambda m, x, y, i, a: m.bincount(abs(i))),
    "histogram": (lambda m, x, y, i, a: m.histogram(x, bins=10)[0]),
    "search": (lambda m, x, y, i, a: m.searchsorted(m.linspace(0, 1, 20), y)),
    "transpose": (lambda m, x, y, i, a: m.ascontiguousarray(a.T)),
    "concatenate": (lambda m, x, y, i, a: m.concatenate([x, x])),
    "clip": (lambda m, x, y, i, a: m.clip(i, -10, 10)),
    "sort": (lambda m, x, y, i, a: m.sort(x)),
    "argsort": (lambda m, x, y, i, a: m.argsort(y)),
    "unique": (lambda m, x, y, i, a: m.unique(i)),
    "matrix product": (lambda m, x, y, i, a: a @ a.T),
    "transform": (lambda m, x, y, i, a: m.fft.fft(y)),
    "solve": (lambda m, x, y, i, a: m.linalg.solve(a[:30] + 30 * m.eye(30), a[0])),
}


def one(of):
    try:
        found = of(cp, cp.asarray(X), cp.asarray(Y), cp.asarray(I), cp.asarray(M)).get()
    except Exception as error:  # whatever it is: the program has been told
        return f"refused {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    expected = of(np, X, Y, I, M)
    tolerance = 1e-2 if found.dtype == np.float16 else 1e-4
    same = found.shape == np.shape(expected) and np.allclose(found, expected, rtol=tolerance)
    return "right" if same else "wrong"


first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
for name, of in list(LINES.items())[first:]:
    result = one(of)
    print(f"{name}\t{result}", flush=True)
    if result.startswith("refused"):
        break
