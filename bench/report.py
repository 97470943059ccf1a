"""What every bench prints and stores: machine, commit, command, figures with a ratio to a limit.

report = Report("cpu")
report.add("decode_1", tok_s=..., ratio=..., of="memory read limit measured in this run")
report.write(save)        # prints a table; with save also bench/results/NAME.json
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def machine() -> dict[str, Any]:
    """CPU model, core count, memory and system of this machine."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    except OSError:
        memory = 0
    gpu = (
        {"gpu": name}
        if (name := _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))
        else {}
    )
    return {
        "cpu": model,
        **gpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """Short commit of the tree, with `+` when it has uncommitted changes."""
    dirty = "+" if _output("git", "status", "--porcelain") else ""
    return _output("git", "rev-parse", "--short", "HEAD") + dirty


def _output(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Report:
    """Collects rows of one bench run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def add(self, case: str, **figures: Any) -> None:
        row = {"case": case, **figures}
        self.rows.append(row)
        text = "  ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()
        )
        print(f"{case:24} {text}", flush=True)

    def write(self, save: bool) -> None:
        """Print where and how this was measured; store it in bench/results when asked to."""
        command = " ".join(["python -m bench." + Path(sys.argv[0]).stem, *sys.argv[1:]])
        result = {"machine": machine(), "commit": commit(), "command": command, "rows": self.rows}
        print(json.dumps({k: result[k] for k in ("machine", "commit", "command")}))
        if save:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{self.name}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
