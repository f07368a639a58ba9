#!/usr/bin/env bash
# Puts all that benchmarks and tests need on a GPU machine without Rust into one folder:
#   bench/bundle.sh [FOLDER]        (default: .bundle)
# There: GPUMUX=FOLDER/bin/gpumux python3 bench/colocation.py …
#        GPUMUX_BIN_DIR=FOLDER/bin GPUMUX_CUDA_PROGRAMS=FOLDER/cuda GPUMUX_TEST_REAL=1 FOLDER/tests/NAME --test-threads=1
#        FOLDER/fidelity [--no-real]      the report of bench/fidelity.py, with bench/ beside FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.bundle}
target=${CARGO_TARGET_DIR:-target}

cargo build --release --workspace --locked
rm -rf "$out"
mkdir -p "$out/bin" "$out/tests"
for file in gpumux libgpumux.so libgpumux_emu.so; do
  strip -o "$out/bin/$file" "$target/release/$file"
done

# Cargo names each test executable in a line of JSON.
cargo test --release --locked -p gpumux-tests --no-run --message-format=json |
  python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and "test" in message["target"]["kind"]:
        print(message["target"]["name"], message["executable"])
' | while read -r name executable; do
  strip -o "$out/tests/$name" "$executable"
  # CUDA programs: compiled here, by the compiler that the tests get for themselves.
  if [ "$name" = e2e ]; then
    GPUMUX_COPY_CUDA_PROGRAMS=$(realpath "$out")/cuda "$executable" --exact cuda::all_programs_compile < /dev/null
    find "$out/cuda" -maxdepth 1 -name "*-13.*" -exec strip {} +
  fi
done

cat > "$out/fidelity" <<'END'
#!/usr/bin/env bash
# What of the emulated device is true on this machine's GPU: bench/fidelity.py with the programs of this bundle.
bundle=$(cd "$(dirname "$0")" && pwd)
export GPUMUX_BIN_DIR=$bundle/bin GPUMUX_CUDA_PROGRAMS=$bundle/cuda GPUMUX_COMMIT=$(cat "$bundle/commit")
exec python3 "$bundle/../bench/fidelity.py" --real --tests "$bundle/tests/e2e" "$@"
END
chmod +x "$out/fidelity"

git rev-parse --short HEAD > "$out/commit"
du -sh "$out"
