# SPDX-License-Identifier: BSD-3-Clause
# What does a raw page of Nsight Compute look like? Made-up numbers in its format, never results.

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

PLAIN = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
)
UNITS = {"sum": "", "pct": "%", "ratio": "inst"}
FORWARD = (
    "void fa::sm90::fa_fwd<fa::rows::sm90_fwd_bf16_d128_none>"
    "(fa::sm90::KernelParams<fa::rows::sm90_fwd_bf16_d128_none>)"
)
PREPARE = "void fa::fa_bwd_prepare<fa::rows::sm90_bwd_bf16_d128_band>(fa::BwdArgs)"
GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"
METRICS = {  # made-up
    "gpu__time_duration.sum": "1,250,000",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "80.5",
    "dram__bytes_read.sum": "200,000,000",
    "dram__bytes_write.sum": "50,000,000",
    "lts__t_sectors_srcunit_tex_op_read.sum": "31,250,000",
    "smsp__sass_inst_executed_op_local_ld.sum": "0",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "1.5",
    "sm__pipe_tma_cycles_active.avg.pct_of_peak_sustained_active": "n/a",
}


def unit(metric: str) -> str:
    if metric.startswith("gpu__time"):
        return "ns"
    if "bytes" in metric:
        return "byte"
    return "%" if "pct" in metric else "sector" if "sectors" in metric else "inst"


def page(kernels: Sequence[tuple[str, dict[str, str]]]) -> str:
    """What `ncu --import … --csv --page raw --print-units base` prints for these kernels.

    `kernels`: demangled name, and the metrics that differ from METRICS.
    """
    names = list(dict.fromkeys([*METRICS, *(m for _, changed in kernels for m in changed)]))
    text = io.StringIO()
    text.write("==PROF== Connected to process 7 (made-up numbers of tests/cpu/ncu_fixture.py)\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    nvtx = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    writer.writerow([*PLAIN, nvtx, *names])
    writer.writerow([*[""] * (len(PLAIN) + 1), *map(unit, names)])
    for number, (name, changed) in enumerate(kernels):
        plain = [str(number), "7", "python3.12", "host", name, "1", "7", "(384, 1, 1)"]
        plain += ["(132, 1, 1)", "0", "9.0", "fa_profile"]
        values = METRICS | changed
        writer.writerow([*plain, *(values.get(metric, "") for metric in names)])
    return text.getvalue()
