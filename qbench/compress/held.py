"""One forward pass of a block over all calibration rows, held at each group of linears until the group is solved.

A linear is calibrated on what it is given once the linears before it were solved. To run the block again for each group
would take several times as long; here every batch has a pass of its own that waits at the group's first linear and goes
on from there with the new weights. A pass waits in a thread, which is what Python has to stop a call in its middle;
only one runs at a time. What the waiting passes hold (a few tensors a batch) is the price, so it is limited.

The GNU C library would give every thread a heap of its own, and what a pass frees there would not serve the others; and
it would keep freed activations in the heap, between what stays. So there is one heap, and large tensors are outside it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from threading import Semaphore
from typing import Any

import torch
from torch import nn

from qbench.compress.passes import Passes, Statistics
from qbench.compress.skeleton import PassEnded

HELD_BYTES = 4 << 30  # of activations in waiting passes, at most
HELD_PASSES = 64  # threads, at most
FLOAT_BYTES = 4
M_ARENA_MAX = -8  # mallopt's parameter: how many heaps there may be
M_MMAP_THRESHOLD = -3  # mallopt's parameter: from how many bytes on memory is taken from the system and given back
LARGE_BYTES = 4 << 20
AT_ONCE = 3  # tensors as wide as the hidden states that a waiting pass holds besides the linear's input


class HeldPasses:
    """Passes that wait at `leaders`, in this order, before each of them is applied; what it is given is collected."""

    def __init__(self, passes: Passes, leaders: Sequence[nn.Linear]) -> None:
        self._stages = {leader: stage for stage, leader in enumerate(leaders)}
        self._stage = 0  # the one that is collected or solved
        self._running: _Pass | None = None
        self._hooks = [leader.register_forward_pre_hook(self._arrive) for leader in leaders]
        _share_one_heap()
        self._executor = ThreadPoolExecutor(len(passes.hidden), "block pass")
        runs = zip(passes.hidden, passes.calls, strict=True)
        block, run = passes.block, passes.skeleton.run_block
        self._passes = [_Pass(self._executor, partial(run, block, hidden, call)) for hidden, call in runs]

    @staticmethod
    def fit(passes: Passes, leaders: Sequence[nn.Linear]) -> bool:
        """Whether the passes stay inside the limits."""
        width = AT_ONCE * passes.hidden[0].shape[-1] + max(leader.in_features for leader in leaders)
        return len(passes.hidden) <= HELD_PASSES and passes.tokens * width * FLOAT_BYTES <= HELD_BYTES

    def collect(self, wanted: Sequence[tuple[nn.Linear, Statistics]]) -> None:
        """Runs every pass up to the linear in `wanted`, the next of the leaders, whose inputs are added."""
        ((leader, statistics),) = wanted
        self._stage = self._stages[leader]
        for each in self._passes:
            self._advance(each, self._stage)
            if each.inputs is not None and each.stage == self._stage:
                statistics.add(each.inputs)

    def outputs(self) -> list[torch.Tensor]:
        """Runs every pass to its end; the block's output for each batch."""
        self._stage = len(self._stages)
        for each in self._passes:
            self._advance(each, self._stage)
        found = [each.output() for each in self._passes]
        self.close()
        return found

    def close(self) -> None:
        """Ends the passes that still wait."""
        for hook in self._hooks:
            hook.remove()
        for each in self._passes:
            each.end()
        self._executor.shutdown()
        self._passes, self._running = [], None

    def _advance(self, each: _Pass, stage: int) -> None:
        while each.stage < stage and not each.done:
            self._running = each
            each.go_on()

    def _arrive(self, linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Called in a pass's thread before a leader is applied; hooks set while it waits act on this call too."""
        stage, each = self._stages[linear], self._running  # type: ignore[index]
        if each is None or stage < self._stage:
            return args
        known = set(linear._forward_pre_hooks)
        each.wait(stage, args[0])
        for key, hook in linear._forward_pre_hooks.items():
            if key not in known:
                args = hook(linear, args)
        return args


@cache
def _share_one_heap() -> None:
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


class _Pass:
    """One call in a thread, which runs only inside `go_on`: until it waits, ends or fails."""

    def __init__(self, executor: ThreadPoolExecutor, run: Callable[[], torch.Tensor]) -> None:
        self.stage = -1  # where it waits
        self.inputs: torch.Tensor | None = None  # of the linear it waits at
        self._turn, self._back = Semaphore(0), Semaphore(0)
        self._ending = False
        self._future = executor.submit(self._main, run)
        self._future.add_done_callback(partial(_release, self._back))

    @property
    def done(self) -> bool:
        return self._future.done()

    def go_on(self) -> None:
        self.inputs = None
        self._turn.release()
        self._back.acquire()
        if self.done:
            self._future.result()  # raises what the call raised

    def wait(self, stage: int, inputs: torch.Tensor) -> None:
        """Called in the thread."""
        self.stage, self.inputs = stage, inputs
        self._back.release()
        self._turn.acquire()
        if self._ending:
            raise PassEnded

    def end(self) -> None:
        self._ending, self.inputs = True, None
        self._turn.release()

    def output(self) -> torch.Tensor:
        return self._future.result()

    def _main(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._turn.acquire()
        if self._ending:
            raise PassEnded
        with torch.inference_mode():
            return run()


def _release(back: Semaphore, _: Future[torch.Tensor]) -> None:
    """Not a method: a finished pass must not keep itself, and with it the block's output, in a cycle."""
    back.release()
