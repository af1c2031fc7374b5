"""Hatchling's build hook: compiles the native core into the wheel, which then carries a platform tag."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The hook runs from a source tree that is on no path; its neighbour holds the compilation itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_native import EXTENSION, build


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds `_native` for the running Python. An editable install gets it in place, a wheel takes it along."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            build(Path(self.root) / "src" / "drivetrain" / "kernels")
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="drivetrain-kernels-")
        extension = build(Path(self._scratch.name), scratch=Path(self._scratch.name) / "objects")
        build_data["force_include"][str(extension)] = f"drivetrain/kernels/{EXTENSION}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel" and version != "editable":
            self._scratch.cleanup()
