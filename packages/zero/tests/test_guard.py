"""What a program may do to a sharded module besides calling it. The texts of refusals are tested with the engine."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init, shutdown
from drivetrain.zero import Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain.zero.guard import Guard
from drivetrain_testkit import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def sharded(module: nn.Module, stage: int = 0, dtype: torch.dtype | None = None) -> ShardedModule:
    return shard(module, Mesh.create(init()), Policy(stage=stage, param_dtype=dtype, persistence_numel=10))


def masters(whole: ShardedModule) -> dict[str, torch.Tensor]:
    return {name: part.data.clone().view(part.shape) for name, part in whole.model_slices().items()}


def test_a_guard_is_found_on_the_module_its_parts_and_what_holds_it() -> None:
    module = model()
    assert Guard.of(module) is None
    guard = sharded(module).guard
    assert Guard.of(module) is guard
    assert Guard.of(module[2]) is guard
    assert Guard.of(nn.Sequential(nn.ReLU(), module)) is guard
    assert Guard.of(model()) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_neither_copied_nor_pickled(copied: object) -> None:
    assert callable(copied)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copied(sharded(model()).module)


def test_loaded_values_become_master_weights_and_all_others_keep_their_precision() -> None:
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    whole = sharded(module, dtype=torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in masters(whole).items())
    module[2].load_state_dict({"weight": torch.full((2, 6), 0.3), "bias": before["2.bias"]})
    after = masters(whole)
    assert torch.equal(after["2.weight"], torch.full((2, 6), 0.3).bfloat16().float())
    assert all(torch.equal(after[name], before[name]) for name in before if name != "2.weight")
    optimizer = ShardedOptimizer(whole, torch.optim.SGD(module.parameters(), lr=0.0))
    module(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(module[2].weight, torch.full((2, 6), 0.3).bfloat16())


def test_values_may_change_in_place_and_a_change_of_memory_is_found() -> None:
    module = model()
    sharded(module)
    with torch.no_grad():
        module[0].weight.mul_(2)
    module(torch.ones(1, 6))
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was given other memory"):
        module(torch.ones(1, 6))


class Adapter(nn.Module):
    """A low-rank bypass around a layer, as fine-tuning adds it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 1, bias=False)
        self.up = nn.Linear(1, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def test_parameters_that_come_late_are_refused_and_modules_without_any_are_not() -> None:
    module = model()
    guard = sharded(module).guard
    x = torch.ones(1, 6)
    expected = module(x)
    module[0] = nn.Sequential(module[0], nn.Identity())  # wraps what is known
    module.add_module("dropout", nn.Dropout(0.0))
    assert torch.equal(module(x), expected)
    module[2] = Adapter(module[2])
    with pytest.raises(RuntimeError, match=r"rank 0: parameter '2\.down\.weight' was added .*, one of 2, and nobody"):
        module(x)
    module[2] = module[2].layer
    assert torch.equal(module(x), expected)
    module.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"parameter 'extra' was added after"):
        module(x)
    del module.extra
    module(x)
    assert Guard.of(module) is guard
    # Adapters that are there before are like any other parameters.
    module = model()
    module[2] = Adapter(module[2])
    whole = sharded(module)
    assert {"2.up.weight", "2.down.weight", "2.layer.bias"} <= {name for name, _ in whole.full_parameters()}


def test_a_bias_where_there_was_none_is_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 6, bias=False))
    sharded(module)
    module[0].bias = nn.Parameter(torch.zeros(6))
    with pytest.raises(RuntimeError, match=r"parameter '0\.bias' was added after"):
        module(torch.ones(1, 6))


def doors_at_stage_3(rank: int, world_size: int) -> list[str]:
    module = model()
    whole = sharded(module, stage=3)
    refused = []
    for part in (module, module[0], module[2]):
        for door in (part.state_dict, lambda part=part: part.load_state_dict({}, strict=False)):
            with pytest.raises(RuntimeError) as caught:
                door()
            refused.append(str(caught.value))
    assert module[1].state_dict() == {}
    assert {name for name, _ in whole.full_parameters()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    module(torch.ones(1, 6)).sum().backward()
    shutdown()
    return refused


def test_released_parameters_are_neither_given_nor_taken() -> None:
    for rank, texts in enumerate(run_ranks(doors_at_stage_3, 2)):
        for door, text in enumerate(texts):
            wanted = "load_state_dict() would write into" if door % 2 else "state_dict() would hold"
            name = "2.weight" if door >= 4 else "0.weight"
            assert text.startswith(f"rank {rank}: {wanted} placeholders: at stage 3 parameters such as '{name}'")
