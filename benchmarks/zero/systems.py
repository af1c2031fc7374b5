"""The systems that are compared: each one trains the same model on the same batches, and reports time and memory.

Every system runs in processes of its own, so that peak resident memory is its own too. In bf16 all of them keep fp32
master weights: DDP by autocast over fp32 parameters, the others by bf16 copies of fp32 shards.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformer import SHAPES, Decoder
from turns import Turns

Step = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one system does: `warmup` steps, and `steps` that are measured, each when it is this system's turn."""

    system: str
    size: str
    precision: str
    batch: int
    length: int
    warmup: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank saw: seconds per step, peak resident bytes beyond the start, and the last loss."""

    seconds: list[float]
    peak_bytes: int
    loss: float


def run(rank: int, world_size: int, work: Work, port: int) -> Measured:
    """Train and measure each step; ``port`` is where turns are called."""
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    step = SYSTEMS[work.system](work, device)
    vocabulary = SHAPES[work.size].vocabulary
    generator = torch.Generator().manual_seed(rank)
    seconds, loss = [], 0.0
    turns = Turns(port, work.system, rank)
    for index in range(work.warmup + work.steps):
        tokens = torch.randint(0, vocabulary, (work.batch, work.length + 1), generator=generator).to(device)
        with turns.turn(index):
            dist.barrier()
            began = time.perf_counter()
            loss = step(tokens[:, :-1], tokens[:, 1:])
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index >= work.warmup:
                seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _peak_resident()
    return Measured(seconds=seconds, peak_bytes=peak, loss=loss)


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _start(device: torch.device) -> None:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _torch_step(model: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def plain(work: Work, device: torch.device) -> Step:
    """Nothing but torch; every rank on its own."""
    _start(device)
    return _autocast_step(work, device, Decoder(SHAPES[work.size]).to(device))


def ddp(work: Work, device: torch.device) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    _start(device)
    model = DistributedDataParallel(Decoder(SHAPES[work.size]).to(device), gradient_as_bucket_view=True)
    return _autocast_step(work, device, model)


def _autocast_step(work: Work, device: torch.device, model: torch.nn.Module) -> Step:
    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=work.precision == "bf16"):
            return model(tokens, targets)

    return _torch_step(model, forward)


def fsdp2(work: Work, device: torch.device) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _start(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    policy = half if work.precision == "bf16" else MixedPrecisionPolicy()
    model = Decoder(SHAPES[work.size]).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _torch_step(model, model)


def drivetrain(stage: int, *, backend: str | None = None) -> Callable[[Work, torch.device], Step]:
    """Stage ``stage``, with hooks, or with its communication in graphs that ``backend`` compiles."""

    def make(work: Work, device: torch.device) -> Step:
        from drivetrain.engine import initialize

        compiling = {} if backend is None else {"compile": {"deepcompile": True}}
        engine = initialize(Decoder(SHAPES[work.size]), {**_config(work, stage), **compiling})
        if backend is not None:
            engine.compile(backend=backend)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            if engine.compile_report is not None and engine.compile_report.reason is not None:
                raise RuntimeError(f"nothing to compare, it runs with hooks: {engine.compile_report.reason}")
            return float(loss.detach())

        return step

    return make


def deepspeed(stage: int) -> Callable[[Work, torch.device], Step]:
    def make(work: Work, device: torch.device) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        import deepspeed as reference

        model = Decoder(SHAPES[work.size])
        config = {**_config(work, stage), "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        del config["optimizer"]
        engine, *_ = reference.initialize(model=model, config=config, optimizer=optimizer)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return step

    return make


def _config(work: Work, stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": work.precision == "bf16"},
    }


SYSTEMS: dict[str, Callable[[Work, torch.device], Step]] = {
    "torch": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"drivetrain-{stage}": drivetrain(stage) for stage in range(4)},
    **{f"graphs-{stage}": drivetrain(stage, backend="eager") for stage in (1, 2, 3)},
    **{f"inductor-{stage}": drivetrain(stage, backend="inductor") for stage in (1, 2, 3)},
    **{f"deepspeed-{stage}": deepspeed(stage) for stage in range(1, 4)},
}
