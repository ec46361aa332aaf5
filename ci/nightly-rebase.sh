#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Rebases a clone of this project onto a vLLM, on a branch of its own, and opens the report. Runs anywhere that
# has git and Python: cron, a CI's schedule, a shell. Needs no service of its own.
#
# usage: ci/nightly-rebase.sh [TO]
#   TO       what make rebase takes (default: the newest vLLM release that pip finds)
#
# PUSH       a remote to push the branch to (default: none; the branch stays in the clone)
# OPEN       a command that is given the report's path and a title, to file it where it is read, for example
#            a script around `gh issue create` (default: the report is printed)
# WORK       the folder for the clone (default: build/nightly)
# REBASE     the command that rebases (default: make rebase)
#
# Exit status: 0 rebased or nothing new, 1 the rebase waits for a person, 2 it could not run.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=${WORK:-build/nightly}

say() { printf 'nightly: %s\n' "$*" >&2; }
pinned() { sed -n '/^\[vllm\]/,/^\[/s/^version = "\(.*\)"/\1/p' base.toml | head -n 1; }

newest() {
  local python=.venv/bin/python
  [ -x "$python" ] || python=python3
  "$python" -m pip index versions vllm 2>/dev/null | sed -n 's/^vllm (\(.*\))$/\1/p' | head -n 1
}

to=${1:-$(newest)}
if [ -z "$to" ]; then
  say "error: no vLLM release found; give one: ci/nightly-rebase.sh 0.34.0"
  exit 2
fi
if [ "$to" = "$(pinned)" ]; then
  say "the pin is vLLM $to already"
  exit 0
fi

branch="nightly/rebase-$(printf '%s' "$to" | tr -c 'A-Za-z0-9._-' '-')"
rm -rf "$work"
git clone --quiet "$root" "$work"
git -C "$work" switch --quiet --create "$branch"
# The clone commits as this checkout would, and uses its downloads.
for key in user.name user.email; do git -C "$work" config "$key" "$(git config "$key")"; done
export ROCM_OVERLAY_CACHE=${ROCM_OVERLAY_CACHE:-$root/.cache}

status=0
(cd "$work" && ${REBASE:-make rebase} TO="$to") || status=$?
report=$work/build/rebase-report.md
if [ ! -f "$report" ]; then
  say "error: the rebase to $to ended with status $status and no report"
  exit 2
fi
if [ "$status" -eq 0 ]; then
  title="Rebased to vLLM $to on $branch"
  if [ -n "${PUSH:-}" ]; then git -C "$work" push --quiet --force "$PUSH" "$branch"; fi
else
  title="The rebase to vLLM $to waits for a person"
fi
say "$title"
if [ -n "${OPEN:-}" ]; then $OPEN "$report" "$title"; else cat "$report"; fi
[ "$status" -eq 0 ] || exit 1
