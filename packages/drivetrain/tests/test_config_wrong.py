"""Wrong configurations, each with the whole text that a person gets to read."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drivetrain.engine.config import ConfigError, Problem, examine, load


class Case(NamedTuple):
    name: str
    config: dict[Any, Any]
    place: str
    message: str
    hint: str


CASES = [
    Case(
        "misspelt top-level key",
        {"gradient_clipp1ng": 1},
        "gradient_clipp1ng = 1",
        "unknown key",
        'did you mean "gradient_clipping"?',
    ),
    Case(
        "misspelt nested key",
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        "zero_optimization.overlap_com = true",
        "unknown key",
        'did you mean "overlap_comm"?',
    ),
    Case(
        "key in the wrong section",
        {"stage3_max_live_parameters": 1000000000.0},
        "stage3_max_live_parameters = 1000000000",
        "unknown key",
        'it belongs in "zero_optimization"',
    ),
    Case("key of a section at the top", {"loss_scale": 0}, "loss_scale = 0", "unknown key", 'it belongs in "fp16"'),
    Case(
        "top-level key inside a section",
        {"zero_optimization": {"gradient_clipping": 1.0}},
        "zero_optimization.gradient_clipping = 1.0",
        "unknown key",
        "it belongs at the top level",
    ),
    Case("key nobody knows", {"frobnicate": 1}, "frobnicate = 1", "unknown key", "`drivetrain schema` lists every key"),
    Case(
        "key in other case",
        {"FP16": {"enabled": True}},
        'FP16 = {"enabled": true}',
        "unknown key",
        'did you mean "fp16"?',
    ),
    Case(
        "spelling from old documents",
        {"bf16": {"enabled": True, "check_overflow": True}},
        "bf16.check_overflow = true",
        "unknown key",
        'the key is spelled "check_grad_overflow"',
    ),
    Case(
        "spelling from a blog",
        {"fp16": {"fp16_master_weights_and_gradients": True}},
        "fp16.fp16_master_weights_and_gradients = true",
        "unknown key",
        'the key is spelled "fp16_master_weights_and_grads"',
    ),
    Case(
        "documented key that upstream rejects",
        {"zero_optimization": {"grad_hooks": True}},
        "zero_optimization.grad_hooks = true",
        "unknown key",
        "upstream documents the key, and no version of it reads it; remove it",
    ),
    Case(
        "key of inference",
        {"kernel_inject": True},
        "kernel_inject = true",
        "unknown key",
        "the key belongs to an inference configuration, which a training configuration does not hold",
    ),
    Case(
        "learning rate at the top",
        {"lr": 0.001},
        "lr = 0.001",
        "unknown key",
        'the learning rate is the optimizer\'s: write "optimizer": {"type": "AdamW", "params": {"lr": ...}}',
    ),
    Case(
        "max_grad_norm in the optimizer",
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.001, "max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm = 1.0",
        "unknown key",
        'clipping is not the optimizer\'s here: set "gradient_clipping" at the top level',
    ),
    Case(
        "one key under two names",
        {"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}},
        "zero_optimization.stage3_max_live_parameters = 2",
        '"max_live_parameters" and "stage3_max_live_parameters" say the same thing',
        "keep one of them",
    ),
    Case(
        "section under two names",
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        'bfloat16 = {"enabled": true}',
        '"bf16" and "bfloat16" say the same thing',
        "keep one of them",
    ),
    Case(
        "old and new spelling",
        {"zero_optimization": {"cpu_offload": False, "offload_optimizer": {"device": "none"}}},
        'zero_optimization.offload_optimizer = {"device": "none"}',
        '"cpu_offload" and "offload_optimizer" say the same thing',
        "keep one of them",
    ),
    Case(
        "section given as a flag",
        {"fp16": True},
        "fp16 = true",
        "expected a section {...}, found true",
        'write "fp16": {"enabled": true}',
    ),
    Case(
        "section given as a number",
        {"zero_optimization": 3},
        "zero_optimization = 3",
        "expected a section {...}, found a number",
        'write "zero_optimization": {"stage": 3}',
    ),
    Case(
        "section given as a list",
        {"optimizer": ["AdamW"]},
        'optimizer = ["AdamW"]',
        "expected a section {...}, found a list",
        "",
    ),
    Case(
        "quoted flag",
        {"fp16": {"enabled": "true"}},
        'fp16.enabled = "true"',
        "expected true or false, found text",
        "write true without quotes",
    ),
    Case(
        "flag as a number",
        {"wall_clock_breakdown": 1},
        "wall_clock_breakdown = 1",
        "expected true or false, found a number",
        "write true",
    ),
    Case(
        "quoted number",
        {"gradient_clipping": "1.0"},
        'gradient_clipping = "1.0"',
        "expected a number, found text",
        "write 1.0 without quotes",
    ),
    Case(
        "null for a number",
        {"gradient_clipping": None},
        "gradient_clipping = null",
        "expected a number, found null",
        "leave the key out for the default, 1.0",
    ),
    Case("negative clipping", {"gradient_clipping": -1.0}, "gradient_clipping = -1.0", "must be at least 0", ""),
    Case(
        "not a finite number",
        {"gradient_clipping": math.nan},
        "gradient_clipping = NaN",
        "expected a finite number",
        "",
    ),
    Case(
        "fraction for a whole number",
        {"train_batch_size": 8.5},
        "train_batch_size = 8.5",
        "expected a whole number, found one with a fraction",
        "write 8 or 9",
    ),
    Case(
        "zero batch",
        {"train_micro_batch_size_per_gpu": 0},
        "train_micro_batch_size_per_gpu = 0",
        "must be at least 1",
        "",
    ),
    Case(
        "true for a number",
        {"gradient_accumulation_steps": True},
        "gradient_accumulation_steps = true",
        "expected a whole number, found true",
        "",
    ),
    Case(
        "stage that does not exist",
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage = 4",
        "expected a stage: 0, 1, 2 or 3",
        "",
    ),
    Case(
        "quoted stage",
        {"zero_optimization": {"stage": "3"}},
        'zero_optimization.stage = "3"',
        "expected a stage: 0, 1, 2 or 3",
        "write 3 without quotes",
    ),
    Case(
        "stage auto",
        {"zero_optimization": {"stage": "auto"}},
        'zero_optimization.stage = "auto"',
        '"auto" can\'t be resolved here: nothing in the file says the stage',
        'write the value in place of "auto", or give it to the loader: hints={"zero_optimization.stage": ...}',
    ),
    Case(
        "unknown choice",
        {"checkpoint": {"tag_validation": "Wran"}},
        'checkpoint.tag_validation = "Wran"',
        'expected one of "Warn", "Ignore", "Fail"',
        'did you mean "Warn"?',
    ),
    Case(
        "unknown reduction",
        {"gradient_allreduce_op": "average"},
        'gradient_allreduce_op = "average"',
        'expected one of "mean", "sum"',
        "",
    ),
    Case(
        "unknown dtype",
        {"communication_data_type": "fp8"},
        'communication_data_type = "fp8"',
        'expected "fp16", "bf16" or "fp32"',
        "",
    ),
    Case(
        "the word none for a dtype",
        {"communication_data_type": "none"},
        'communication_data_type = "none"',
        '"none" is not a dtype',
        "write null without quotes, or leave the key out",
    ),
    Case(
        "fp16 and bf16",
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "bf16.enabled = true",
        "fp16 and bf16 are both enabled, and a model computes in one format",
        "set one of them to false; bf16 has the wider range and needs no loss scale",
    ),
    Case(
        "dynamic scale without window",
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        "fp16.loss_scale_window = 0",
        "a dynamic loss scale (loss_scale 0) needs a window above 0, or it never grows back",
        "use 1000, or set a constant loss_scale",
    ),
    Case(
        "dynamic scale that can reach 0",
        {"fp16": {"enabled": True, "min_loss_scale": 0}},
        "fp16.min_loss_scale = 0",
        "a dynamic loss scale (loss_scale 0) needs a smallest value above 0, or it can reach 0",
        "use 1, or set a constant loss_scale",
    ),
    Case(
        "loss scale as a flag",
        {"fp16": {"enabled": True, "loss_scale": True}},
        "fp16.loss_scale = true",
        "expected a number, found true",
        "",
    ),
    Case(
        "first scale beyond float32",
        {"fp16": {"enabled": True, "initial_scale_power": 128}},
        "fp16.initial_scale_power = 128",
        "must be at most 127",
        "",
    ),
    Case(
        "autocast and bf16",
        {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
        "torch_autocast.enabled = true",
        "torch_autocast computes over fp32 parameters, and the bf16 section makes them bf16",
        "set one of the two to false; bf16 takes less memory, torch_autocast keeps sensitive operations in fp32",
    ),
    Case(
        "autocast and fp16",
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"enabled": True}},
        "torch_autocast.enabled = true",
        "torch_autocast computes over fp32 parameters, and the fp16 section makes them fp16",
        "set one of the two to false; fp16 takes less memory, torch_autocast keeps sensitive operations in fp32",
    ),
    Case(
        "autocast in fp32",
        {"torch_autocast": {"enabled": True, "dtype": "float32"}},
        'torch_autocast.dtype = "float32"',
        "autocast computes in 16 bits, bf16 or fp16",
        "choose one of them, or switch torch_autocast off for training in fp32",
    ),
    Case(
        "autocast in fp16 with a scale that can reach 0",
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"min_loss_scale": 0}},
        "fp16.min_loss_scale = 0",
        "a dynamic loss scale (loss_scale 0) needs a smallest value above 0, or it can reach 0",
        "use 1, or set a constant loss_scale",
    ),
    Case(
        "masters in fp16 and gradients in fp32",
        {
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        'data_types.grad_accum_dtype = "fp32"',
        "fp16_master_weights_and_grads keeps gradients in fp16, not in fp32",
        "remove the key, or set fp16_master_weights_and_grads to false",
    ),
    Case(
        "moments in fp16",
        {
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            "optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}},
        },
        "optimizer.params.fp32_optimizer_states = false",
        "with fp16_master_weights_and_grads the moments would be fp16, which rounds squared gradients to 0",
        "remove the key, or use bf16",
    ),
    Case(
        "moments in bf16 and in fp32",
        {
            "bf16": {"enabled": True, "bf16_optimizer_states": True},
            "optimizer": {"type": "Lion", "params": {"fp32_optimizer_states": True}},
        },
        "optimizer.params.fp32_optimizer_states = true",
        "bf16_optimizer_states keeps the moments in bf16, not in fp32",
        "remove one of the two keys",
    ),
    Case(
        "casting inputs in the bf16 section",
        {"bf16": {"enabled": True, "auto_cast": True}},
        "bf16.auto_cast = true",
        "unknown key",
        'upstream has it for fp16 only; write "drivetrain": {"auto_cast": true}, which goes for both',
    ),
    Case(
        "the old name of a wire format",
        {"fp32_allreduce": True},
        "fp32_allreduce = true",
        "unknown key",
        'write "communication_data_type": "fp32"',
    ),
    Case(
        "dtype against the mode",
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
        'data_types.param_dtype = "fp32"',
        "the parameters are bf16, as the fp16 and bf16 sections say, not fp32",
        "remove the key, or switch the fp16 and bf16 sections off",
    ),
    Case(
        "sum at stage 3",
        {"gradient_allreduce_op": "SUM", "zero_optimization": {"stage": 3}},
        'gradient_allreduce_op = "SUM"',
        'stage 3 averages gradients; "sum" is for stages 0 to 2',
        'use "mean" (and multiply the learning rate if the sum was meant), or a lower stage',
    ),
    Case(
        "predivide at stage 2",
        {"gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 2}},
        "gradient_predivide_factor = 2.0",
        "with reduce_scatter at stage 2 gradients are averaged in one go, not divided before",
        'leave it 1, set "reduce_scatter" to false, or use "communication_data_type": "fp32" against overflow',
    ),
    Case(
        "prescale at stage 3",
        {"prescale_gradients": True, "zero_optimization": {"stage": 3}},
        "prescale_gradients = true",
        "with reduce_scatter at stage 3 gradients are averaged in one go, not scaled before",
        'leave it false, or set "reduce_scatter" to false',
    ),
    Case(
        "odd bucket",
        {"zero_optimization": {"allgather_bucket_size": 499}},
        "zero_optimization.allgather_bucket_size = 499",
        "the number of elements must be even, since shards are aligned to 2",
        "use 500",
    ),
    Case(
        "unknown optimizer",
        {"optimizer": {"type": "AdmW", "params": {"lr": 0.001}}},
        'optimizer.type = "AdmW"',
        "there is no optimizer of this name, here or in torch.optim",
        'did you mean "AdamW"?',
    ),
    Case(
        "optimizer without type",
        {"optimizer": {"params": {"lr": 0.001}}},
        "optimizer.type",
        "the key is required here, and not given",
        'add "type": Adam, AdamW, Adagrad, Lamb or Lion in any case, or the exact name of a class in torch.optim',
    ),
    Case(
        "torch optimizer in the wrong case",
        {"optimizer": {"type": "sgd"}},
        'optimizer.type = "sgd"',
        "there is no optimizer of this name, here or in torch.optim",
        'did you mean "SGD"?',
    ),
    Case(
        "torch optimizer without the argument",
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}},
        "optimizer.params.momentun = 0.9",
        "SGD takes no such argument",
        'did you mean "momentum"?',
    ),
    Case(
        "torch optimizer with a bad value",
        {"optimizer": {"type": "RMSprop", "params": {"lr": -0.1}}},
        "optimizer.params.lr = -0.1",
        "torch refuses the arguments: Invalid learning rate: -0.1",
        "",
    ),
    Case(
        "optimizer that needs a closure",
        {"optimizer": {"type": "LBFGS", "params": {"lr": 1.0}}},
        'optimizer.type = "LBFGS"',
        "LBFGS evaluates the model several times within a step, which the engine does not do",
        'use "AdamW" or "SGD"',
    ),
    Case(
        "misspelt argument of AdamW",
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decya": 0.1}}},
        "optimizer.params.weight_decya = 0.1",
        "unknown key",
        'did you mean "weight_decay"?',
    ),
    Case(
        "betas of three",
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99, 0.999]}}},
        "optimizer.params.betas = [0.9, 0.99, 0.999]",
        "expected a list of 2 values",
        "",
    ),
    Case(
        "betas of one",
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
        "optimizer.params.betas = [0.9]",
        "expected a list of 2 values or more",
        "",
    ),
    Case(
        "beta of 1",
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}},
        "optimizer.params.betas[1] = 1.0",
        "must be below 1",
        "",
    ),
    Case(
        "negative learning rate",
        {"optimizer": {"type": "Lion", "params": {"lr": -0.0001}}},
        "optimizer.params.lr = -0.0001",
        "must be at least 0",
        "",
    ),
    Case(
        "learning rate auto",
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        'optimizer.params.lr = "auto"',
        '"auto" can\'t be resolved here: nothing in the file says the learning rate',
        'write the value in place of "auto", or give it to the loader: hints={"optimizer.params.lr": ...}',
    ),
    Case(
        "Adam without bias correction",
        {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
        "optimizer.params.bias_correction = false",
        "this version's Adam always corrects the moments for their start at zero",
        'remove the key, or use "Lamb", which can do without',
    ),
    Case(
        "planned optimizer",
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001, "freeze_step": 100}}},
        'optimizer.type = "OneBitAdam"',
        "this version of Drivetrain does not support 1-bit Adam yet",
        'use "AdamW"',
    ),
    Case(
        "unknown schedule",
        {"scheduler": {"type": "WarmupCosinLR", "params": {"total_num_steps": 10}}},
        'scheduler.type = "WarmupCosinLR"',
        "there is no scheduler of this name, here or in torch.optim.lr_scheduler",
        'did you mean "WarmupCosineLR"?',
    ),
    Case(
        "schedule without its length",
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        "scheduler.params.total_num_steps",
        "the key is required here, and not given",
        'add "total_num_steps": Optimizer steps in the whole run',
    ),
    Case(
        "length of schedule auto",
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
        'scheduler.params.total_num_steps = "auto"',
        '"auto" can\'t be resolved here: nothing in the file says the number of optimizer steps in the whole run',
        'write the value in place of "auto", or give it to the loader: hints={"scheduler.params.total_num_steps": ...}',
    ),
    Case(
        "unknown warm-up",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "lin"}}},
        'scheduler.params.warmup_type = "lin"',
        'expected one of "log", "linear"',
        'did you mean "linear"?',
    ),
    Case(
        "interval of 0",
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
        "scheduler.params.lr_range_test_step_size = 0",
        "must be at least 1",
        "",
    ),
    Case(
        "schedule that follows a metric",
        {"scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 3}}},
        'scheduler.type = "ReduceLROnPlateau"',
        "ReduceLROnPlateau follows a metric, which a file can't give",
        "pass the scheduler to initialize together with its metric, or use a schedule of steps",
    ),
    Case(
        "torch schedule without an argument",
        {"scheduler": {"type": "StepLR", "params": {"gamma": 0.5}}},
        "scheduler.params.step_size",
        "StepLR needs the argument 'step_size', which is not given",
        'add "step_size" to "params"',
    ),
    Case(
        "torch schedule argument auto",
        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": "auto"}}},
        'scheduler.params.T_max = "auto"',
        "\"auto\" can't be resolved here: nothing in the file says the schedule's T_max",
        'write the value in place of "auto", or give it to the loader: hints={"scheduler.params.T_max": ...}',
    ),
    Case(
        "offload without a folder",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.nvme_path",
        'device "nvme" needs a folder on the disk, and there is none',
        'write "nvme_path": "/path/on/the/disk"',
    ),
    Case(
        "offload in the old spelling where nothing is split",
        {"zero_optimization": {"stage": 0, "cpu_offload": True}},
        "zero_optimization.cpu_offload = true",
        "a shard of the states is what moves out, and ZeRO stage 0 has none",
        'use "stage": 1 or above',
    ),
    Case(
        "frozen weights in int8 where they are whole",
        {"zero_optimization": {"stage": 2, "zero_quantized_nontrainable_weights": True}},
        "zero_optimization.zero_quantized_nontrainable_weights = true",
        "stage 2 keeps parameters whole, and only shards of them are held quantised",
        'use "stage": 3, or remove the key',
    ),
    Case(
        "ZenFlow",
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
        'zero_optimization.zenflow = {"topk_ratio": 0.1}',
        "this version of Drivetrain does not support ZenFlow yet",
        'remove "zenflow"',
    ),
    Case(
        "weights without fp32",
        {"zero_optimization": {"load_from_fp32_weights": False}},
        "zero_optimization.load_from_fp32_weights = false",
        "this version of Drivetrain does not support restoring master weights from 16-bit weights yet",
        "keep it true",
    ),
    Case(
        "TensorBoard",
        {"tensorboard": {"enabled": True, "output_path": "runs"}},
        "tensorboard.enabled = true",
        "this version of Drivetrain does not support TensorBoard output yet",
        'remove "tensorboard", or set "enabled" to false; meanwhile, use "csv_monitor"',
    ),
    Case(
        "Weights & Biases",
        {"wandb": {"enabled": True}},
        "wandb.enabled = true",
        "this version of Drivetrain does not support Weights & Biases output yet",
        'remove "wandb", or set "enabled" to false; meanwhile, use "csv_monitor"',
    ),
    Case(
        "activation checkpointing",
        {"activation_checkpointing": {"partition_activations": True}},
        "activation_checkpointing.partition_activations = true",
        "this version of Drivetrain does not support choosing how recomputation stores activations yet",
        'remove "activation_checkpointing"; meanwhile, use torch.utils.checkpoint in the model',
    ),
    Case(
        "elasticity",
        {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]}},
        "elasticity.enabled = true",
        "this version of Drivetrain does not support elasticity yet",
        'remove "elasticity", or set "enabled" to false',
    ),
    Case(
        "misread key of elasticity",
        {"elasticity": {"enabled": False, "prefer_large_batch": True}},
        "elasticity.prefer_large_batch = true",
        "unknown key",
        'upstream documents this spelling and ignores it; the key is "prefer_larger_batch"',
    ),
    Case(
        "tensor parallelism",
        {"tensor_parallel": {"autotp_size": 4}},
        "tensor_parallel.autotp_size = 4",
        "this version of Drivetrain does not support tensor parallelism yet",
        'remove "tensor_parallel"',
    ),
    Case(
        "sequence parallelism",
        {"sequence_parallel_size": 2},
        "sequence_parallel_size = 2",
        "this version of Drivetrain does not support sequence parallelism yet",
        "remove the key",
    ),
    Case(
        "moving optimizer state out of compiled passes",
        {"compile": {"deepcompile": True, "offload_opt_states": True}},
        "compile.offload_opt_states = true",
        "this version of Drivetrain does not support moving optimizer state to the host during compiled passes yet",
        "split it over more ranks",
    ),
    Case(
        "a pass of another stage",
        {"compile": {"deepcompile": True, "passes": ["z3"]}, "zero_optimization": {"stage": 1}},
        'compile.passes = ["z3"]',
        'the pass "z3" does not belong to ZeRO stage 1',
        "leave the key out: the passes of the stage are the default",
    ),
    Case(
        "a pass that is not ZeRO's",
        {"compile": {"deepcompile": True, "passes": ["autotp"]}},
        'compile.passes = ["autotp"]',
        'this version of Drivetrain does not support the pass "autotp" yet',
        "remove it from the list",
    ),
    Case(
        "Apex",
        {"amp": {"enabled": True, "opt_level": "O2"}},
        "amp.enabled = true",
        "this version of Drivetrain does not support mixed precision by NVIDIA Apex yet",
        'remove "amp", or set "enabled" to false; meanwhile, use the bf16, the fp16 or the torch_autocast section',
    ),
    Case(
        "pipeline",
        {"pipeline": {"activation_checkpoint_interval": 1}},
        "pipeline.activation_checkpoint_interval = 1",
        "this version of Drivetrain does not support pipeline parallelism yet",
        'remove "pipeline"',
    ),
    Case(
        "compression",
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        "compression_training.weight_quantization.shared_parameters.enabled = true",
        "this version of Drivetrain does not support compression while training yet",
        'remove "compression_training", or set "enabled" to false',
    ),
    Case(
        "universal checkpoint",
        {"checkpoint": {"load_universal": True}},
        "checkpoint.load_universal = true",
        "this version of Drivetrain does not support loading upstream's universal checkpoints yet",
        "keep it false: every checkpoint saved here loads at any world size and any stage",
    ),
    Case(
        "secret of the wrong type",
        {"comet": {"api_key": 12345}},
        "comet.api_key = (secret)",
        "expected text in quotes, found a number",
        "",
    ),
    Case("key that is no text", {3: True}, "3 = true", "a key is text, not a number", ""),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_text_of_each_problem(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        load(case.config)
    expected = ["1 problem in the configuration", f"  {case.place}", f"      {case.message}"]
    if case.hint:
        expected.append(f"      to fix it: {case.hint}")
    assert str(caught.value) == "\n".join(expected)


def test_the_table_is_large_and_has_no_case_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 80


FILE = """\
{
  // a run on two ranks
  "train_batch_size": 8,
  "gradient_clipp1ng": 1.0,
  "bf16": {"enabled": "true"},
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": [0.9, 1.5], "weight_decay": 0.1}
  },
  "scheduler": {"type": "OneCycle", "params": {}},
  "zero_optimization": {
    "stage": 3,
    "stage3_prefetch_bucket_size": -1,
    "offload_optimizer": {"device": "nvme"},
    "allgather_bucket_size": 5
  },
  "gradient_allreduce_op": "sum",
  "train_batch_size": 16,
}
"""

FILE_PROBLEMS = """\
11 problems in the configuration {name}
  {name}:4: gradient_clipp1ng = 1.0
      unknown key
      to fix it: did you mean "gradient_clipping"?
  {name}:5: bf16.enabled = "true"
      expected true or false, found text
      to fix it: write true without quotes
  {name}:8: optimizer.params.lr = "auto"
      "auto" can't be resolved here: nothing in the file says the learning rate
      to fix it: write the value in place of "auto", or give it to the loader: hints={{"optimizer.params.lr": ...}}
  {name}:8: optimizer.params.betas[1] = 1.5
      must be below 1
  {name}:10: scheduler.params.cycle_min_lr
      the key is required here, and not given
      to fix it: add "cycle_min_lr": Lowest learning rate of the cycle
  {name}:10: scheduler.params.cycle_max_lr
      the key is required here, and not given
      to fix it: add "cycle_max_lr": Highest learning rate of the cycle
  {name}:13: zero_optimization.stage3_prefetch_bucket_size = -1
      must be at least 0
  {name}:14: zero_optimization.offload_optimizer.nvme_path
      device "nvme" needs a folder on the disk, and there is none
      to fix it: write "nvme_path": "/path/on/the/disk"
  {name}:15: zero_optimization.allgather_bucket_size = 5
      the number of elements must be even, since shards are aligned to 2
      to fix it: use 6
  {name}:17: gradient_allreduce_op = "sum"
      stage 3 averages gradients; "sum" is for stages 0 to 2
      to fix it: use "mean" (and multiply the learning rate if the sum was meant), or a lower stage
  {name}:18: train_batch_size = 16
      the key is there twice: first on line 3, again on line 18
      to fix it: remove one of them"""


def test_all_problems_of_a_file_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(FILE)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == FILE_PROBLEMS.format(name=path)
    assert [problem.line for problem in caught.value.problems] == [4, 5, 8, 8, 10, 10, 13, 14, 15, 17, 18]
    assert caught.value.source == str(path)


def test_one_mistake_is_told_once() -> None:
    """A rule that reads a key with a problem of its own stays out, and so does the refusal of a planned key."""
    wrong = {
        "fp16": {"enabled": "yes"},
        "bf16": {"enabled": True},
        "gradient_allreduce_op": "sum",
        "zero_optimization": {"stage": "3"},
        "optimizer": {"type": "StepLR"},
    }
    assert [problem.path for problem in examine(wrong).problems] == [
        "optimizer.type",
        "fp16.enabled",
        "zero_optimization.stage",
    ]


def test_a_null_does_not_hide_what_else_is_wrong() -> None:
    wrong = {
        "gradient_clipping": None,
        "optimizer": {"type": "AdamW", "params": {"lr": None, "betas": [None, 2]}},
        "zero_optimization": {"stage": None, "legacy_stage1": True},
        "tensorboard": {"enabled": True},
    }
    assert [problem.path for problem in examine(wrong).problems] == [
        "optimizer.params.lr",
        "optimizer.params.betas[0]",
        "optimizer.params.betas[1]",
        "gradient_clipping",
        "zero_optimization.stage",
        "zero_optimization.legacy_stage1",
        "tensorboard.enabled",
    ]


def test_a_hint_for_a_key_that_does_not_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, hints={"optimizer.params.lr": 1e-3, "zero_optimization.stagee": 3, "optimiser.type": "SGD"})
    assert [(p.path, p.found, p.message, p.hint) for p in caught.value.problems] == [
        (
            "zero_optimization.stagee",
            "3",
            "a hint is given for a key that does not exist",
            'did you mean "zero_optimization.stage"?',
        ),
        ("optimiser.type", '"SGD"', "a hint is given for a key that does not exist", 'did you mean "optimizer"?'),
    ]


def test_a_hint_of_the_wrong_type_is_told_like_a_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"gradient_clipping": "auto"}, hints={"gradient_clipping": "much"})
    assert caught.value.problems == (
        Problem(path="gradient_clipping", found='"much"', message="expected a number, found text"),
    )


def test_the_error_is_a_value_error_and_survives_a_pickle() -> None:
    with pytest.raises(ValueError, match="1 problem") as caught:
        load({"trian_batch_size": 1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ConfigError)
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems


def test_no_secret_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"comet": {"api_key": ["sk-123"], "enabled": True}})
    assert "sk-123" not in str(caught.value)
