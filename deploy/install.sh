#!/bin/sh
# Installs what lies beside it, or removes it again.
#
#   ./install.sh [--prefix DIR] [--uninstall]      DIR: /usr/local, or what you like
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local remove=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=$2; shift 2 ;;
    --uninstall) remove=1; shift ;;
    *) echo "install.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
cd "$here"
files=$(find bin lib share -type f)
if [ -n "$remove" ]; then
  for file in $files; do rm -f "$prefix/$file"; done
  # Folders that were made for it; those with something else in them stay.
  find bin lib share -depth -type d | while read -r dir; do rmdir "$prefix/$dir" 2>/dev/null || true; done
  echo "removed from $prefix"
  exit
fi
for file in $files; do
  mkdir -p "$prefix/$(dirname "$file")"
  # A new file in the old one's place: programs that run the old one keep it.
  cp -p "$file" "$prefix/$file.new"
  mv -f "$prefix/$file.new" "$prefix/$file"
done
for unit in "$prefix"/lib/systemd/*/gpumuxd.service; do
  sed "s|/usr/bin/gpumux|$prefix/bin/gpumux|" "$unit" > "$unit.new"
  mv -f "$unit.new" "$unit"
done
echo "installed in $prefix; try: $prefix/bin/gpumux demo"
