#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# What limits one kernel row? Nsight Compute over a single call, clocks left alone.
#
#   tools/ncu/profile.sh ROW_REGEX [REPORT] [one_call.py options…]
#   tools/ncu/profile.sh sm90_fwd_bf16_d128_band report.ncu-rep --dim 128 --seqlen 8192 --causal
#
# Kernels are templates over the row's type, so the demangled name holds the row's id. FA_NCU_SET=light takes the
# sections that fit into one minute, full (default) everything with sources (build with -DFA_LINEINFO=ON).
set -euo pipefail
cd "$(dirname "$0")/../.."
row=${1:?a regular expression over row ids, for example sm90_fwd_bf16_d128_band}
"${PYTHON:-python3}" tools/machine.py require ncu/profile.sh || exit 2
report=${2:-build/$row.ncu-rep}
shift $(($# > 1 ? 2 : 1))
command -v ncu >/dev/null || {
  echo "ncu is not installed: it comes with the CUDA toolkit (Nsight Compute)." >&2
  exit 2
}
mkdir -p "$(dirname "$report")"
sections=(--set full --import-source yes)
if [ "${FA_NCU_SET:-full}" = light ]; then
  sections=()
  for name in SpeedOfLight ComputeWorkloadAnalysis MemoryWorkloadAnalysis WarpStateStats SourceCounters \
    LaunchStats Occupancy; do sections+=(--section "$name"); done
fi
# The tensor pipe of wgmma; the hmma "ops path" counters read 0 there.
metrics=sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active
metrics+=,smsp__sass_inst_executed_op_local_ld.sum,smsp__sass_inst_executed_op_local_st.sum
metrics+=,dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum
exec ncu --clock-control none --kernel-name-base demangled -k "regex:$row" --launch-skip 2 --launch-count 1 \
  "${sections[@]}" --metrics "$metrics" -f -o "$report" "${PYTHON:-python3}" tools/ncu/one_call.py "$@"
