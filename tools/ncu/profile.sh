#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# What limits a kernel row? Nsight Compute over one call of it, clocks left alone, and a table of what it counted.
#
#   tools/ncu/profile.sh ROW [SHAPE] [-o FOLDER] [one_call.py options…]
#   tools/ncu/profile.sh sm90_fwd_bf16_d128_none 2x8192x16
#   tools/ncu/profile.sh 'sm90_bwd_bf16_*' -o build/ncu --causal
#
# ROW is an id of tools/variants.csv, a pattern with *, or several by commas; SHAPE is batch x length x heads, or
# batch x length x heads x keys (default 16384 tokens of length 4096). What is profiled: the row's own kernels, and
# the one that combines splits, inside of the NVTX range of tools/ncu/one_call.py.
# FOLDER (default build/ncu) gets ROW.ncu-rep, ROW.json (shape and FLOPs), ROW.md (the table).
# FA_NCU_SET: full (default: everything, with sources if built with -DFA_LINEINFO=ON), light (the sections that fit
# into a minute), metrics (only tools/ncu/metrics_*.csv, a few seconds). FA_NCU_NVTX=off: the range by CUDA's profiler.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
usage="usage: tools/ncu/profile.sh ROW [SHAPE] [-o FOLDER] [options of tools/ncu/one_call.py]"
pattern=${1:-}
case $pattern in
  -h | --help)
    sed -n '3,16s/^# \{0,1\}//p' tools/ncu/profile.sh
    exit 0
    ;;
  "" | -*)
    echo "$usage: which row? An id of tools/variants.csv, or a pattern with *." >&2
    exit 2
    ;;
esac
shift
folder=build/ncu
call=()
[[ ${1:-} =~ ^[0-9]+x[0-9]+x[0-9]+(x[0-9]+)?$ ]] && { call+=(--shape "$1"); shift; }
while [ $# != 0 ]; do
  case $1 in
    -o)
      folder=${2:-}
      [ -n "$folder" ] || { echo "$usage: -o needs a folder." >&2; exit 2; }
      shift 2
      ;;
    *)
      call+=("$1")
      shift
      ;;
  esac
done
sections=()
case ${FA_NCU_SET:=full} in
  full) sections=(--set full --import-source yes) ;;
  light)
    for name in SpeedOfLight ComputeWorkloadAnalysis MemoryWorkloadAnalysis WarpStateStats SourceCounters \
      LaunchStats Occupancy; do sections+=(--section "$name"); done
    ;;
  metrics) sections=(--section LaunchStats) ;;
  *)
    echo "FA_NCU_SET=$FA_NCU_SET: allowed are full, light and metrics." >&2
    exit 2
    ;;
esac
range=(--nvtx --nvtx-include "fa_profile/")
[ "${FA_NCU_NVTX:-on}" = off ] && range=(--profile-from-start off)
"$python" tools/machine.py require ncu/profile.sh || exit 2
ncu=$("$python" tools/ncu/ncu_table.py --have-ncu) || exit 2
rows=$("$python" tools/ncu/one_call.py "$pattern" --list) || exit 2
mkdir -p "$folder"
declare -A known # metrics by family
worst=0
for row in $rows; do
  family=${row:0:4}
  [ -n "${known[$family]:-}" ] || known[$family]=$("$python" tools/ncu/ncu_table.py --metrics "$family") || exit 2
  report=$folder/$row.ncu-rep
  rm -f "$report"
  echo "=== $row"
  log=$("$ncu" --clock-control none "${range[@]}" --kernel-name-base demangled -k "regex:$row|fa_combine" \
    "${sections[@]}" --metrics "${known[$family]}" -f -o "$report" \
    "$python" tools/ncu/one_call.py "$row" --note "$folder/$row.json" "${call[@]}" 2>&1)
  if [ ! -f "$report" ]; then
    printf '%s\n' "$log" | "$python" tools/ncu/ncu_table.py --why "$row"
    worst=2
    continue
  fi
  "$python" tools/ncu/ncu_table.py "$report" | tee "$folder/$row.md" || worst=1
done
exit $worst
