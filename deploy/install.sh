#!/bin/sh
# Installs what lies beside it, or removes it again.
#
#   ./install.sh [--prefix DIR] [--uninstall]      DIR: /usr/local, or what you like
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=/usr/local remove=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix)
      [ $# -gt 1 ] || { echo "install.sh: --prefix needs a folder" >&2; exit 2; }
      prefix=$2
      shift 2
      ;;
    --uninstall) remove=1; shift ;;
    *) echo "install.sh: unknown argument $1: see its first lines" >&2; exit 2 ;;
  esac
done
if [ ! -d "$prefix" ] && [ -n "$remove" ]; then
  echo "install.sh: there is no folder $prefix" >&2
  exit 1
fi
mkdir -p "$prefix"
prefix=$(cd "$prefix" && pwd)
# The folders that it made.
made=$prefix/share/gpumux/made
cd "$here"
files=$(find bin include lib share -type f)
if [ -n "$remove" ]; then
  folders=$(sort -r "$made" 2>/dev/null || true)
  for file in $files; do rm -f "$prefix/$file"; done
  rm -rf "$prefix/lib/gpumux" "$prefix/share/gpumux" "$prefix/share/doc/gpumux"
  # Those with something else in them stay.
  for folder in $folders; do rmdir "$prefix/$folder" 2>/dev/null || true; done
  echo "removed from $prefix"
  exit
fi
new=$(find bin include lib share -type d | sort | while read -r folder; do [ -d "$prefix/$folder" ] || echo "$folder"; done)
mkdir -p "$prefix/share/gpumux"
[ -z "$new" ] || echo "$new" >> "$made"
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
case :$PATH: in *":$prefix/bin:"*) ;; *) echo "$prefix/bin is not on the PATH: add it for \`gpumux\` alone" ;; esac
echo "Python finds the module with PYTHONPATH=$prefix/share/gpumux/python"
