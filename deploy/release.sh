#!/usr/bin/env bash
# Builds a release from a clean tag: for each processor a wheel, a .deb, an .rpm and a tarball, which need glibc 2.28 or newer;
# beside them SHA256SUMS and a bill of materials (CycloneDX).
#
#   deploy/release.sh --out DIR [--machines 'x86_64 aarch64'] [--profile dev] [--untagged]
#
# Needs Rust with a target for each machine (rustup target add aarch64-unknown-linux-gnu), zig and cargo-zigbuild, hatchling, auditwheel
# and twine (pip install cargo-zigbuild ziglang hatchling auditwheel twine), dpkg-deb, rpmbuild, and strip for each machine
# (binutils-aarch64-linux-gnu). Two builds of a commit with the same tools are equal. --untagged: of any commit, to try it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
# What manylinux_2_28 means.
oldest=2.28
out='' machines='x86_64 aarch64' profile=release untagged=''
while [ $# -gt 0 ]; do
  case $1 in
    --out | --machines | --profile)
      [ $# -gt 1 ] || { echo "release.sh: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    --untagged) untagged=1; shift ;;
    *) echo "release.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
[ -n "$out" ] || { echo "release.sh: --out DIR is missing" >&2; exit 2; }
mkdir -p "$out"
[ -z "$(ls -A "$out")" ] || { echo "release.sh: $out is not empty" >&2; exit 2; }
out=$(cd "$out" && pwd)
cd "$repository"

# All that is missing, at once.
own=$(uname -m)
case " $machines " in *" $own "*) ;; *) machines="$own $machines" ;; esac
missing=()
for program in cargo-zigbuild dpkg-deb rpmbuild auditwheel twine readelf; do
  command -v $program >/dev/null || missing+=("$program")
done
python3 -c 'import hatchling' 2>/dev/null || missing+=("hatchling of python3")
for machine in $machines; do
  target=$machine-unknown-linux-gnu
  [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || missing+=("Rust's library for $target (rustup target add $target)")
  [ "$machine" = "$own" ] || command -v "$machine-linux-gnu-strip" >/dev/null || missing+=("$machine-linux-gnu-strip")
done
if [ ${#missing[@]} -gt 0 ]; then
  printf 'release.sh: missing: %s\n' "${missing[@]}" >&2
  exit 1
fi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
if [ -z "$untagged" ]; then
  [ -z "$(git status --porcelain)" ] || { echo "release.sh: there are changes that are not committed" >&2; exit 1; }
  tag=$(git describe --exact-match --tags 2>/dev/null || echo none)
  [ "$tag" = "v$version" ] || { echo "release.sh: the tag of this commit is $tag, not v$version" >&2; exit 1; }
fi

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH CARGO_INCREMENTAL=0
# No path of this machine is in the programs.
export RUSTFLAGS="--remap-path-prefix=$repository=/gpumux --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
folder=$profile
[ "$profile" != dev ] || folder=debug
target_dir=${CARGO_TARGET_DIR:-target}
host=$target_dir/$own-unknown-linux-gnu/$folder/gpumux
# This machine's own first: it writes the man pages of the others.
for machine in "$own" ${machines//$own/}; do
  target=$machine-unknown-linux-gnu
  cargo zigbuild --locked --profile "$profile" --target "$target.$oldest" -p gpumux-cli -p gpumux-shim -p gpumux-emu-cuda
  built=$target_dir/$target/$folder
  needs=$("$here/elf.sh" glibc "$built/gpumux" "$built/libgpumux.so" "$built/libgpumux_emu.so")
  if [ "$(printf '%s\n' "$needs" $oldest | sort -V | tail -n 1)" != $oldest ]; then
    echo "release.sh: the programs for $machine need glibc $needs, newer than $oldest" >&2
    exit 1
  fi
  made=$("$host" --version | cut -d' ' -f2)
  [ "$made" = "$version" ] || { echo "release.sh: $host is of version $made, not $version" >&2; exit 1; }
  "$here/package.sh" --from "$built" --host "$host" --out "$out" --formats 'deb rpm tar wheel'
  # A second opinion: auditwheel reads the libraries itself.
  wheel=$(ls "$out"/*-manylinux_*_"$machine".whl)
  auditwheel show "$wheel" | tr '\n' ' ' | grep -q "consistent with the *following platform tag: *\"manylinux_${oldest/./_}_$machine\"" \
    || { echo "release.sh: auditwheel disagrees with the tag of $wheel:" >&2; auditwheel show "$wheel" >&2; exit 1; }
done
twine check --strict "$out"/*.whl
python3 "$here/sbom.py" > "$out/gpumux-$version.cdx.json"
sums=$(cd "$out" && sha256sum -- *)
echo "$sums" > "$out/SHA256SUMS"
ls -l "$out"
