#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Race stress: vLLM's own replay tests of the base's mono kernels, both step widths alternating in one graph, with
# COUNT replays in place of their own number. They compare the layers' outputs, bit for bit with the first run, at every
# 50th replay. Runs in vLLM's checkout: race-stress.sh COUNT [pytest's further words].
set -eu
count=${1:-}
case $count in
  '' | *[!0-9]*) echo "race-stress.sh: COUNT is '$count', wanted a number of replays" >&2; exit 2 ;;
esac
shift
file=tests/models/test_dsv41_mono_numerics.py
copy=tests/models/test_dsv41_mono_race_stress.py
found=$(grep -c '^REPLAYS = [0-9][0-9]*$' "$file" || true)
if [ "$found" != 1 ]; then
  echo "race-stress.sh: ${found:-0} lines 'REPLAYS = N' in $file, wanted one; see how it counts its replays now" >&2
  exit 2
fi
trap 'rm -f "$copy"' EXIT
trap 'exit 130' INT TERM
sed "s/^REPLAYS = [0-9][0-9]*\$/REPLAYS = $count/" "$file" > "$copy"
echo "race stress: $count replays"
pytest -v -s "$copy" "$@"
