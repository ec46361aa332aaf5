#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Assembles the stand-in base image: Debian, Python, the pinned vLLM package as a wheel would have
# installed it, flydsl and lld, and a folder where AITER keeps the FlyDSL kernels it was built with.
# It has no ROCm and no torch and serves nothing; it is there so that the real Dockerfile is built,
# and the real entry point, doctor and verify run, where the pinned image cannot be pulled.
#
# usage: ci/stand-in-base.sh [--base FOLDER] [--key]
#   --base FOLDER  the unpacked pinned source (default: build/base)
#   --key          print the image's reference and stop
#
# The reference of the image is the last line on stdout; progress goes to stderr. The tag is a hash
# of everything the image is made from: an image with that tag is used as it is. Stand-ins of other
# hashes stay, since another checkout may build over them; `buildah rmi` removes one.
#
# PYTHON chooses the Python whose pip downloads (default: .venv's, else python3), DEBIAN_MIRROR
# another mirror than debootstrap's own, STORAGE_DRIVER buildah's storage. Packages are fetched from
# outside the image, so that none of this machine's index addresses, certificates or proxies get into it.
set -euo pipefail
# The image's files are for every user, whatever the builder's own are.
umask 022

readonly SUITE=trixie
readonly SUITE_PYTHON=3.13
readonly DEBIAN_PACKAGES=python3,python3-pip,python3-setuptools,lld-19
readonly PYPI_PACKAGES=(PyYAML==6.0.4 jsonschema==4.26.0)
readonly REPOSITORY=localhost/vllm-rocm-stand-in
readonly SITE=usr/local/lib/python$SUITE_PYTHON/dist-packages

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=$root/build/base
key_only=no
while [ $# -gt 0 ]; do
  case $1 in
    --base) base=${2:?--base needs a folder}; shift 2 ;;
    --key) key_only=yes; shift ;;
    *) echo "error: unknown argument $1 (wanted: --base FOLDER, --key)" >&2; exit 2 ;;
  esac
done

say() { printf 'stand-in: %s (%ss)\n' "$*" "$SECONDS" >&2; }
fail() { printf 'error: %s\n  fix:    %s\n' "$1" "$2" >&2; exit 2; }

pin() { sed -n "s/^$1 = \"\(.*\)\"/\1/p" "$root/base.toml" | head -n 1; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=$root/.venv/bin/python
  [ -x "$python" ] || python=python3
fi

[ -d "$base/vllm" ] || fail "no vLLM package at $base/vllm" "run: rocm-overlay fetch"

version=$(pin version)
flydsl=$(pin flydsl)
key=$({ cat "${BASH_SOURCE[0]}"; echo "$version $flydsl"
        cd "$base"; find vllm vllm.egg-info -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
      } | sha256sum | cut -c1-12)
image=$REPOSITORY:$version-$key
if [ "$key_only" = yes ]; then echo "$image"; exit 0; fi

[ "$(id -u)" = 0 ] || fail "the stand-in base is assembled in a mounted root file system, which needs root" \
  "run as root, or build over an image that you can pull: make image BASE=REFERENCE"
for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || fail "$tool is not installed" "apt-get install buildah debootstrap"
done
# As rocm_overlay.engine does: the driver as an option, since not every buildah reads the variable.
buildah() { command buildah ${STORAGE_DRIVER:+--storage-driver "$STORAGE_DRIVER"} "$@"; }

if buildah images --quiet "$image" >/dev/null 2>&1; then
  say "$image is there already"
  echo "$image"
  exit 0
fi

work=$(mktemp -d)
container=
cleanup() {
  local status=$?
  if [ -n "$container" ]; then buildah rm "$container" >/dev/null || true; fi
  if [ "$status" != 0 ] && [ -s "$work/log" ]; then tail -n 20 "$work/log" >&2; fi
  rm -rf "$work"
}
trap cleanup EXIT

# One line of progress for every 40 of debootstrap's, the rest only into the log.
thin() { tee -a "$work/log" | awk 'NR % 40 == 1 { print "stand-in:   " $0; fflush() }' >&2; }

container=$(buildah from scratch)
mount=$(buildah mount "$container")

say "1/4 Debian $SUITE with Python $SUITE_PYTHON and lld"
debootstrap --variant=minbase "--include=$DEBIAN_PACKAGES" "$SUITE" "$mount" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} 2>&1 | thin
# debootstrap copies this machine's name, resolver and mirror; the image needs none of them.
rm -rf "$mount"/etc/{resolv.conf,hostname,apt/sources.list} "$mount"/var/{cache/apt,lib/apt/lists,log}/* \
  "$mount"/usr/share/{doc,man,locale}/*
[ -d "$mount/usr/lib/python$SUITE_PYTHON" ] || fail "Debian $SUITE has no Python $SUITE_PYTHON" "correct SUITE_PYTHON"

say "2/4 flydsl $flydsl, ${PYPI_PACKAGES[*]}"
"$python" -m pip install --quiet --no-compile --only-binary=:all: --python-version "$SUITE_PYTHON" \
  --root-user-action=ignore --target "$mount/$SITE" "flydsl==$flydsl" "${PYPI_PACKAGES[@]}" 2>>"$work/log"
# Their scripts name this machine's interpreter.
rm -rf "${mount:?}/$SITE/bin"

say "3/4 vllm $version"
"$python" - "$base" "$mount/$SITE" "$version" <<'PYTHON'
import base64, hashlib, shutil, sys
from pathlib import Path

base, site, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
info = site / f"vllm-{version}.dist-info"
shutil.copytree(base / "vllm", site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
info.mkdir()
shutil.copy(base / "vllm.egg-info" / "PKG-INFO", info / "METADATA")
shutil.copy(base / "vllm.egg-info" / "entry_points.txt", info)
(info / "INSTALLER").write_text("pip\n")
(info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
lines = []
for file in sorted([*(site / "vllm").rglob("*"), *info.iterdir()]):
    if file.is_file():
        data = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{file.relative_to(site)},sha256={digest},{len(data)}")
(info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,", ""]))
PYTHON
cat >"$mount/usr/local/bin/vllm" <<'SCRIPT'
#!/bin/sh
exec /usr/bin/python3 -m vllm.entrypoints.cli.main "$@"
SCRIPT
chmod 0755 "$mount/usr/local/bin/vllm"
mkdir -p "$mount/$SITE/aiter/jit/flydsl_cache/stand_in_0"
touch "$mount/$SITE/aiter/__init__.py"
echo "no kernel" >"$mount/$SITE/aiter/jit/flydsl_cache/stand_in_0/0.pkl"
touch "$mount/$SITE/aiter/jit/flydsl_cache/stand_in_0/0.lock"
# The unpacked source has the modes of who unpacked it.
chmod -R a+rX "$mount/$SITE"
# An installed package has compiled files; laying must not leave one of a file that it changed.
chroot "$mount" /usr/bin/python3 -m compileall -q "/$SITE/vllm/models/deepseek_v41" "/$SITE/vllm/platforms"

say "4/4 commit"
buildah config --entrypoint '["vllm","serve"]' --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  --label org.opencontainers.image.title="stand-in for the vLLM ROCm image: no ROCm, no torch, serves nothing" \
  --label org.opencontainers.image.version="$version" --label vllm-openai-rocm.stand-in="$key" "$container"
buildah umount "$container" >/dev/null
buildah commit --quiet "$container" "$image" >/dev/null
others=$(buildah images --format '{{.Name}}:{{.Tag}}' | grep "^$REPOSITORY:" | grep -cvxF "$image" || true)
if [ "$others" != 0 ]; then
  say "$others other stand-in(s) stay, for checkouts that may use them; to remove one: buildah rmi $REPOSITORY:TAG"
fi
say "$image"
echo "$image"
