"""States of training that live outside of the device: in host memory and on NVMe.

`HostStore` and `NvmeStore` keep *records*, lists of 1-D tensors under a key, and are used alike: `create`, `fetch`,
`release`. `HostArena` is the memory that both stand on.

`TensorFiles`, `TensorFileWriter` and `share_file` read and write tensors in files of the user's own: by name, through
`torch.save`, and from many ranks into one file.
"""

from __future__ import annotations

from .arena import ArenaFullError, HostArena
from .host import HostStore
from .nvme import NvmeStore
from .tensor_file import TensorFiles, TensorFileWriter, TensorTransfer, share_file

__all__ = [
    "ArenaFullError",
    "HostArena",
    "HostStore",
    "NvmeStore",
    "TensorFileWriter",
    "TensorFiles",
    "TensorTransfer",
    "share_file",
]
