"""Train sharded, save, resume at another number of ranks and another stage, and go on with the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.comm import Axis, Mesh, init, shutdown
from drivetrain.engine.checkpoint import export_checkpoint, export_tensors, load, open_checkpoint, save
from drivetrain.engine.data import LoaderConfig, RepeatingLoader, TrainLoader
from drivetrain.zero import FlatSlice, Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

GLOBAL_BATCH = 6
MODEL, OPTIMIZER = "model/", "optimizer/"


class Model(nn.Module):
    """Tied, frozen, scalar and odd-sized parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(13, 5)
        self.hidden = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.frozen(torch.tanh(self.hidden(self.embed(tokens)))) * self.scale)


class Run:
    """A small engine: what the checkpoint is given by the real one."""

    def __init__(self, axis: Axis, mesh: Mesh, stage: int) -> None:
        self.axis = axis
        self.model = Model()
        policy = Policy(stage=stage, param_dtype=torch.bfloat16, persistence_numel=0, accumulate_dtype=torch.float32)
        self.sharded: ShardedModule = shard(self.model, mesh, policy)
        self.optimizer = ShardedOptimizer(self.sharded, torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        tokens = torch.arange(20 * 4).view(20, 4) * 7 % 13
        config = LoaderConfig(
            micro_batch_size=GLOBAL_BATCH // axis.size, rank=axis.rank, ranks=axis.size, drop_last=True
        )
        self.loader = TrainLoader(TensorDataset(tokens), config)
        self.batches = RepeatingLoader(self.loader)
        self.samples: list[list[int]] = []

    def step(self) -> None:
        (tokens,) = next(self.batches)
        self.samples += tokens.tolist()
        logits = self.model(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, FlatSlice]:
        slices = self.sharded.model_slices() | self.sharded.buffer_slices()
        return {MODEL + name: part for name, part in slices.items()}

    def state(self, purpose: str) -> dict[str, FlatSlice]:
        return {OPTIMIZER + name: part for name, part in self.optimizer.state_slices(purpose).items()}  # type: ignore[arg-type]

    def aliases(self) -> dict[str, str]:
        return {MODEL + other: MODEL + name for name, others in self.sharded.aliases().items() for other in others}

    def save(self, directory: str, tag: str) -> None:
        metadata = {"data": self.loader.state_dict(), "schema": self.optimizer.state_schema()}
        save(
            directory,
            tag,
            tensors=self.weights() | self.state("save"),
            axis=self.axis,
            metadata=metadata,
            aliases=self.aliases(),
        )

    def load(self, directory: str) -> None:
        manifest = open_checkpoint(directory).manifest
        stored: dict[str, dict[str, torch.Size]] = {}
        for name, tensor in manifest.tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, key = name.removeprefix(OPTIMIZER).rsplit("/", 1)
                stored.setdefault(parameter, {})[key] = torch.Size(tensor.shape)
        self.optimizer.prepare_state(stored, manifest.metadata["schema"])
        loaded = load(directory, tensors=self.weights() | self.state("load"), axis=self.axis)
        assert loaded.report.unexpected == ()
        self.optimizer.finish_load()
        self.sharded.refresh_parameters()
        self.loader.load_state_dict(loaded.metadata["data"])

    def result(self) -> dict[str, Any]:
        parameters = {name: value.float().clone() for name, value in self.sharded.full_parameters()}
        return {"parameters": parameters, "samples": self.samples, "seen": int(self.model.seen)}


def first_run(rank: int, world_size: int, directory: str, stage: int) -> dict[str, Any]:
    mesh = Mesh.create(init())
    run = Run(mesh.axis("shard"), mesh, stage)
    for _ in range(4):
        run.step()
    run.save(directory, "step4")
    export_tensors(run.weights(), f"{directory}/live", axis=run.axis, aliases=run.aliases())
    run.samples.clear()
    for _ in range(4):
        run.step()
    shutdown()
    return run.result()


def resumed_run(rank: int, world_size: int, directory: str, stage: int) -> dict[str, Any]:
    mesh = Mesh.create(init())
    run = Run(mesh.axis("shard"), mesh, stage)
    run.step()  # something to be overwritten
    run.samples.clear()
    run.load(directory)
    for _ in range(4):
        run.step()
    shutdown()
    return run.result()


def joined(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_at_any_world_size_and_stage(tmp_path: Path, stage: int) -> None:
    through = run_ranks(first_run, 2, str(tmp_path), stage)
    samples = sorted(sample for result in through for sample in result["samples"])
    for world_size, other in ((2, 3 - stage), (1, 1), (3, 2)):
        resumed = run_ranks(resumed_run, world_size, str(tmp_path), other)
        assert sorted(sample for result in resumed for sample in result["samples"]) == samples
        for result in resumed:
            assert result["seen"] == through[0]["seen"]
            if world_size == 2:
                for name, value in result["parameters"].items():
                    assert torch.equal(value, through[0]["parameters"][name]), name
            else:
                assert relative_error(joined(result["parameters"]), joined(through[0]["parameters"])) < 5e-3
    export_checkpoint(tmp_path, tmp_path / "stored")
    live, stored = (
        load_file(tmp_path / "live" / "model.safetensors"),
        load_file(tmp_path / "stored" / "model.safetensors"),
    )
    assert live.keys() == stored.keys() == set(Model().state_dict()) - {"head.weight"}
    assert all(torch.equal(live[name], stored[name]) for name in live)
    assert torch.equal(live["frozen.weight"], Model().frozen.weight.bfloat16())
