#!/usr/bin/env bash
# Several requests to one server, one after another and at once: the check that the users of an
# earlier server ran, whose second request failed, whose third one crashed, and which got slower with
# every request.
#
# The answers and the log are judged after the server has stopped: then both are complete.
set -euo pipefail
export LC_ALL=C # decimal points, in what curl writes and awk and sort read

# Those times grew 6.7 times over eight requests; ten that grow likewise have a second half with 2.4
# times the median of the first.  Where a model answers in 2 ms, a busy machine does the same: there
# the growth must also be more than what eight busy processes on two cores were seen to add, to the
# server's own times (3 ms) and to those with the start of a connection (28 ms).
readonly MAX_RATIO=1.5 server_noise_ms=${SERVER_NOISE_MS:-5} curl_noise_ms=${CURL_NOISE_MS:-50}
readonly STOP_TIMEOUT_S=60 # more than the server's own --drain-timeout
readonly start_timeout_s=${START_TIMEOUT_S:-300} request_timeout_s=${REQUEST_TIMEOUT_S:-300}
# Nothing is left to chance, so that every answer has to be the same.
readonly BODY='{"prompt": "1+1=", "max_tokens": 10, "temperature": 0}'
readonly CURL=(
  --noproxy '*' --globoff --silent --show-error --no-progress-meter --max-time "$request_timeout_s"
)
readonly STRING='"(([^"\]|\\.)+)"' NUMBER='([0-9]+(\.[0-9]+)?)'

usage() {
  cat <<'TEXT'
Usage: scripts/multi_request.sh MODEL [PORT] [-- OPTION...]

Starts `cllm serve` on MODEL, sends it three requests, ten in a row and five at once, stops it, and
says whether all were answered, alike and in flat times, by one process, with nothing bad in its log.

  MODEL    a GGUF file; "", - or embedded: the model that comes with cllm
  PORT     where to listen on 127.0.0.1 (default: 18081; 0: a free port)
  OPTION   more options for `cllm serve`

Exit code: 0 all of this holds, 1 it does not (the output says what, and where the log is), 2 wrong
usage.

Environment: CLLM (the command, split at blanks; default: cllm), CLLM_SERVE_OPTIONS (more options,
split at blanks), START_TIMEOUT_S and REQUEST_TIMEOUT_S (seconds; default: 300), SERVER_NOISE_MS and
CURL_NOISE_MS (what a busy machine may add to later answers; default: 5 and 50), TMPDIR.

On a large model, two nearly equal tokens may change places with the batch that a request is in.
TEXT
}

misused() { printf 'multi_request.sh: %s (see -h)\n' "$*" >&2; exit 2; }

reasons=()
wrong() { reasons+=("$*"); }

parse_arguments() {
  local given=() name
  read -ra serve <<<"${CLLM:-cllm} serve ${CLLM_SERVE_OPTIONS:-}"
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --) shift; serve+=("$@"); break ;;
      -?*) misused "unknown option: $1" ;;
      *) given+=("$1") ;;
    esac
    shift
  done
  ((${#given[@]})) || misused 'which MODEL?'
  ((${#given[@]} <= 2)) || misused "not understood: ${given[2]}"
  local model=${given[0]} port=${given[1]-18081}
  [[ $port =~ ^(0|[1-9][0-9]{0,4})$ ]] || misused "PORT is a number, not $port"
  ((port <= 65535)) || misused "PORT is $port, must be at most 65535"
  case $model in
    '' | - | embedded) ;;
    *) [[ -f $model ]] || misused "no such file: $model"; serve+=(--model-path "$model") ;;
  esac
  serve+=(--port "$port")
  for name in curl "${serve[0]}"; do
    command -v "$name" >/dev/null || misused "no such command: $name"
  done
  for name in start_timeout_s request_timeout_s; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || misused "${name^^} is a number of seconds, not ${!name}"
  done
  for name in server_noise_ms curl_noise_ms; do
    [[ ${!name} =~ ^[0-9]+$ ]] || misused "${name^^} is a number of milliseconds, not ${!name}"
  done
}

# --- The server ------------------------------------------------------------------------------------
is_running() { kill -0 "$1" 2>/dev/null; }

start_server() {
  directory=$(mktemp -d "${TMPDIR:-/tmp}/multi_request.XXXXXX")
  log=$directory/log
  : >"$log" # it is read before the server can have opened it
  trap clean_up EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  # A process group of its own: Ctrl-C is for this script, which then stops the server.
  set -m
  env -u CLLM_API_KEY CLLM_LOG_LEVEL=debug CLLM_LOG_FORMAT=console "${serve[@]}" \
    </dev/null >"$log" 2>&1 &
  server=$!
  set +m
}

wait_until_healthy() {
  local deadline=$((SECONDS + start_timeout_s)) why="not healthy within $start_timeout_s s"
  address=''
  while ((SECONDS <= deadline)); do
    # The server says where it listens; with port 0 only it knows.
    address=$(sed -n '/^cllm: .* at http/{s|.* at \(http://[^ ]*\) (docs.*|\1|p;q;}' "$log")
    if [[ -n $address ]] && curl -q "${CURL[@]}" --max-time 5 --fail --output /dev/null \
      "$address/health" 2>/dev/null; then
      return
    fi
    is_running "$server" || { why='ended before it was healthy'; break; }
    sleep 0.1
  done
  wrong "the server: $why"
  stop_server
  echo 'The last lines of its log:'
  tail -n 20 "$log"
  conclude
}

stop_server() {
  local code=0 deadline=$((SECONDS + STOP_TIMEOUT_S))
  if kill -TERM "$server" 2>/dev/null; then
    while is_running "$server" && ((SECONDS <= deadline)); do sleep 0.05; done
    if is_running "$server"; then
      wrong "the server did not stop within $STOP_TIMEOUT_S s of SIGTERM: killed"
      kill -KILL "$server"
    fi
  fi
  wait "$server" || code=$?
  server=''
  ((code == 0)) || wrong "the server's exit code is $code"
}

server='' client=''
# shellcheck disable=SC2317,SC2329 # start_server traps it
clean_up() {
  local code=$?
  trap '' HUP INT TERM
  # The client first: a server that is asked to stop lets what runs finish.
  if [[ -n $client ]]; then kill -TERM "$client" 2>/dev/null || true; fi
  if [[ -n $server ]]; then
    stop_server
    ((${#reasons[@]})) || wrong 'the server is stopped'
    printf 'multi_request.sh: interrupted; %s\n' "${reasons[*]}" >&2
  fi
  if ((code != 1)); then rm -r "$directory"; fi
}

# --- The requests ----------------------------------------------------------------------------------
# send ID...: all at once, by one curl, since five of them do not start within the time of one answer.
# In the background, since `wait` can be interrupted.
send() {
  is_running "$server" || return 0
  local id transfers=()
  for id; do
    ids+=("$id")
    # What comes before --next is not for what comes after it.
    transfers+=(
      --next "${CURL[@]}" --header 'Content-Type: application/json' --header "X-Request-ID: $id"
      --data "$BODY" --output "$directory/$id" --write-out "$id %{http_code} %{time_total}\n"
      "$address/generate"
    )
  done
  curl -q --parallel --parallel-immediate "${transfers[@]:1}" \
    >>"$directory/results" 2>>"$directory/errors" &
  client=$!
  if ! wait "$client"; then await_the_end; fi
  client=''
}

# A server that dies lets go of its connections first, and is a process for some time after that.
await_the_end() {
  local deadline=$((SECONDS + 1))
  while is_running "$server" && ((SECONDS <= deadline)); do sleep 0.02; done
}

send_all() {
  local i
  ids=()
  for i in {1..3}; do send "three-$i"; done
  for i in {1..10}; do send "ten-$i"; done
  send five-{1..5}
}

# --- The judgement ---------------------------------------------------------------------------------
# Of an answer by `cllm serve`, where these names are the first of their kind: in the text before them
# a quotation mark has a backslash.
field() {
  local pattern="\"$1\": *$2"
  if [[ $answer =~ $pattern ]]; then printf '%s' "${BASH_REMATCH[1]}"; fi
}

check_answers() {
  local line id http seconds answer text total_ms reason curl_ms first=''
  server_times=() curl_times=()
  printf '%-10s%6s%11s%11s  %-8s%s\n' request http 'server ms' 'curl ms' finish text
  for id in "${ids[@]}"; do
    read -r http seconds < <(sed -n "s/^$id //p" "$directory/results") || { http=000 seconds=0; }
    answer=''
    if [[ -f $directory/$id ]]; then answer=$(<"$directory/$id"); fi
    text=$(field text "$STRING") reason=$(field finish_reason "$STRING")
    total_ms=$(field total_ms "$NUMBER")
    if [[ -n $total_ms ]]; then printf -v total_ms '%.1f' "$total_ms"; fi
    curl_ms=$(awk "BEGIN { printf \"%.1f\", 1000 * $seconds }")
    printf '%-10s%6s%11s%11s  %-8s%s\n' \
      "$id" "$http" "${total_ms:--}" "$curl_ms" "${reason:--}" "$text"
    if [[ $http != 200 ]]; then
      wrong "$id: HTTP $http ${answer:0:200}"
    elif [[ $reason == error || -z $reason ]]; then
      wrong "$id: finish_reason is '$reason'"
    elif [[ -z $text || -z $total_ms || $(field id "$STRING") != "$id" ]]; then
      wrong "$id: not what was asked for: $answer"
    elif [[ $text != "${first:=$text}" ]]; then
      wrong "$id: answers '$text', others before it '$first'"
    elif [[ $id == ten-* ]]; then
      server_times+=("$total_ms") curl_times+=("$curl_ms")
    fi
  done
  while read -r line; do wrong "$line"; done < <(grep -s '^curl: ' "$directory/errors")
  ((${#ids[@]} == 18)) || wrong "the server ended after ${#ids[@]} of 18 requests"
}

median() { printf '%s\n' "$@" | sort -n | sed -n "$((($# + 1) / 2))p"; }

# check_flat WHOSE NOISE_MS TIME...: ten of them.
check_flat() {
  (($# == 12)) || return 0 # another check has told why
  local before after
  before=$(median "${@:3:5}") after=$(median "${@:8:5}")
  echo "$1: the median of the first five in a row is $before ms, of the last five $after ms"
  awk "BEGIN { exit !($after <= $MAX_RATIO * $before || $after <= $before + $2) }" ||
    wrong "$1: times grow, the median from $before ms to $after ms"
}

# No engine process in the log: the options have --no-process.
check_process() {
  local engines
  engines=$(awk '$3 == "DEBUG" && $4 == "engine" && $5 == "process" { print $6 }' "$log")
  : "${engines:=$server}"
  if [[ $engines == *$'\n'* ]]; then
    wrong "more than one engine process: ${engines//$'\n'/, }"
  elif ! is_running "$engines" || ! is_running "$server"; then
    wrong 'the server ended by itself'
  fi
}

check_log() {
  local pattern line
  for pattern in 'process ended' 'inconsistent sequence positions' 'Traceback' \
    '^[^ ]+ [^ ]+ (ERROR|CRITICAL) '; do
    if line=$(grep -E -m 1 "$pattern" "$log"); then wrong "in the log: $line"; fi
  done
  # A sequence may be preempted and computed again; what it held is cleared each time.  At
  # the end the cells are free before it is reported, but either order will do.
  while read -r line; do wrong "in the log: $line"; done < <(
    awk -v ids="${ids[*]}" '
      $4 == "request" && $6 ~ /^(new,|prefill|cleared|finished,)$/ {
        sub(/:$/, "", $5); sub(/,$/, "", $6)
        story[$5] = story[$5] " " $6
      }
      END {
        n = split(ids, id, " ")
        for (i = 1; i <= n; i++)
          if (story[id[i]] !~ /^ new( prefill cleared)* prefill( cleared finished| finished cleared)$/)
            print "the lines of", id[i], "are:" story[id[i]]
      }' "$log"
  )
}

conclude() {
  if ((${#reasons[@]} == 0)); then
    echo "PASS: ${#ids[@]} requests, one process, one answer, flat times"
    exit 0
  fi
  printf 'wrong: %s\n' "${reasons[@]}"
  echo "FAIL: ${#reasons[@]} wrong, see above; the log is $log"
  exit 1
}

main() {
  parse_arguments "$@"
  start_server
  wait_until_healthy
  send_all
  check_process
  stop_server
  check_answers
  check_flat 'by the server' "$server_noise_ms" "${server_times[@]}"
  check_flat 'by curl' "$curl_noise_ms" "${curl_times[@]}"
  check_log
  conclude
}

main "$@"
