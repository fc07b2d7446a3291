"""Arithmetic about runs: what is counted, what is timed, and by which rule.

Here live the only FLOP counter, parameter counts, dense peaks, the step clock, the metric registry,
statistics and the bigram baseline: pure functions and plain records that serve any trainer. Nothing here
imports torch, reads a run directory, starts a process or draws anything.

* ``parameters`` – parameters of a model from its configuration alone
* ``flops`` – model and hardware FLOPs (the only counter)
* ``rules_of_others`` – how other tools count, and which of these rules are wrong
* ``figure`` – one claimed training figure under every rule, and whether it can be true
* ``peaks`` – dense data-sheet peaks of devices; no default
* ``machine`` – cores, caches, memory and identity of this machine, from the operating system
* ``ceilings`` – what this machine was measured to reach
* ``metrics`` – the registry of metric keys
* ``clock`` – step times to throughput: steady and wall
* ``intervals`` – exact interval algebra in integer nanoseconds
* ``account`` – the records of an account, which cannot fail to close
* ``waterfall`` – 100 points of peak, split into MFU and every loss
* ``statistics`` – percentiles, and ratios with an interval
* ``bigram`` – the baseline a language model has to beat
"""

__all__: list[str] = []
