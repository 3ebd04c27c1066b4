"""How long `headsmith --help` takes beside a bare interpreter: `python benchmarks/startup.py`."""

import statistics
import subprocess
import sys
import time

RUNS = 10


def seconds(*arguments: str) -> float:
    """Wall seconds of one start of this interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Run both in turn and print the medians."""
    pairs = [(seconds("-m", "headsmith", "--help"), seconds("-c", "pass")) for _ in range(RUNS)]
    ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"headsmith --help {ours:.3f} s, python -c pass {bare:.3f} s, median of {RUNS} in turn")


if __name__ == "__main__":
    main()
