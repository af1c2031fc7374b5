"""States of training that live outside of the device: in host memory and on NVMe.

`HostStore` and `NvmeStore` keep *records*, lists of 1-D tensors under a key, and are used alike: `create`, `fetch`,
`release`. `HostArena` is the memory that both stand on.

`OffloadActivations` is a context in which what autograd saves goes out of the device until backward needs it.
`plan_cores` and `CoreBinding` give cores to those who move and update states, and others to those who compute.

`TensorFiles`, `TensorFileWriter` and `share_file` read and write tensors in files of the user's own: by name, through
`torch.save`, and from many ranks into one file.
"""

from __future__ import annotations

from .activations import ActivationOptions, ActivationStatistics, OffloadActivations
from .arena import ArenaFullError, HostArena
from .cores import CoreBinding, CorePlan, CoreShares, Cpu, plan_cores, read_cpus
from .host import HostStore
from .nvme import NvmeStore
from .tensor_file import TensorFiles, TensorFileWriter, TensorTransfer, share_file

__all__ = [
    "ActivationOptions",
    "ActivationStatistics",
    "ArenaFullError",
    "CoreBinding",
    "CorePlan",
    "CoreShares",
    "Cpu",
    "HostArena",
    "HostStore",
    "NvmeStore",
    "OffloadActivations",
    "TensorFileWriter",
    "TensorFiles",
    "TensorTransfer",
    "plan_cores",
    "read_cpus",
    "share_file",
]
