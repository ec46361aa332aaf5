#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a fresh Debian or Ubuntu machine ready: system packages, the virtual environment with pinned
# packages. Usage: ci/setup.sh image|test. A second run with nothing changed takes under a second.
set -euo pipefail
cd "$(dirname "$0")/.."

goal=${1:?usage: ci/setup.sh image|test}
case "$goal" in
  image) requirements=requirements/tool.txt ;;
  test) requirements=requirements/dev.txt ;;
  *) echo "ci/setup.sh: unknown goal '$goal'; wanted image or test" >&2; exit 2 ;;
esac
venv=.venv
stamp=$venv/.installed-$goal

say() { printf 'setup: %s\n' "$*" >&2; }

engine_answers() { command -v docker >/dev/null && docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# One line a need: the command or file that shows it is there, then the Debian package. debootstrap only
# recommends the keys it checks with.
needs() {
  echo "git git"
  if ! engine_answers; then
    echo "buildah buildah"
    echo "debootstrap debootstrap"
    echo "/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring"
  fi
  if [ "$goal" = test ]; then
    echo "ld.lld-19 lld-19"
    echo "g++ g++"
  fi
}

python_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# A Python that was asked for is used or refused, never passed over for another.
check_python_variable() {
  local seen
  if [ -z "${PYTHON:-}" ] || python_is_new_enough "$PYTHON"; then return; fi
  seen=$("$PYTHON" --version 2>&1) || seen="it does not run: $seen"
  say "error: PYTHON=$PYTHON cannot be used"
  say "  seen:   $seen"
  say "  wanted: Python 3.11 or newer"
  say "  fix:    correct PYTHON, or leave it out"
  exit 2
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && python_is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

# What is missing, as package names; Python and its venv module included.
missing_packages() {
  local command package python
  while read -r command package; do
    command -v "$command" >/dev/null || [ -f "$command" ] || echo "$package"
  done < <(needs)
  python=$(find_python)
  if [ -z "$python" ]; then
    echo python3 python3-venv
  elif ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo python3-venv
  fi
}

install_packages() {
  local packages as_root=()
  packages=$(missing_packages | tr '\n' ' ')
  [ -z "${packages// /}" ] && return
  if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
  if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; }; then
    say "missing: $packages"
    say "these are Debian package names; install them (apt-get install $packages) or their like, then repeat"
    exit 2
  fi
  say "installing $packages"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >&2
  if [ -n "$(missing_packages)" ]; then
    say "still missing after the install: $(missing_packages | tr '\n' ' ')"
    say "Python 3.11 or newer is needed; a release without it or without lld-19 is too old"
    exit 2
  fi
}

# The scripts of a virtual environment name the folder that it was made in: one that was moved or
# copied runs another checkout's packages, or none.
venv_is_of_here() { [[ -f $venv/bin/pip && "$(<$venv/bin/pip)" == *"$(pwd -P)/$venv/bin/python"* ]]; }

install_python_packages() {
  local wanted
  wanted=$(cat requirements/pip.txt "$requirements" pyproject.toml | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && venv_is_of_here; then return; fi
  if ! venv_is_of_here || ! python_is_new_enough $venv/bin/python; then
    say "making $venv"
    rm -rf $venv
    "$(find_python)" -m venv $venv
  fi
  say "installing the packages of $requirements"
  $venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/pip.txt
  $venv/bin/python -m pip install --quiet -r "$requirements"
  $venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
  echo "$wanted" >"$stamp"
}

check_python_variable
install_packages
install_python_packages
