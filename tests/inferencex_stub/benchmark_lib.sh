# SPDX-License-Identifier: Apache-2.0
# Stands for InferenceX's library: functions of the names and arguments that its scripts call, each leaving a line
# in $STUB_LOG, and the files that a run must leave behind.
say() { echo "$*" >> "$STUB_LOG"; }

check_env_vars() {
  say check_env_vars
  local name missing=()
  for name in "$@"; do
    [[ -n "${!name}" ]] || missing+=("$name")
  done
  if (( ${#missing[@]} )); then
    echo "missing: ${missing[*]}" >&2
    exit 1
  fi
}

resolve_trace_source() { say "resolve_trace_source $WEKA_LOADER_OVERRIDE"; }
install_agentic_deps() { say install_agentic_deps; }

wait_for_server_ready() {
  say "wait_for_server_ready $*"
  [[ "$1 $3 $5" == "--port --server-log --server-pid" ]] || exit 91
  until curl -sf -o /dev/null "http://localhost:$2/health"; do
    if ! kill -0 "$6" 2>/dev/null; then
      cat "$4" >&2
      exit 92
    fi
    sleep 0.1
  done
}

run_eval() { say "run_eval $*"; }

build_replay_cmd() {
  say "build_replay_cmd $*"
  [[ -n "$DURATION" && -n "$CONC" ]]
}

run_agentic_replay_and_write_outputs() {
  say "run_agentic_replay_and_write_outputs $*"
  mkdir -p "$1/aiperf_artifacts"
  curl -sf "$AIPERF_SERVER_METRICS_URLS" > "$1/aiperf_artifacts/server_metrics_export.csv"
  grep -q "^$AIPERF_REQUIRED_SERVER_METRIC_PREFIX" "$1/aiperf_artifacts/server_metrics_export.csv" || exit 93
  curl -sf -H "Content-Type: application/json" "$AIPERF_SERVER_URL/v1/completions" -d "{\"model\": \"$MODEL\", \"prompt\": \"w3 w4\", \"max_tokens\": 4}" \
    > "$1/benchmark.log"
  echo '{}' > "$RESULT_FILENAME.json"
}
