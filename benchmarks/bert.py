"""Time, bytes and memory of a training step of BERT-base at two sites, by rankdad, by DDP, and of computing alone.

    sudo python benchmarks/bert.py                         100 Mbit/s, about five minutes
    sudo python benchmarks/bert.py --rate 10mbit --methods alone,rankdad:rank=8+wire=int8
    python benchmarks/bert.py --rate none                  without root, on loopback

BertForSequenceClassification of transformers with random weights, 109 million parameters, 8 texts of 64 tokens a site,
SGD, one thread a site. Each method runs in processes of its own (benchmarks/step_time.py), so that their peak memory is
the method's. Warm-up steps run before the link gets its rate. The sites compute at the same time; "one process alone"
is the same without any exchange.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from drive import check_rates, read, run_sites, title
from link import may_make_links

METHODS = "alone,rankdad:rank=8+wire=bf16,ddp"


def measure(method: str, arguments: argparse.Namespace, loopback: bool) -> dict:
    """Return the figures of a method, measured in processes of its own; of one that fails, its reason as `error`."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        program = ["step_time.py", "--model", "bert", "--methods", method, "--json", str(results)]
        program += ["--warm-up", "2", "--steps", str(arguments.steps), "--seconds", str(arguments.seconds)]
        program += [] if loopback else ["--rates", arguments.rate]
        reason = run_sites(program, loopback, results, arguments.limit)
        rows = read(results)
    return rows[0] if rows else {"method": method, "error": reason}


def table(rows: list[dict]) -> str:
    """Return a table in Markdown, a line a method."""
    lines = ["| method | s a step | MB sent a step | peak memory, GB |", "| --- " * 4 + "|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {title(row['method'])} | {row['error']} | | |")
        else:
            sent = f"{row['bytes'] / 1e6:.3g}" if row["bytes"] > 10_000 else "0"
            lines.append(f"| {title(row['method'])} | {row['ms'] / 1e3:#.3g} | {sent} | {row['peak'] / 1e9:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="rate of the link, or none")
    parser.add_argument("--methods", default=METHODS, help="as benchmarks/attach.py names them")
    parser.add_argument("--steps", type=int, default=10, help="most steps of a method (least: 3)")
    parser.add_argument("--seconds", type=float, default=25.0, help="time after which steps of a method are enough")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds without a result until a method hangs")
    arguments = parser.parse_args()
    loopback = not may_make_links()
    check_rates(parser, arguments.rate, loopback)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sites end, too
    rows = []
    for method in arguments.methods.split(","):
        rows.append(measure(method, arguments, loopback))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
