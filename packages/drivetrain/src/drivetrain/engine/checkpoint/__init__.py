"""Checkpoints: saved by any number of ranks in any cut, loaded by any other, never half there, never run.

    save(directory, tag, tensors=..., axis=...)      all ranks write their slices      save.py
    load(directory, tensors=..., axis=...)           all ranks read their slices       load.py
    export_checkpoint(directory, out)                whole weights for other libraries export.py
    list_checkpoints, verify_checkpoint, open_checkpoint                               stored.py
    SafetensorsSource(path)                          slices of any safetensors files   source.py

On disk: directory.py (names, `latest`, crash safety), manifest.py (what is in a checkpoint), storage.py and
tensorfile.py (elements), files.py (checksums).
"""

from __future__ import annotations

from .agreement import agree
from .directory import existing_tags
from .errors import CheckpointError, CheckpointNotFoundError
from .export import Exported, ExportOptions, export_checkpoint, export_tensors
from .load import LoadedCheckpoint, LoadOptions, check_fit, load
from .manifest import Chunk, Manifest, TensorRecord
from .random_state import RandomState
from .report import LoadReport, Reshaped
from .save import SaveOptions, TagValidation, save
from .source import SafetensorsSource
from .stored import CheckpointSummary, StoredCheckpoint, list_checkpoints, open_checkpoint, verify_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSummary",
    "Chunk",
    "ExportOptions",
    "Exported",
    "LoadOptions",
    "LoadReport",
    "LoadedCheckpoint",
    "Manifest",
    "RandomState",
    "Reshaped",
    "SafetensorsSource",
    "SaveOptions",
    "StoredCheckpoint",
    "TagValidation",
    "TensorRecord",
    "agree",
    "check_fit",
    "existing_tags",
    "export_checkpoint",
    "export_tensors",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "save",
    "verify_checkpoint",
]
