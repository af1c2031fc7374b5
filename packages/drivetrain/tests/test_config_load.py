"""Configurations that are accepted, and what they come to."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drivetrain.engine.config import Config, ConfigError, Status, examine, load
from drivetrain.engine.config.schema.keys import Section, child_of, default_of, key_of, names_of
from drivetrain.engine.config.schema.tree import walk, walk_arguments

HF_ZERO3: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
HF_HINTS: dict[str, Any] = {
    "optimizer.params.lr": 3e-4,
    "optimizer.params.betas": (0.9, 0.95),
    "scheduler.params.total_num_steps": 1000,
    "scheduler.params.warmup_num_steps": 50,
    "bf16.enabled": True,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization.stage3_prefetch_bucket_size": 123,
}
HF_ZERO2: dict[str, Any] = {
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "zero_allow_untested_optimizer": True,
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 8,
    "steps_per_print": math.inf,
}
ALL_OFF: dict[str, Any] = {
    "train_batch_size": 8,
    "amp": {"enabled": False, "loss_scale": "dynamic"},
    "autotuning": {"enabled": False, "metric": "latency"},
    "elasticity": {"enabled": False, "micro_batch_sizes": [1, 2]},
    "flops_profiler": {"enabled": False, "profile_step": 5},
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "wandb": {"enabled": False, "project": "p"},
    "comet": {"enabled": False, "api_key": "secret"},
    "data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}},
    "curriculum_learning": {"enabled": False, "schedule_config": {"total_curriculum_step": 10}},
    "progressive_layer_drop": {"enabled": False, "theta": 0.5},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 64},
    "expert_parallel": {"enabled": False, "top_k": 2},
    "tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}},
    "compile": {"deepcompile": False, "debug_log": True},
    "nebula": {"enabled": False},
    "datastates_ckpt": False,
    "compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": False, "method": "topk"}}},
    "zero_optimization": {
        "zenflow": None,
        "zeropp_loco_param": None,
        "mics_shard_size": -1,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "offload_optimizer": {"device": "none", "ratio": 0.5, "nvme_path": "/n"},
        "leaf_module": {},
    },
    "sequence_parallel_size": 1,
    "sparse_gradients": False,
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "checkpoint": {"tag_validation": "FAIL", "load_universal": False, "writer": None},
}
TORCH_TYPES: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}},
}


def test_an_empty_configuration_is_all_defaults() -> None:
    config = load({})
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage == 0
    assert config.optimizer is None
    assert config.notices == ()
    assert (config.model_dtype, config.communication_dtype, config.accumulation_dtype) == ("fp32",) * 3


def test_the_auto_configuration_of_transformers() -> None:
    config = load(HF_ZERO3, hints=HF_HINTS)
    assert config.optimizer is not None
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.95)}
    assert config.optimizer.arguments()["eps"] == 1e-8
    assert config.optimizer.lr == 3e-4
    assert config.scheduler is not None
    assert config.scheduler.arguments() == {
        "total_num_steps": 1000,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 50,
        "warmup_type": "log",
    }
    assert config.bf16.enabled
    assert not config.fp16.enabled
    assert config.gradient_clipping == 1.0
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (500_000_000, 123)
    assert (zero.max_live_parameters, zero.max_reuse_distance) == (10**9, 10**9)
    assert isinstance(zero.max_live_parameters, int)
    assert config.resolve_batch(2).train == 16


def test_without_hints_exactly_what_nobody_can_know_is_asked_for() -> None:
    assert [problem.path for problem in examine(HF_ZERO3).problems] == [
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
    ]


def test_a_configuration_is_not_changed_by_loading_it() -> None:
    before = copy.deepcopy(HF_ZERO3)
    load(HF_ZERO3, hints=HF_HINTS)
    assert before == HF_ZERO3


def test_every_auto_is_mentioned() -> None:
    config = load(HF_ZERO3, hints=HF_HINTS)
    said = {notice.path: notice.message for notice in config.notices if notice.kind == "auto"}
    assert said["optimizer.params.lr"] == '"auto" is 0.0003, from a hint'
    assert said["scheduler.params.warmup_max_lr"] == '"auto" is the optimizer\'s lr'
    assert said["fp16.enabled"] == '"auto" is false, unless a hint says otherwise'
    assert said["zero_optimization.reduce_bucket_size"] == '"auto" is 500000000'
    assert len(said) == 17


def test_a_hint_is_not_used_where_the_file_has_a_value() -> None:
    assert load({"gradient_clipping": 0.5}, hints={"gradient_clipping": 2.0}).gradient_clipping == 0.5


def test_warmup_max_lr_has_a_default_besides_auto() -> None:
    params = {"total_num_steps": 10}
    config = load({"scheduler": {"type": "warmupdecaylr", "params": params}})
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupDecayLR"
    assert config.scheduler.arguments()["warmup_max_lr"] == 1e-3


def test_stage_2_of_transformers() -> None:
    config = load(HF_ZERO2)
    assert config.steps_per_print is None
    assert config.zero_optimization.allgather_bucket_size == 200_000_000
    assert sorted((notice.kind, notice.path) for notice in config.notices) == [
        ("no effect", "zero_allow_untested_optimizer"),
        ("no effect", "zero_optimization.round_robin_gradients"),
    ]


def test_switched_off_is_accepted() -> None:
    config = load(ALL_OFF)
    assert config.notices == ()
    assert config.checkpoint.tag_validation == "Fail"
    assert config.torch_autocast.dtype == "bf16"
    assert config.amp.model_extra == {"loss_scale": "dynamic"}


def test_types_of_torch() -> None:
    config = load(TORCH_TYPES)
    assert config.optimizer is not None
    assert config.optimizer.arguments() == {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    assert config.scheduler is not None
    assert config.scheduler.arguments() == {"T_max": 100}


def test_auto_for_an_argument_of_a_torch_optimizer_is_its_default() -> None:
    params = {"lr": 0.1, "momentum": "auto", "weight_decay": "auto"}
    hints = {"optimizer.params.weight_decay": 0.01}
    config = load({"optimizer": {"type": "SGD", "params": params}}, hints=hints)
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1, "weight_decay": 0.01}


def test_no_argument_that_does_not_work_reaches_the_optimizer() -> None:
    config = load({"optimizer": {"type": "lamb", "params": {"lr": 1e-4, "amsgrad": False}}})
    assert config.optimizer is not None
    assert config.optimizer.arguments()["lr"] == 1e-4
    assert "amsgrad" not in config.optimizer.arguments()


DEPRECATED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (
        {"zero_optimization": True, "allgather_size": 1000},
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 1000}},
        "zero_optimization",
        'true or false in place of the section is deprecated; write {"stage": 1}',
    ),
    (
        {"zero_optimization": False},
        {"zero_optimization": {"stage": 0}},
        "zero_optimization",
        'true or false in place of the section is deprecated; write {"stage": 0}',
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True}},
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        'deprecated; write "stage3_gather_16bit_weights_on_model_save"',
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": None}},
        "zero_optimization.cpu_offload",
        'deprecated; write "offload_optimizer": {"device": "cpu"}',
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload_use_pin_memory": True}},
        {"zero_optimization": {"stage": 1}},
        "zero_optimization.cpu_offload_use_pin_memory",
        'deprecated; write "pin_memory" inside the offload section',
    ),
]


@pytest.mark.parametrize(("old", "new", "path", "message"), DEPRECATED)
def test_deprecated_spellings(old: dict[str, Any], new: dict[str, Any], path: str, message: str) -> None:
    config = load(old)
    assert config.to_dict() == load(new).to_dict()
    notices = [notice for notice in config.notices if notice.kind == "deprecated"]
    assert [(notice.path, notice.message) for notice in notices] == [(path, message)]


NO_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"disable_allgather": True}, "disable_allgather: has no effect: Not read upstream either."),
    (
        {"zero_optimization": {"elastic_checkpoint": True}},
        "zero_optimization.elastic_checkpoint: has no effect: Every checkpoint loads at any world size and any stage.",
    ),
    (
        {"aio": {"block_size": 262144, "thread_count": 4}},
        "aio.thread_count: has no effect: Nothing reads it upstream either; see intra_op_parallelism.",
    ),
    (
        {"sparse_attention": {"mode": "bigbird"}},
        "sparse_attention: has no effect: Upstream parses the section and never applies it; no model here asks for it.",
    ),
    (
        {"bf16": {"immediate_grad_update": True}},
        "bf16.immediate_grad_update: has no effect: Gradients are always accumulated as they are made, in "
        "`data_types.grad_accum_dtype`.",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}},
        "optimizer.params.torch_adam: has no effect: Adam is torch's own, in its fused form, unless moments or master "
        "weights are 16-bit.",
    ),
    (
        {"communication_data_type": "fp16", "bf16": {"enabled": True}},
        "communication_data_type: gradients without a loss scale in fp16: those below 6e-8 become 0; bf16 has the "
        "range for them",
    ),
    (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        "data_types.grad_accum_dtype: gradients without a loss scale in fp16: those below 6e-8 become 0; bf16 has the "
        "range for them",
    ),
    (
        {"drivetrain": {"auto_cast": True}},
        "drivetrain.auto_cast: has no effect, since neither fp16 nor bf16 is enabled",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fp32_optimizer_states": False}}},
        "optimizer.params.fp32_optimizer_states: has no effect, since the master weights are fp32",
    ),
    (
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "optimizer": {"type": "Adam", "params": {"lr": 1}}},
        "bf16.bf16_optimizer_states: a second moment in bf16 hardly falls at a decay rate of 0.999, since a step down "
        'is less than half of the distance between two numbers; use "betas": [0.9, 0.95], or moments in fp32',
    ),
    (
        {"vocabulary_size": 50257},
        "vocabulary_size: 50257 is no multiple of 8, which matrix units favour; 50264 is the next",
    ),
    (
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 5}},
        "zero_optimization: this is stage 2, and only stage 3 uses prefetch_bucket_size",
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 10}}},
        "scheduler.params.warmup_num_steps: the warm-up takes 10 of 10 steps, so the learning rate never decays",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.01}}},
        "scheduler.params.cycle_min_lr: 0.1 is above cycle_max_lr 0.01, so the cycle falls before it rises",
    ),
    (
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor: has no effect beside prescale_gradients, which divides by all ranks at once",
    ),
]


@pytest.mark.parametrize(("values", "text"), NO_EFFECT)
def test_notices(values: dict[str, Any], text: str) -> None:
    assert [str(notice) for notice in load(values).notices] == [text]


def test_notices_are_logged_on_rank_0_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain.config")
    monkeypatch.setenv("RANK", "1")
    load({"disable_allgather": True})
    assert caplog.records == []
    monkeypatch.setenv("RANK", "0")
    load({"disable_allgather": True, "zero_optimization": True})
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            'zero_optimization: true or false in place of the section is deprecated; write {"stage": 1}',
        ),
        ("INFO", "disable_allgather: has no effect: Not read upstream either."),
    ]


@pytest.mark.parametrize(
    "values", [{}, HF_ZERO2, ALL_OFF, TORCH_TYPES, {"bfloat16": {"enabled": True}}, {"drivetrain": {"seed": 7}}]
)
def test_a_configuration_written_out_loads_to_itself(values: dict[str, Any]) -> None:
    config = load(values)
    assert load(config.to_dict()).to_dict() == config.to_dict()
    assert load(config.to_dict(only_given=True)).to_dict() == config.to_dict()


def test_a_configuration_is_frozen_and_closed() -> None:
    config = load({})
    with pytest.raises(ValidationError):
        config.gradient_clipping = 2.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.fp16.enabled = True  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config.model_validate({"nope": 1})


def test_spellings_of_dtypes_and_choices() -> None:
    for spelling in ("bf16", "bfloat16", "BF16", "torch.bfloat16"):
        assert load({"communication_data_type": spelling}).communication_data_type == "bf16"
    for spelling in ("half", "float16"):
        assert load({"data_types": {"grad_accum_dtype": spelling}}).data_types.grad_accum_dtype == "fp16"
    assert load({"gradient_allreduce_op": "SUM"}).gradient_allreduce_op == "sum"
    assert load({"log_level": "Warning"}).log_level == "warning"


@pytest.mark.parametrize(
    ("section", "arguments", "in_place", "moments"),
    [
        ({}, {}, False, None),
        ({"bf16": {"enabled": True}}, {"fp32_optimizer_states": False}, False, None),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {}, False, "bf16"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {}, True, "fp32"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            {"fp32_optimizer_states": False},
            True,
            "bf16",
        ),
        ({"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}}, {}, False, None),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, {}, True, "fp32"),
    ],
    ids=str,
)
def test_masters_and_moments_follow_their_keys(
    section: dict[str, Any], arguments: dict[str, Any], in_place: bool, moments: str | None
) -> None:
    config = load(
        {**section, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], **arguments}}}
    )
    assert (config.updates_in_place, config.moments_dtype) == (in_place, moments)


def test_dtypes_follow_the_mode() -> None:
    config = load({"fp16": {"enabled": True}, "data_types": {"param_dtype": "half", "grad_accum_dtype": "fp32"}})
    assert (config.model_dtype, config.communication_dtype, config.accumulation_dtype) == ("fp16", "fp16", "fp32")


def test_null_in_place_of_a_section_is_no_section() -> None:
    assert load({"fp16": None, "optimizer": None, "zero_optimization": None}).to_dict() == load({}).to_dict()


# ------------------------------------------------------------------------------------------------ the schema as a whole


def _sections(section: type[Section] = Config) -> set[type[Section]]:
    found = {section}
    for info in section.model_fields.values():
        child = child_of(info.annotation)
        if child is not None and child.section not in found:
            found |= _sections(child.section)
    return found


def test_every_key_is_described_and_no_name_means_two_keys() -> None:
    for section in _sections():
        assert section.__doc__
        spellings: list[str] = []
        for name, info in section.model_fields.items():
            key = key_of(info)
            assert key.meaning, f"{section.__name__}.{name}"
            spellings += [info.alias or name, *key.aliases]
            if key.status is Status.NO_EFFECT:
                assert key.differs.endswith("."), f"{section.__name__}.{name} does not say why"
        spellings += list(section.renamed)
        assert len(spellings) == len(set(spellings))
        assert not set(section.mistaken) & set(names_of(section))
        for renamed in section.renamed.values():
            assert renamed.to in ("", *section.model_fields)


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def test_every_key_at_its_default_is_accepted() -> None:
    """Key by key, as a file that spells out the defaults would."""
    optional = {e.path for e in walk() if default_of(e.info) is None and child_of(e.info.annotation) is not None}
    tried = 0
    for entry in walk():
        if child_of(entry.info.annotation) is not None or any(entry.path[:n] in optional for n in range(9)):
            continue  # a section that is not there by default may ask for something by being there
        if "*" in entry.path or entry.path == ("$schema",):
            continue
        examination = examine(_nested(entry.path, default_of(entry.info)))
        assert (examination.problems, examination.notices) == ((), ()), entry.dotted
        tried += 1
    assert tried >= 280


def test_every_planned_flag_asks_when_it_is_set() -> None:
    status = {entry.path: entry.status for entry in walk()}
    asked = []
    for entry in walk():
        if entry.status is not Status.PLANNED or entry.info.annotation is not bool or "*" in entry.path:
            continue
        alone = status.get(entry.path[:-1], Status.WORKS) is Status.WORKS
        switch = len(entry.path) == 2 and entry.path[1] == "enabled" and not default_of(entry.info)
        if alone or switch:
            (problem,) = examine(_nested(entry.path, not default_of(entry.info))).problems
            assert problem.path == entry.dotted
            assert problem.message.startswith("this version of Drivetrain does not support ")
            assert problem.hint
            asked.append(entry.dotted)
    assert len(asked) >= 20


PATHS = [entry.path for entry in walk() if "*" not in entry.path]
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "AdamW", "SGD", "StepLR", "WarmupLR", "fp16"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([path[-1] for path in PATHS] + ["foo"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(PATHS), anything), max_size=5))
def test_whatever_stands_in_a_file_is_answered_in_words(keys: list[tuple[tuple[str, ...], Any]]) -> None:
    values: dict[str, Any] = {}
    for path, value in keys:
        section = values
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
    examination = examine(values)
    for problem in examination.problems:
        assert problem.message
        assert "Input should" not in problem.message
    if not examination.problems:
        assert load(examination.config.to_dict()).to_dict() == examination.config.to_dict()


def test_the_tree_has_the_whole_configuration() -> None:
    names = {entry.dotted for entry in walk()}
    assert len(names) >= 380
    arguments = {entry.dotted for entry in walk_arguments()}
    assert {"optimizer.params.lr", "scheduler.params.cycle_max_lr"} <= arguments


def test_a_bad_source_of_the_engine_raises_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load("no/such/file.json")
