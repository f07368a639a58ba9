#!/usr/bin/env bash
# Lays out what is installed below a prefix, from what cargo has built: the same tree for all packages.
#
#   deploy/tree.sh --to DIR [--from target/release] [--host target/debug/gpumux]
#
# --host: a gpumux that runs on this machine, for the man pages and completions of a build for another one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
from=$repository/target/release to='' host=''
while [ $# -gt 0 ]; do
  case $1 in
    --from | --to | --host)
      [ $# -gt 1 ] || { echo "tree.sh: $1 needs a value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    *) echo "tree.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
[ -n "$to" ] || { echo "tree.sh: --to DIR is missing" >&2; exit 2; }
for file in gpumux libgpumux.so libgpumux_emu.so; do
  [ -f "$from/$file" ] || { echo "tree.sh: $from/$file is missing: run cargo build --release --workspace" >&2; exit 1; }
done
host=${host:-$from/gpumux}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
put() { install -D -m "$1" "$2" "$3"; }

put 755 "$from/gpumux" "$to/bin/gpumux"
for library in libgpumux.so libgpumux_emu.so; do put 644 "$from/$library" "$to/lib/gpumux/$library"; done
# Programs for another machine need its own strip.
machine=$("$here/elf.sh" machine "$to/bin/gpumux")
for strip in "$machine-linux-gnu-strip" strip; do
  "$strip" --strip-debug "$to/bin/gpumux" "$to"/lib/gpumux/* 2>/dev/null && break
done
put 644 "$repository/include/gpumux.h" "$to/include/gpumux.h"
put 644 "$here/systemd/gpumuxd.service" "$to/lib/systemd/system/gpumuxd.service"
put 644 "$here/systemd/run-gpumux-groups.mount" "$to/lib/systemd/system/run-gpumux-groups.mount"
put 644 "$here/systemd/user/gpumuxd.service" "$to/lib/systemd/user/gpumuxd.service"

share=$to/share
for file in "$repository"/python/gpumux/{,compat/}*.py "$repository"/python/gpumux/py.typed; do
  put 644 "$file" "$share/gpumux/python/${file#"$repository/python/"}"
done
"$host" man "$work/man"
for page in "$work"/man/*.1; do
  mkdir -p "$share/man/man1"
  gzip -n9 < "$page" > "$share/man/man1/$(basename "$page").gz"
done
completions() { mkdir -p "$(dirname "$2")"; "$host" completions "$1" > "$2"; }
completions bash "$share/bash-completion/completions/gpumux"
completions zsh "$share/zsh/site-functions/_gpumux"
completions fish "$share/fish/vendor_completions.d/gpumux.fish"

doc=$share/doc/gpumux
put 644 "$repository/LICENSE" "$doc/copyright"
gzip -n9 < "$repository/CHANGELOG.md" > "$doc/changelog.gz"
for page in README SECURITY SPECIFICATION; do put 644 "$repository/$page.md" "$doc/$page.md"; done
for file in grafana.json alerts.yml gpumux.toml; do put 644 "$here/$file" "$doc/$file"; done
# Pages, pictures and examples, as they lie in the repository.
(cd "$repository" && find docs examples scenarios deploy/examples deploy/recipes -type f -not -name '*.pyc') | while read -r file; do
  place=$doc/${file#deploy/}
  if [ -x "$repository/$file" ]; then put 755 "$repository/$file" "$place"; else put 644 "$repository/$file" "$place"; fi
done
