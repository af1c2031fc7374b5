"""What `import drivetrain.kernels` does beyond `import torch`: little. How long it takes is in benchmarks/kernels."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, os, sys
import torch

STARTED = ("subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "_thread.start")
started = []
sys.addaudithook(lambda event, _: started.append(event) if event.startswith(STARTED) else None)

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

modules, running = set(sys.modules), threads()
import drivetrain.kernels
found = {"modules": sorted(set(sys.modules) - modules), "started": started, "threads": threads() - running}
print(json.dumps(found))
"""


def test_the_import_is_light_and_silent() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()  # a second one would be something that the import printed
    found = json.loads(line)
    assert found["started"] == []
    assert found["threads"] == 0
    ours = [name for name in found["modules"] if name.partition(".")[0] == "drivetrain"]
    foreign = sorted(set(found["modules"]) - set(ours))
    assert "drivetrain.kernels" in ours
    # Implementations are loaded when first used, and Triton only with them.
    assert not [name for name in ours if ".triton_ops" in name or ".native_ops" in name]
    assert not [name for name in foreign if name.partition(".")[0] == "triton"]
    # Nearly everything from elsewhere that the package needs, torch has loaded before it. Room for one or two modules
    # of the standard library that some version of torch doesn't load.
    assert len(foreign) <= 3, foreign
    assert not [name for name in foreign if name.partition(".")[0] not in sys.stdlib_module_names]
    assert len(ours) <= 60, ours
