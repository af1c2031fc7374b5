"""Ops on GPUs, in Triton. `dispatch` chooses them for CUDA tensors; nothing here is imported before it is used.

Every module has three tiers, in this order: the kernels, each under a block that says the shape of every pointer; the
launchers, which check what a kernel cannot and choose its grid; and, where there are gradients, the autograd functions.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, before Triton is imported): far too slow to
use, and just right for tests.
"""

from __future__ import annotations
