#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Is this build right and fast on this GPU? Build if needed, tests, sanitizers, fuzzer, bench; one summary.
#
#   tools/gpu_check.sh [quick|full]                  every stage (default quick)
#   tools/gpu_check.sh stage NAME[,NAME…] [quick|full]
#
# Stages: build, tests, sanitize, fuzz, bench. Each has a time limit (FA_LIMIT_<NAME> in seconds changes it), a
# log in FA_CHECK_OUT (default build/gpu_check), and does not stop the next one. The benchmark of `full` is compared
# with docs/results/h200.jsonl, or with the file FA_COMPARE; both modes end in one summary, which summary.txt keeps.
# Tests, sanitizers and fuzzer run in several processes side by side, as many as cores and GPU memory carry, or
# FA_JOBS; what is timed runs alone. Exit status 0: good, or a stage could not run here, which the last line names;
# 1: a stage failed; 2: no GPU, or a wrong argument. The package is found as Python finds it: installed, or on
# PYTHONPATH with lib/libfa.so in it; else a library is built here (needs nvcc, CMake, ninja and the Python package
# nvidia-cutlass).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
root=$PWD
stages=build,tests,sanitize,fuzz,bench
inside=
case ${1:-} in
  stage)
    stages=${2:-}
    IFS=, read -ra names <<<"$stages"
    for name in "${names[@]:-}"; do
      case $name in build | tests | sanitize | fuzz | bench) ;; *)
        echo "stage '$name': allowed are build, tests, sanitize, fuzz and bench, joined by commas." >&2
        exit 2
        ;;
      esac
    done
    shift 2
    ;;
  --inside) # this script calls itself, because `timeout` needs a program
    inside=$2
    shift 2
    ;;
esac
mode=${1:-quick}
case $mode in quick | full) ;; *)
  echo "mode '$mode': allowed are quick and full." >&2
  exit 2
  ;;
esac
python=${PYTHON:-python3}
"$python" tools/machine.py require gpu_check.sh || exit 2
jobs=${FA_JOBS:-$("$python" tools/machine.py processes)}
[[ $jobs =~ ^[1-9][0-9]*$ ]] || {
  echo "FA_JOBS=$jobs: how many processes run side by side, a number above 0." >&2
  exit 2
}
out=${FA_CHECK_OUT:-$root/build/gpu_check}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
summary=()
notrun=()
failed=0

# The package: what Python finds, else the clone's with a library built here.
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fa") is None)' ||
  export PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}"
library() { PYTHONPATH="$root/tools:${PYTHONPATH:-}" "$python" -c 'import libfa; print(libfa.library_path() or "")'; }
if [ -z "$(library)" ] && [ -f "$root/build/release/lib/libfa.so" ]; then
  export FA_LIBRARY=$root/build/release/lib/libfa.so
fi

# stage NAME SECONDS: the function of that name under a time limit, output to its log and here.
stage() {
  local name=$1 limit=$2 start=$SECONDS status word
  [[ ",$stages," == *",$name,"* ]] || return 0
  local variable=FA_LIMIT_${name^^}
  limit=${!variable:-$limit}
  echo "=== $name ($mode, at most $limit s)"
  timeout --kill-after=10 "$limit" "$BASH" "$root/tools/gpu_check.sh" --inside "$name" "$mode" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  case $name:$status in
    *:0) word=ok ;;
    sanitize:77) notrun+=("$name") word="NOT RUN: $(grep '^not run: ' "$out/$name.log" | tail -n 1 | cut -d' ' -f3-)" ;;
    *:124 | *:137) word="FAILED: stopped after $limit s" ;;
    *) word="FAILED (status $status)" ;;
  esac
  [[ $word != FAILED* ]] || failed=$((failed + 1))
  summary+=("$(printf '%-9s %4d s  %s' "$name" $((SECONDS - start)) "$word")")
}

build() {
  local found
  found=$(library)
  if [ -n "$found" ]; then
    echo "library: $found"
  else
    cmake --preset release && cmake --build --preset release || return 1
  fi
  "$python" tools/driver.py --plan
}

# files_in_turn OPTION…: pytest over tests/gpu. A lost CUDA context or a kernel that hangs ends one process; the files
# behind it get a new one.
files_in_turn() {
  local files=(tests/gpu/test_driver.py) file log worst=0 status rest
  log=$(mktemp)
  for file in tests/gpu/test_*.py; do [ "$file" = "${files[0]}" ] || files+=("$file"); done
  while [ ${#files[@]} != 0 ]; do
    "$python" -m pytest -q --durations=6 -p no:cacheprovider "$@" "${files[@]}" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || [ "$status" = 5 ] || worst=$status
    file=$(grep -o 'FA-TESTS-STOPPED-IN tests/gpu/test_[a-z0-9_]*\.py' "$log" | tail -n 1 | cut -d' ' -f2)
    [ -n "$file" ] || break
    rest=()
    while [ ${#files[@]} != 0 ] && [ "${files[0]}" != "$file" ]; do files=("${files[@]:1}"); done
    [ ${#files[@]} -gt 1 ] && rest=("${files[@]:1}")
    files=("${rest[@]}")
    [ ${#files[@]} = 0 ] || echo "--- going on with: ${files[*]}"
  done
  rm -f "$log"
  return "$worst"
}

# side_by_side COUNT FUNCTION: FUNCTION 0, FUNCTION 1, … at once, each line behind its number; status 1 if one fails.
side_by_side() {
  export OMP_NUM_THREADS=1
  local number worst=0 pids=()
  for ((number = 0; number < $1; number++)); do
    (set -o pipefail; "$2" "$number" 2>&1 | sed -u "s/^/$number: /") &
    pids+=($!)
  done
  for number in "${pids[@]}"; do wait "$number" || worst=1; done
  return $worst
}

# total WORD…: the numbers before each word in the lines on stdin, summed up.
total() {
  awk -v words="$*" '{ for (i = 2; i <= NF; i++) { word = $i; sub(/,$/, "", word); sum[word] += $(i - 1) } }
    END { n = split(words, word_of, " "); for (i = 1; i <= n; i++)
      printf "%s%d %s", (i > 1 ? ", " : ""), sum[word_of[i]], word_of[i] }'
}

# Parts of the tests at once, then those that need the GPU for themselves.
tests_part() { FA_TEST_PART=$1/$jobs files_in_turn -m "not alone" "${select[@]}"; }

tests() {
  local worst=0 log select=() said
  [ "$mode" = quick ] && select=(-k "not beyond and not 1000 and not sweep and not inductor")
  log=$(mktemp)
  side_by_side "$jobs" tests_part 2>&1 | tee "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || worst=1
  files_in_turn -m alone "${select[@]}" 2>&1 | tee -a "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || worst=1
  said=$(grep -E ' in [0-9.]+s' "$log" | sed 's/ errors/ error/' | total passed failed error skipped)
  rm -f "$log"
  echo "tests: $said; $jobs processes, then one."
  if [ $worst = 0 ] && [[ $said == 0\ passed* ]]; then
    echo "FAILED: no test passed; the reasons for skips stand above."
    return 1
  fi
  return $worst
}

sanitize() { FA_JOBS=$jobs OMP_NUM_THREADS=1 tools/sanitize.sh "$mode"; }

fuzz_part() { "$python" tools/fuzz.py --count $(((count + parts - 1) / parts)) --seed $((seed + $1)); }

fuzz() {
  local count=1000 parts=$((jobs < 8 ? jobs : 8)) seed=${FA_FUZZ_SEED:-$((RANDOM * 32768 + RANDOM))} log worst
  [ "$mode" = quick ] && count=300
  log=$(mktemp)
  side_by_side "$parts" fuzz_part 2>&1 | tee "$log"
  worst=${PIPESTATUS[0]}
  echo "fuzz: $(grep -E 'problems, [0-9]+ failures' "$log" | total problems failures), seeds $seed to $((seed + parts - 1))."
  rm -f "$log"
  return "$worst"
}

bench() {
  local old=${FA_COMPARE:-}
  if [ "$mode" = quick ]; then
    "$python" tools/bench.py --quick --dims 64,128 --json "$out/bench.jsonl" ${old:+--compare "$old"}
  else
    "$python" tools/bench.py --dtypes bfloat16,float8_e4m3fn --repeats 11 --json "$out/bench.jsonl" \
      --report "$out/bench.html" --compare "${old:-docs/results/h200.jsonl}"
  fi
}

# What each log says in its last lines, for the summary.
digest() {
  local log=$out/$1.log
  [ -f "$log" ] || return 0
  case $1 in
    build) grep -E '^library: |rows, [0-9]+ failures' "$log" ;;
    tests) grep -E '^tests: |(FAILED|ERROR) tests/|^FAILED: ' "$log" ;;
    sanitize) grep -E ' problems  |^FAILED: ' "$log" ;;
    fuzz) grep -E '^fuzz: |FAILED on |Again: ' "$log" ;;
    bench) grep -E ': geometric mean |^(before|after): |^FAILED: |^compared: |measurements in ' "$log" ;;
  esac | sed 's/^/    /'
}

if [ -n "$inside" ]; then
  "$inside"
  exit
fi
rm -f "$out/summary.txt"
stage build 1800
if [ -z "$(library)" ] && [ -f build/release/lib/libfa.so ]; then export FA_LIBRARY=$root/build/release/lib/libfa.so; fi
stage tests 420
stage sanitize 420
stage fuzz 150
stage bench 600
{
  echo "=== summary ($mode): $("$python" -c 'import torch
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", "torch", torch.__version__)')"
  for line in "${summary[@]}"; do
    printf '%s\n' "$line"
    digest "${line%% *}"
  done
  if [ "$failed" != 0 ]; then
    echo "$failed stages FAILED"
  elif [ ${#notrun[@]} != 0 ]; then
    echo "good, as far as it ran; NOT RUN: ${notrun[*]}"
  else
    echo good
  fi
} | tee "$out/summary.txt"
[ "$failed" = 0 ]
