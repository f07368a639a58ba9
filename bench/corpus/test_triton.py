"""Kernels of Triton, of the shapes of its tutorials, each compared with NumPy. CuPy has the memory and launches them."""

import cupy
import numpy
import pytest
import triton
import triton.language as tl
from cupy.cuda.function import Module
from triton.backends.compiler import GPUTarget

NAMES = {"float32": "fp32", "float16": "fp16", "float64": "fp64", "int32": "i32", "int64": "i64", "int8": "i8"}


def launch(kernel, grid, arguments, warps=4, **constants):
    """Compiles for an H100, and runs."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr")
    for name, value in zip(names, arguments, strict=True):
        array = isinstance(value, cupy.ndarray)
        signature[name] = f"*{NAMES[value.dtype.name]}" if array else NAMES[numpy.asarray(value).dtype.name]
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, positions)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    module = Module()
    module.load(made.asm["cubin"])
    # Behind the arguments there are two pointers to memory that Triton wants of its launcher: none is asked for.
    scratch = [numpy.uint64(0), numpy.uint64(0)]
    function = module.get_function(made.metadata.name)
    function(grid, (32 * warps, 1, 1), [*arguments, *scratch], shared_mem=made.metadata.shared)
    cupy.cuda.get_current_stream().synchronize()


def numbers(*shape, dtype=numpy.float32):
    return numpy.random.default_rng(1).random(shape).astype(dtype)


@triton.jit
def add(x, y, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64", "int8"])
def test_add(dtype):
    x = (numbers(1000) * 50).astype(dtype)
    out = cupy.zeros(1000, dtype)
    launch(add, (4, 1, 1), [cupy.asarray(x), cupy.asarray(x[::-1].copy()), out, numpy.int32(1000)], SIZE=256)
    numpy.testing.assert_array_equal(out.get(), x + x[::-1])


@triton.jit
def softmax(x, out, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
    top = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + tl.program_id(0) * columns + at, top / tl.sum(top, axis=0), mask=at < columns)


def test_softmax():
    x = numbers(7, 300)
    out = cupy.zeros_like(cupy.asarray(x))
    launch(softmax, (7, 1, 1), [cupy.asarray(x), out, numpy.int32(300)], SIZE=512)
    expected = numpy.exp(x) / numpy.exp(x).sum(axis=1, keepdims=True)
    numpy.testing.assert_allclose(out.get(), expected, rtol=1e-5)


@triton.jit
def norm(x, scale, out, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=0.0)
    mean = tl.sum(row, axis=0) / columns
    apart = tl.where(at < columns, row - mean, 0.0)
    spread = tl.sqrt(tl.sum(apart * apart, axis=0) / columns + 1e-5)
    tl.store(out + tl.program_id(0) * columns + at, apart / spread * tl.load(scale + at, mask=at < columns), mask=at < columns)


def test_layer_norm():
    x, scale = numbers(5, 200), numbers(200)
    out = cupy.zeros((5, 200), "f")
    launch(norm, (5, 1, 1), [cupy.asarray(x), cupy.asarray(scale), out, numpy.int32(200)], SIZE=256)
    expected = (x - x.mean(1, keepdims=True)) / numpy.sqrt(x.var(1, keepdims=True) + 1e-5) * scale
    numpy.testing.assert_allclose(out.get(), expected, rtol=1e-4, atol=1e-5)


@triton.jit
def product(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = rows * N + columns
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_matrix_product(precision):
    a, b = numbers(32, 32), numbers(32, 32).T.copy()
    out = cupy.zeros((32, 32), "f")
    launch(product, (1, 1, 1), [cupy.asarray(a), cupy.asarray(b), out], N=32, PRECISION=precision)
    numpy.testing.assert_allclose(out.get(), a @ b, rtol=1e-5 if precision == "ieee" else 1e-2)


@triton.jit
def scan(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.cumsum(tl.load(x + at), axis=0))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_cumulative_sum(dtype):
    x = (numbers(512) * 50).astype(dtype)
    out = cupy.zeros(512, dtype)
    launch(scan, (1, 1, 1), [cupy.asarray(x), out], SIZE=512)
    numpy.testing.assert_allclose(out.get(), numpy.cumsum(x), rtol=1e-4)


@triton.jit
def order(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.sort(tl.load(x + at)))


def test_sort():
    x = numbers(128)
    out = cupy.zeros(128, "f")
    launch(order, (1, 1, 1), [cupy.asarray(x), out], SIZE=128)
    numpy.testing.assert_array_equal(out.get(), numpy.sort(x))


@triton.jit
def count(x, bins, SIZE: tl.constexpr):
    value = tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE))
    tl.atomic_add(bins + value, 1)


def test_atomics():
    x = (numbers(1024) * 16).astype("int32")
    bins = cupy.zeros(16, "int32")
    launch(count, (4, 1, 1), [cupy.asarray(x), bins], SIZE=256)
    numpy.testing.assert_array_equal(bins.get(), numpy.bincount(x, minlength=16))


@triton.jit
def extremes(x, out, SIZE: tl.constexpr):
    row = tl.load(x + tl.arange(0, SIZE))
    tl.store(out, tl.argmax(row, axis=0))
    tl.store(out + 1, tl.argmin(row, axis=0))


def test_argmax_and_argmin():
    x = numbers(1024)
    out = cupy.zeros(2, "int32")
    launch(extremes, (1, 1, 1), [cupy.asarray(x), out], SIZE=1024)
    numpy.testing.assert_array_equal(out.get(), [x.argmax(), x.argmin()])


@triton.jit
def turn(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    block = tl.load(x + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(out + columns[:, None] * ROWS + rows[None, :], tl.trans(block))


def test_transpose():
    x = numbers(32, 64)
    out = cupy.zeros((64, 32), "f")
    launch(turn, (1, 1, 1), [cupy.asarray(x), out], ROWS=32, COLUMNS=64)
    numpy.testing.assert_array_equal(out.get(), x.T)


@triton.jit
def draw(out, seed, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.rand(seed, at))


def test_random_numbers():
    out = cupy.zeros(1024, "f")
    launch(draw, (1, 1, 1), [out, numpy.int32(7)], SIZE=1024)
    found = out.get()
    assert (0 <= found).all() and (found < 1).all() and abs(found.mean() - 0.5) < 0.05
    assert len(numpy.unique(found)) > 1000
