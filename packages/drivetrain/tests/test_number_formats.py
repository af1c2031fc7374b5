"""Number formats as a configuration chooses them: stages agree, checkpoints go from each to each, the loss scale,
autocast beside torch's own loop, inputs, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.engine import Engine, initialize
from drivetrain.kernels import FusedAdam
from drivetrain.zero import ParameterAccess
from drivetrain_testkit import run_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A part of a configuration, and what it makes of a linear layer's weight."""

    config: dict[str, Any]
    compute: torch.dtype = FP32
    master: torch.dtype = FP32
    moments: torch.dtype = FP32
    scaled: bool = False


def bf16(**keys: bool) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **keys}}


def fp16(**keys: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 8, **keys}}


def autocast(dtype: str, **keys: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype, **keys}}


SETTINGS: dict[str, Setting] = {
    "fp32": Setting(config={}),
    "bf16": Setting(config=bf16(), compute=BF16),
    "bf16, moments": Setting(config=bf16(bf16_optimizer_states=True), compute=BF16, moments=BF16),
    "bf16, masters": Setting(config=bf16(bf16_master_weights_and_grads=True), compute=BF16, master=BF16),
    "bf16, all": Setting(
        config=bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
        compute=BF16,
        master=BF16,
        moments=BF16,
    ),
    "fp16": Setting(config=fp16(), compute=FP16, scaled=True),
    "fp16, masters": Setting(config=fp16(fp16_master_weights_and_grads=True), compute=FP16, master=FP16, scaled=True),
    "fp16, constant scale": Setting(config=fp16(loss_scale=64), compute=FP16, scaled=True),
    "autocast in bf16": Setting(config=autocast("bf16")),
    "autocast in fp16": Setting(config={**autocast("fp16"), "fp16": {"initial_scale_power": 8}}, scaled=True),
}


def engine_of(setting: Setting | dict[str, Any], stage: int = 0, mesh: Mesh | None = None, **given: Any) -> Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        **(setting.config if isinstance(setting, Setting) else setting),
    }
    return initialize(Net(), config, mesh=mesh, **given)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def step(engine: Engine, index: int) -> None:
    engine.train_batch(iter([batch(index, engine.rank)]))
    assert engine.last_step is not None
    assert engine.last_step.stepped, engine.last_step


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Master weights and first moments, whole."""
    access, named = ParameterAccess(engine.sharded, engine.optimizer), dict(engine.module.named_parameters())
    masters = access.master.full_many(list(named.values()))
    moments = access.state("exp_avg").full_many(list(named.values()))
    found = {f"{n}": m for n, m in zip(named, masters, strict=True)}
    found |= {f"{n}/exp_avg": m for n, m in zip(named, moments, strict=True)}
    return {name: value for name, value in found.items() if value is not None}


# All stages, and checkpoints ------------------------------------------------------------------------------------------


def train_and_save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    mesh, results = Mesh.create(init()), {}
    for number, (name, setting) in enumerate(SETTINGS.items()):
        states = []
        for stage in range(4):
            engine = engine_of(setting, stage, mesh)
            for index in range(2):
                step(engine, index)
            states.append(state_of(engine))
            assert engine.last_step is not None
            assert (engine.last_step.loss_scale > 1) == setting.scaled, name
            if stage == number % 4:
                engine.save(Path(folder) / name)
                step(engine, 2)
                results[name] = states[-1], state_of(engine), engine.loss_scale
        for stage, state in enumerate(states):
            assert all(torch.equal(value, states[0][key]) for key, value in state.items()), (name, stage)
        assert states[0]["first.weight"].dtype == setting.master, name
        assert states[0]["first.weight/exp_avg"].dtype == setting.moments, name
    return results


PAIRS = [
    *((name, name) for name in SETTINGS),
    *((one, other) for other in ("fp32", "bf16, masters", "bf16, all", "fp16") for one in ("bf16", "bf16, moments")),
    *((one, other) for one in ("fp32", "bf16, masters", "bf16, all", "fp16") for other in ("bf16", "bf16, moments")),
    ("bf16, all", "fp32"),
    ("fp32", "bf16, all"),
    ("fp16", "fp16, masters"),
    ("fp16, masters", "fp16"),
    ("fp16", "fp16, constant scale"),
    ("fp16, constant scale", "fp16"),
    ("bf16", "autocast in fp16"),
    ("autocast in fp16", "bf16, all"),
    ("autocast in fp16", "fp16"),
]


def load_pairs(rank: int, world_size: int, folder: str, saved: dict[str, Any]) -> None:
    mesh = Mesh.create(init())
    for number, (one, other) in enumerate(PAIRS):
        if world_size == 1 and number % 3:
            continue
        case = f"from {one} to {other} on {world_size} ranks"
        setting, (before, after, scale) = SETTINGS[other], saved[one]
        engine = engine_of(setting, (number + 1) % 4, mesh)
        own_scale = engine.loss_scale
        engine.load(Path(folder) / one)
        state = state_of(engine)
        assert state.keys() == before.keys(), case
        for name, value in state.items():
            wanted = before[name].to(setting.moments if "/" in name else setting.master)
            assert value.dtype == wanted.dtype, (case, name)
            assert torch.equal(value, wanted), (case, name)
        moving = {"fp16", "fp16, masters", "autocast in fp16"}
        assert engine.loss_scale == (scale if {one, other} <= moving else own_scale), case
        step(engine, 2)
        if one == other and world_size == 2:
            assert all(torch.equal(value, after[name]) for name, value in state_of(engine).items()), case


@pytest.mark.thorough
def test_stages_agree_and_every_checkpoint_loads_into_every_format(tmp_path: Path) -> None:
    """What is loaded is what was saved, rounded to the formats that the run has; training goes on at another stage."""
    saved = run_ranks(train_and_save, 2, str(tmp_path))
    run_ranks(load_pairs, 2, str(tmp_path), saved[0])
    run_ranks(load_pairs, 1, str(tmp_path), saved[0])


# Beside torch's own loops ---------------------------------------------------------------------------------------------


def torch_autocast_loop(dtype: torch.dtype, steps: int) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == FP16)
    for index in range(steps):
        with torch.autocast("cpu", dtype):
            loss = model(batch(index, 0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "within the caller's autocast"])
def test_autocast_is_torchs_own_loop(dtype: str, outer: bool) -> None:
    """To the bit, at every stage; also where the caller's autocast reaches over the steps, and caches weights."""
    torch_dtype = {"bf16": BF16, "fp16": FP16}[dtype]
    expected = torch_autocast_loop(torch_dtype, 3)
    for stage in range(4):
        engine = engine_of({**SETTINGS[f"autocast in {dtype}"].config, "gradient_clipping": 0.0}, stage)
        with torch.autocast("cpu", torch_dtype, enabled=outer):
            for index in range(3):
                step(engine, index)
        for name, value in engine.sharded.full_parameters():
            assert value.dtype == FP32
            assert torch.equal(value, expected[name]), (stage, name)


def test_the_default_of_autocast_is_the_devices() -> None:
    assert engine_of({"torch_autocast": {"enabled": True}}).precision.autocast == torch.get_autocast_dtype("cpu")


def test_a_step_under_the_callers_autocast_does_not_leave_old_weights_in_its_cache() -> None:
    """Without a torch_autocast section: autocast is the caller's, and its cache knows nothing of steps."""
    plain, cached = engine_of({}), engine_of({})
    for index in range(3):
        with torch.autocast("cpu", BF16):
            loss = plain(batch(index, 0))
        plain.backward(loss)
        plain.step()
    with torch.autocast("cpu", BF16):
        for index in range(3):
            step(cached, index)
    assert all(torch.equal(a, b) for a, b in zip(plain.module.parameters(), cached.module.parameters(), strict=True))


# Overflow and the loss scale ------------------------------------------------------------------------------------------


def bad_step(engine: Engine) -> None:
    engine.train_batch(iter([torch.full((2, 5), float("inf"))]))


@pytest.mark.parametrize(
    ("config", "skips"),
    [({}, True), (bf16(), True), (bf16(check_grad_overflow=False), False), (fp16(), True), (autocast("bf16"), True)],
    ids=str,
)
def test_steps_that_are_not_finite(config: dict[str, Any], skips: bool) -> None:
    for stage in range(4):
        engine = engine_of(config, stage)
        bad_step(engine)
        assert engine.last_step is not None
        assert engine.last_step.stepped is not skips
        assert (engine.counters.global_steps, engine.counters.skipped_steps) == (1, int(skips))
        finite = all(p.isfinite().all() for _, p in engine.sharded.full_parameters())
        assert finite == skips


@pytest.mark.parametrize("section", [fp16(), autocast("fp16")], ids=["fp16", "autocast"])
def test_the_record_and_checkpoints_carry_the_scale(section: dict[str, Any], tmp_path: Path) -> None:
    """A minimum of 4, a window of 2: the window goes on where it was after a load."""
    keys = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4}
    config = {**section, "fp16": {**section.get("fp16", {}), **keys}}
    engine, scales = engine_of(config, 1), []
    for bad in (True, True, True, False, False, False):
        bad_step(engine) if bad else step(engine, 0)
        assert engine.last_step is not None
        assert engine.last_step.stepped is not bad
        assert (engine.last_step.reason or "").startswith("gradients are not finite" if bad else "")
        scales.append(engine.last_step.loss_scale)
    assert scales == [16, 8, 4, 4, 4, 8]
    assert engine.loss_scale == 8
    assert (engine.counters.skipped_steps, engine.counters.applied_steps) == (3, 3)
    engine.save(tmp_path)
    loaded = engine_of(config, 3)
    loaded.load(tmp_path)
    assert (loaded.loss_scale, loaded.counters.skipped_steps) == (8, 3)
    step(loaded, 1)
    assert loaded.loss_scale == 16


# Inputs ---------------------------------------------------------------------------------------------------------------


class Strict(nn.Module):
    """Keeps what it is given, and does not convert it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
        self.seen = (x.dtype, more["list"][0].dtype, more["ids"].dtype)
        return self.linear(x).float().mean()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"bf16": {"enabled": True}, "drivetrain": {"auto_cast": True}}, BF16),
        ({"fp16": {"enabled": True}, "drivetrain": {"auto_cast": True}}, FP16),
        ({"fp16": {"enabled": True, "auto_cast": True}}, FP16),
        ({"drivetrain": {"auto_cast": True}}, FP32),
        ({"torch_autocast": {"enabled": True}, "drivetrain": {"auto_cast": True}}, FP32),
    ],
    ids=str,
)
def test_inputs_are_cast_if_asked(config: dict[str, Any], dtype: torch.dtype) -> None:
    engine = initialize(Strict(), {"train_batch_size": 2, **config})
    engine(torch.ones(2, 5), more={"list": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int64)})
    assert engine.module.seen == (dtype, dtype, torch.int64)


# Optimizers -----------------------------------------------------------------------------------------------------------

MASTERS = bf16(bf16_master_weights_and_grads=True)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "SGD", "Lamb", "Lion", "Muon"])
def test_every_optimizer_of_the_file_keeps_its_moments_as_asked(kind: str) -> None:
    momentum = {"momentum": 0.9} if kind == "SGD" else {}
    for setting in ("bf16, moments", "bf16, masters", "bf16, all"):
        section = {"type": kind, "params": {"lr": 0.01, **momentum}}
        engine = engine_of({**SETTINGS[setting].config, "optimizer": section}, 2)
        step(engine, 0)
        assert engine.optimizer is not None
        states = engine.optimizer.optimizer.state.values()
        found = {value.dtype for state in states for key, value in state.items() if key != "step"}
        assert found == {SETTINGS[setting].moments}, setting


def test_the_argument_of_the_optimizer_chooses_moments_too() -> None:
    section = {"type": "Lion", "params": {"lr": 0.01, "fp32_optimizer_states": False}}
    assert engine_of({**MASTERS, "optimizer": section}).optimizer.optimizer.state_dtype == BF16  # type: ignore[union-attr]
    assert engine_of({**bf16(), "optimizer": section}).optimizer.optimizer.state_dtype == FP32  # type: ignore[union-attr]


def test_optimizers_that_keep_moments_otherwise_are_refused() -> None:
    text = (
        r"optimizer moments in torch\.float32 over master weights in torch\.bfloat16 .*, and RMSprop keeps them in "
        r"torch\.bfloat16\. Name Adam"
    )
    with pytest.raises(ValueError, match=text):
        engine_of({**MASTERS, "optimizer": {"type": "RMSprop"}})
    with pytest.raises(
        ValueError, match=r"moments in torch\.bfloat16 over .* torch\.float32 .*AdamW keeps them in torch"
    ):
        engine_of(SETTINGS["bf16, moments"], optimizer=torch.optim.AdamW)
    with pytest.raises(ValueError, match="StatelessSgd would be given fp16 gradients without their loss scale"):
        engine_of({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, optimizer=plain_sgd)
    engine = engine_of(MASTERS, optimizer=lambda p: FusedAdam(p, lr=0.01))
    step(engine, 0)
    engine = engine_of(SETTINGS["bf16, all"].config | {"optimizer": {"type": "RMSprop"}})
    step(engine, 0)


class StatelessSgd(torch.optim.SGD):
    """Says that it could keep moments in fp32, and multiplies nothing."""

    state_dtype = FP32


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return StatelessSgd(parameters, lr=0.1)


# What is refused while it runs ----------------------------------------------------------------------------------------


def test_an_autocast_around_the_engine_that_contradicts_it_is_refused() -> None:
    for config, outer, text in (
        (autocast("bf16"), FP16, r"under torch\.autocast in torch\.float16, and the torch_autocast section .*bfloat16"),
        (bf16(), FP16, r"torch\.float16, and the bf16 section of the configuration computes in torch\.bfloat16"),
        (fp16(), BF16, r"torch\.bfloat16, and the fp16 section of the configuration computes in torch\.float16"),
        ({}, FP16, r'nothing scales the loss, so gradients underflow; .*"torch_autocast": \{"enabled": true'),
    ):
        engine = engine_of(config)
        with torch.autocast("cpu", outer), pytest.raises(RuntimeError, match=text):
            engine(batch(0, 0))
        with torch.autocast("cpu", BF16 if outer == FP16 and config != fp16() else FP16):
            engine(batch(0, 0))


def test_a_loss_without_its_scale_is_refused_under_autocast_too() -> None:
    engine = engine_of(autocast("fp16"))
    with pytest.raises(RuntimeError, match="with fp16 the loss must carry the loss scale"):
        engine(batch(0, 0)).backward()
