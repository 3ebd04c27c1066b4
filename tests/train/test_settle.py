"""What a process does to settle before it trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from headsmith.train.settle import settle

torch.set_num_threads(1)
{settles}

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def faults(settles: str) -> int:
    program = PROGRAM.format(settles=settles)
    return int(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of Linux's C library")
def test_memory_that_a_step_frees_is_there_for_the_next_one() -> None:
    assert faults("settle()") < faults("pass") / 10 > 0


def test_garbage_of_later_is_still_collected() -> None:
    program = """
import gc, weakref
from headsmith.train.settle import settle

class Knot:
    def __init__(self):
        self.itself = self

settle()
knot = Knot()
gone = weakref.ref(knot)
del knot
gc.collect()
print(gone() is None)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.strip() == b"True"
