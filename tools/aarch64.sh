#!/usr/bin/env bash
# Tests the library's assembly for aarch64 on another machine, with an emulated processor: its unit tests, then a program that
# reaches the driver in each of three ways, all of whose calls must be hooked.
#
# Needs `rustup target add aarch64-unknown-linux-gnu`, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
emulator=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
missing=()
for program in aarch64-linux-gnu-gcc qemu-aarch64; do
  command -v $program >/dev/null || missing+=("$program")
done
[ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || missing+=("Rust's library for $target")
if [ ${#missing[@]} -gt 0 ]; then
  printf 'aarch64.sh: missing: %s\n' "${missing[@]}" >&2
  exit 1
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="${emulator[*]}"
cargo test --locked --target $target -p gpumux-shim --lib
cargo build --locked --target $target -p gpumux-shim --lib --examples
built=${CARGO_TARGET_DIR:-$PWD/target}/$target/debug
libraries=$(mktemp -d)
trap 'rm -rf "$libraries"' EXIT
ln -s "$built/examples/libfake_cuda.so" "$libraries/libcuda.so.1"
for way in dlsym proc linked; do
  calls=$(printf '%s\n' 'context c' 'stream s' 'launch s' 'finish s' 'sync s' \
    | timeout 60 "${emulator[@]}" -E "LD_LIBRARY_PATH=$libraries" -E GPUMUX_TRACE=calls \
      -E "LD_PRELOAD=$built/examples/libfake_rm.so:$built/libgpumux.so" "$built/examples/cuda_app" $way 2>&1)
  for call in cuCtxCreate_v2 cuStreamCreate cuLaunchKernel cuStreamSynchronize; do
    case $calls in
      *"call: $call("*) ;;
      *) printf 'aarch64.sh: by %s, %s is not hooked:\n%s\n' $way $call "$calls" >&2; exit 1 ;;
    esac
  done
  echo "ok: all calls of a program that reaches the driver by $way are hooked"
done
