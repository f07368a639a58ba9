#!/bin/sh
# What programs and libraries need of the machine that they run on.
#
#   deploy/elf.sh machine FILE      its processor, as `uname -m` names it
#   deploy/elf.sh glibc FILE…       the newest interface of the C library that they use: 2.28
#   deploy/elf.sh needed FILE…      the libraries that they are linked to
set -eu
command -v readelf > /dev/null || { echo "elf.sh: no readelf: install binutils" >&2; exit 1; }
what=$1
shift
case $what in
  machine)
    case $(readelf -h "$1") in
      *X86-64*) echo x86_64 ;;
      *AArch64*) echo aarch64 ;;
      *) echo "elf.sh: $1 is for neither x86-64 nor aarch64" >&2; exit 1 ;;
    esac
    ;;
  # What is only named in their text does not count.
  glibc) readelf -VW "$@" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -n 1 | cut -d_ -f2 ;;
  needed) readelf -dW "$@" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u ;;
  *) echo "elf.sh: unknown argument $what: see its first lines" >&2; exit 2 ;;
esac
