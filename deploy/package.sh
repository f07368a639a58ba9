#!/usr/bin/env bash
# Makes gpumux_VERSION_ARCH.deb and gpumux-VERSION-ARCH.tar.gz from what cargo has built.
#
#   cargo build --release --workspace && deploy/package.sh            into target/package
#   deploy/package.sh --from target/debug --out /tmp/out --fast       (--fast: hardly compressed)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
from=$repository/target/release out=$repository/target/package xz=-Zxz gzip=-9
while [ $# -gt 0 ]; do
  case $1 in
    --from) from=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --fast) xz='-Zgzip -z1' gzip=-1; shift ;;
    *) echo "package.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
for file in gpumux libgpumux.so libgpumux_emu.so; do
  [ -f "$from/$file" ] || { echo "package.sh: $from/$file is missing: run cargo build --release --workspace" >&2; exit 1; }
done
version=$("$from/gpumux" --version | cut -d' ' -f2)
machine=$(uname -m)
case $machine in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; *) arch=$machine ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# The tree below the prefix, the same for both.
tree=$work/tree
put() { install -D -m "$1" "$2" "$3"; }
put 755 "$from/gpumux" "$tree/bin/gpumux"
for library in libgpumux.so libgpumux_emu.so; do put 644 "$from/$library" "$tree/lib/gpumux/$library"; done
strip --strip-debug "$tree/bin/gpumux" "$tree"/lib/gpumux/* 2>/dev/null || true
for place in system user; do
  unit=$here/systemd/gpumuxd.service
  [ $place = system ] || unit=$here/systemd/user/gpumuxd.service
  put 644 "$unit" "$tree/lib/systemd/$place/gpumuxd.service"
done
share=$tree/share
"$from/gpumux" man "$work/man"
for page in "$work"/man/*.1; do
  mkdir -p "$share/man/man1"
  gzip -n9 < "$page" > "$share/man/man1/$(basename "$page").gz"
done
shell() { mkdir -p "$(dirname "$2")"; "$from/gpumux" completions "$1" > "$2"; }
shell bash "$share/bash-completion/completions/gpumux"
shell zsh "$share/zsh/vendor-completions/_gpumux"
shell fish "$share/fish/vendor_completions.d/gpumux.fish"
put 644 "$repository/LICENSE" "$share/doc/gpumux/copyright"
put 644 "$here/grafana.json" "$share/doc/gpumux/grafana.json"
put 644 "$here/alerts.yml" "$share/doc/gpumux/alerts.yml"
put 644 "$here/gpumux.toml" "$share/doc/gpumux/gpumux.toml"
gzip -n9 < "$repository/CHANGELOG.md" > "$share/doc/gpumux/changelog.gz"

# The tarball.
name=gpumux-$version-$machine
mkdir "$work/$name"
cp -R "$tree"/. "$work/$name/"
put 755 "$here/install.sh" "$work/$name/install.sh"
tar -C "$work" --owner=0 --group=0 --sort=name -c "$name" | gzip -n $gzip > "$out/$name.tar.gz"
echo "$out/$name.tar.gz"

# The Debian package.
command -v dpkg-deb >/dev/null || { echo "package.sh: no dpkg-deb: no .deb is made" >&2; exit 0; }
root=$work/root
mkdir -p "$root/usr" "$root/DEBIAN"
cp -R "$tree"/. "$root/usr/"
put 644 "$here/gpumux.toml" "$root/etc/gpumux/gpumux.toml"
echo /etc/gpumux/gpumux.toml > "$root/DEBIAN/conffiles"
# The newest C library's interface that the programs use.
glibc=$(cat "$tree/bin/gpumux" "$tree"/lib/gpumux/* | grep -aoE 'GLIBC_2\.[0-9]+' | sort -uV | tail -n 1)
cat > "$root/DEBIAN/control" <<END
Package: gpumux
Version: $version
Architecture: $arch
Maintainer: The gpumux developers <gpumux@localhost>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: libc6 (>= ${glibc#GLIBC_}), libgcc-s1
Section: admin
Priority: optional
Description: share GPUs between unmodified programs
 Many programs share one NVIDIA GPU the way processes share a CPU: each gets what
 it was promised, idle capacity goes to whoever can use it, and an urgent one
 takes the GPU back at once. Works on the stock driver.
END
for script in postinst prerm postrm; do put 755 "$here/debian/$script" "$root/DEBIAN/$script"; done
dpkg-deb --root-owner-group $xz --build "$root" "$out/gpumux_${version}_$arch.deb" >/dev/null
echo "$out/gpumux_${version}_$arch.deb"
