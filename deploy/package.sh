#!/usr/bin/env bash
# Makes packages from what cargo has built: a .deb, an .rpm, a tarball and a Python wheel.
#
#   cargo build --release --workspace && deploy/package.sh            into target/package
#   deploy/package.sh --formats 'deb tar' --from target/debug --out /tmp/out --fast       (--fast: hardly compressed)
#
# A .deb needs dpkg-deb, an .rpm rpmbuild, a wheel python3 with hatchling; by default, the formats whose tools are here.
# --host: see tree.sh. SOURCE_DATE_EPOCH: the time that the files get, that of the last commit by default.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
from=$repository/target/release out=$repository/target/package formats='' host='' fast=''
while [ $# -gt 0 ]; do
  case $1 in
    --from | --out | --formats | --host)
      [ $# -gt 1 ] || { echo "package.sh: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    --fast) fast=1; shift ;;
    *) echo "package.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
tool() {
  case $1 in
    tar) command -v tar ;;
    deb) command -v dpkg-deb ;;
    rpm) command -v rpmbuild ;;
    wheel) python3 -c 'import hatchling' 2>/dev/null ;;
    *) echo "package.sh: unknown format $1: deb, rpm, tar or wheel" >&2; exit 2 ;;
  esac
} >/dev/null
if [ -z "$formats" ]; then
  for format in deb rpm tar wheel; do
    if tool $format; then formats="$formats $format"; else echo "package.sh: the tool for a $format is missing: none is made" >&2; fi
  done
else
  for format in $formats; do tool "$format" || { echo "package.sh: the tool for a $format is missing" >&2; exit 1; }; done
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
out=$(cd "$out" && pwd)
: "${SOURCE_DATE_EPOCH:=$(git -C "$repository" log -1 --format=%ct 2>/dev/null || date +%s)}"
export SOURCE_DATE_EPOCH

tree=$work/tree
"$here/tree.sh" --from "$from" --to "$tree" ${host:+--host "$host"}
programs=("$tree/bin/gpumux" "$tree"/lib/gpumux/*)
version=$("${host:-$from/gpumux}" --version | cut -d' ' -f2)
machine=$("$here/elf.sh" machine "$tree/bin/gpumux")
glibc=$("$here/elf.sh" glibc "${programs[@]}")
same_time() { find "$1" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +; }

make_tar() {
  local name=gpumux-$version-$machine gzip=-9
  cp -R "$tree" "$work/$name"
  install -m 755 "$here/install.sh" "$work/$name/install.sh"
  same_time "$work/$name"
  [ -z "$fast" ] || gzip=-1
  tar -C "$work" --owner=0 --group=0 --sort=name -c "$name" | gzip -n $gzip > "$out/$name.tar.gz"
  echo "$out/$name.tar.gz"
}

# What both kinds of system packages have: the tree in /usr, and the configuration.
system_tree() {
  mkdir -p "$1/usr"
  cp -R "$tree"/. "$1/usr/"
  install -D -m 644 "$here/gpumux.toml" "$1/etc/gpumux/gpumux.toml"
}

make_deb() {
  local arch=amd64 root=$work/deb xz=-Zxz gcc=''
  [ "$machine" = x86_64 ] || arch=arm64
  [ -z "$fast" ] || xz='-Zgzip -z1'
  system_tree "$root"
  # Where all of Debian's Python 3 versions look.
  mkdir -p "$root/usr/lib/python3/dist-packages" "$root/DEBIAN"
  mv "$root/usr/share/gpumux/python/gpumux" "$root/usr/lib/python3/dist-packages/gpumux"
  rm -r "$root/usr/share/gpumux"
  mv "$root/usr/share/zsh/site-functions" "$root/usr/share/zsh/vendor-completions"
  echo /etc/gpumux/gpumux.toml > "$root/DEBIAN/conffiles"
  ! "$here/elf.sh" needed "${programs[@]}" | grep -q libgcc_s || gcc=', libgcc-s1'
  cat > "$root/DEBIAN/control" <<END
Package: gpumux
Version: $version
Architecture: $arch
Maintainer: The gpumux developers <gpumux@localhost>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: libc6 (>= $glibc)$gcc
Suggests: python3
Section: admin
Priority: optional
Description: share GPUs between unmodified programs
 Many programs share one NVIDIA GPU the way processes share a CPU: each holds
 its guaranteed share, idle capacity goes to programs that can use it, and a
 latency program preempts a running kernel. Works on the stock driver.
END
  for script in postinst prerm postrm; do install -m 755 "$here/debian/$script" "$root/DEBIAN/$script"; done
  same_time "$root"
  # shellcheck disable=SC2086 # two words
  dpkg-deb --root-owner-group $xz --build "$root" "$out/gpumux_${version}_$arch.deb" >/dev/null
  echo "$out/gpumux_${version}_$arch.deb"
}

make_rpm() {
  local root=$work/rpm-tree compress=w19.zstdio
  [ -z "$fast" ] || compress=w1.gzdio
  system_tree "$root"
  same_time "$root"
  rpmbuild -bb --quiet --target "$machine-linux" \
    --define "_topdir $work/rpm" --define "_rpmdir $out" --define "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm" \
    --define "_binary_payload $compress" --define "_buildhost gpumux" \
    --define "tree $root" --define "gpumux_version $version" "$here/gpumux.spec"
  echo "$out/gpumux-$version-1.$machine.rpm"
}

# The tool prints a path below the folder where it runs without that folder.
make_wheel() (
  cd "$repository"
  made=$(GPUMUX_TREE=$tree python3 -m hatchling build --target wheel --directory "$out" 2>&1 >/dev/null | tail -n 1) || { echo "$made" >&2; exit 1; }
  realpath "$made"
)

for format in $formats; do "make_$format"; done
