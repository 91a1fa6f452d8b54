#!/usr/bin/env bash
# The README's first command in a bare image: Debian with Python, pip and a C++ compiler, and nothing else.
#
#   bench/bare_image.sh FOLDER [--bind PATH]… [--copy PATH]… [--before COMMAND] [--runs N]
#
# As root, on Debian or Ubuntu with debootstrap (apt install debootstrap). FOLDER becomes the image, outside of /tmp; if
# it is one already, it is used again. The committed sources are copied into it, and installed in a new virtual
# environment. The transcript goes to standard output.
#
#   --bind PATH        show this folder of the machine inside too, as /proc, /sys, /dev and /tmp always are; repeatable
#   --copy PATH        copy this file or folder into the image, such as pip's configuration; repeatable
#   --before COMMAND   run this in the environment first, such as a command that installs a CPU build of torch
#   --runs N           run the demonstration N times in all (1)
set -euo pipefail

usage() {
  sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
case $1 in -h | --help) usage; exit 0 ;; -*) usage >&2; exit 2 ;; esac
folder=$1 binds=(/proc /sys /dev /tmp) copies=(/etc/resolv.conf) before=true runs=1
shift
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || { usage >&2; exit 2; }
  case $1 in
    --bind) binds+=("$2") ;;
    --copy) copies+=("$2") ;;
    --before) before=$2 ;;
    --runs) runs=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)

if [ ! -x "$folder/usr/bin/python3" ]; then
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,python3-dev,g++,ca-certificates \
    bookworm "$folder" > "$folder.log" 2>&1 || { tail "$folder.log" >&2; exit 1; }
fi

mounted=()
unmount() {
  for path in "${mounted[@]}"; do umount "$folder$path"; done
}
trap unmount EXIT
for path in "${binds[@]}"; do
  mkdir -p "$folder$path"
  mount --bind "$path" "$folder$path"
  mounted=("$path" "${mounted[@]}")
done
for path in "${copies[@]}"; do
  [ -e "$path" ] || { echo "no $path to copy" >&2; exit 1; }
  mkdir -p "$folder$(dirname "$path")"
  cp -rL "$path" "$folder$(dirname "$path")/"
done

rm -rf "$folder/root/offload" "$folder/root/environment"
mkdir -p "$folder/root/offload"
git -C "$repository" archive HEAD | tar -x -C "$folder/root/offload"

# Word for word, with the comment above it.
command=$(grep -A3 '<!-- demo command -->' "$repository/README.md" | sed -n '/^```/,/^```/p' | sed '1d;$d')
again=${command##*&& }
in_image() {
  chroot "$folder" env -u LD_PRELOAD HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}
inside() {
  in_image bash -euc "cd /root/offload; . /root/environment/bin/activate; $1"
}
in_image python3 -m venv /root/environment
inside "$before"
packages=$(in_image dpkg-query -W -f '${Package}\n')
echo "$(wc -l <<< "$packages") packages, of them allocators: $(grep -cE 'tcmalloc|jemalloc|mimalloc' <<< "$packages" || true)"
for ((run = 1; run <= runs; run++)); do
  [ "$run" -eq 1 ] && asked=$command || asked=$again
  echo "load average: $(cut -d' ' -f1-3 /proc/loadavg)"
  echo "$ $asked"
  inside "$asked"
done
