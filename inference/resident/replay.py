"""A part of a round that runs again and again on the same memory, as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headsmith.inference.kernels import runs, watching

# Before a capture everything must have run: kernels compile, libraries make their workspaces.
WARM_UP = 2


class Replay:
    """Calls `run`, which reads and writes fixed addresses and asks the host for nothing, or replays
    what it launched the first time. Where that was wanted and failed, every run says so.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, capture: bool) -> None:
        self._replay = run
        self._kernels: set[str] = set()
        if not capture:
            return
        try:
            with watching() as ran:
                graph = graph_of(run, device)
        except RuntimeError as fault:
            # A target whose modules ask the host something, as some mixtures of experts do.
            self._kernels = {f"no CUDA graph ({str(fault).partition(chr(10))[0]})"}
            return
        if graph is not None:
            self._replay, self._kernels = graph, ran | {"CUDA graphs"}

    def __call__(self) -> None:
        self._replay()
        for name in self._kernels:
            runs(name)


def graph_of(run: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """What replays the launches of `run`; None where there are no graphs. RuntimeError if `run`
    cannot be captured.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
