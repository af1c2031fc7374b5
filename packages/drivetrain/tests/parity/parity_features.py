"""The tables of the parity matrix. A new number format or feature is one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from parity_models import Model
from parity_recipe import DISK, Feature, Groups, Precision, Refusal, Side

from drivetrain.kernels import Lamb, Lion, Muon, dequantize, quantize
from drivetrain.zero import INT8_WEIGHTS


def fp16(**keys: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **keys}}


def bf16(**keys: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **keys}}


def autocast(dtype: str) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype}}


DYNAMIC = {"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}
"""Overflows in the first steps, and grows again."""

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", tolerance=5e-5),
        Precision(name="bf16", config=bf16(), dtype=torch.bfloat16, tolerance=1e-2),
        Precision(
            name="fp16 static",
            config=fp16(loss_scale=128),
            dtype=torch.float16,
            scale=128.0,
            tolerance=2e-3,
            in_product=False,
        ),
        Precision(
            name="fp16 dynamic",
            config=fp16(**DYNAMIC),
            dtype=torch.float16,
            scale=2.0**20,
            dynamic=True,
            tolerance=2e-3,
        ),
        Precision(name="autocast bf16", config=autocast("bf16"), autocast=torch.bfloat16, tolerance=1e-2),
        Precision(
            name="autocast fp16",
            config={**autocast("fp16"), "fp16": DYNAMIC},
            autocast=torch.float16,
            scale=2.0**20,
            dynamic=True,
            tolerance=2e-3,
            in_product=False,
        ),
        Precision(
            name="bf16 without masters",
            config=bf16(bf16_master_weights_and_grads=True),
            dtype=torch.bfloat16,
            rounds_masters=True,
            tolerance=0.1,
            in_product=False,
        ),
        Precision(
            name="bf16 throughout",
            config=bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
            dtype=torch.bfloat16,
            rounds_masters=True,
            rounds_moments=True,
            tolerance=0.1,
            in_product=False,
        ),
        Precision(
            name="fp16 without masters",
            config=fp16(**DYNAMIC, fp16_master_weights_and_grads=True),
            dtype=torch.float16,
            scale=2.0**20,
            dynamic=True,
            rounds_masters=True,
            tolerance=3e-2,
            in_product=False,
        ),
    )
}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# Parameter groups and optimizers --------------------------------------------------------------------------------------


def with_and_without_decay(model: Model) -> Groups:
    """Matrices decay; the rest does not, and learns at a rate of its own."""
    groups: Groups = [
        {"params": [], "labels": [], "weight_decay": 0.1},
        {"params": [], "labels": [], "weight_decay": 0.0, "lr": 0.02},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[parameter.dim() < 2]
            group["params"].append(parameter)
            group["labels"].append(name)
    return groups


def bare(groups: Groups) -> Groups:
    return [{key: value for key, value in group.items() if key != "labels"} for group in groups]


def plain_muon(groups: Groups) -> torch.optim.Optimizer:
    """Matrices of blocks are orthogonalised; tables and vectors take AdamW's step."""
    split: Groups = []
    for group in groups:
        marked = [
            p.dim() >= 2 and not name.startswith(("embed", "lm_head"))
            for p, name in zip(group["params"], group["labels"], strict=True)
        ]
        for wanted in (True, False):
            params = [p for p, mark in zip(group["params"], marked, strict=True) if mark == wanted]
            if params:
                rest = {} if wanted else {"betas": (0.9, 0.999), "adam_eps": 1e-3}
                made = {"lr": 0.02, "weight_decay": 0.0, **rest, **bare([group])[0]}
                split.append({**made, "params": params, "use_muon": wanted})
    return Muon(split, momentum=0.95)


# Hooks ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def round_frozen_weights(model: Model) -> None:
    """Values that int8 blocks can hold are held exactly, so both sides train the same model."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.copy_(dequantize(quantize(parameter.flatten(), INT8_WEIGHTS)).view_as(parameter))


def use_fewer_blocks(side: Side, step: int) -> None:
    for model in side.models:
        model.depth = len(model.blocks) - step % 2


@torch.no_grad()
def edit_a_weight(side: Side, step: int) -> None:
    if step == 1:
        with side.editing():
            for model in side.models:
                model.blocks[0].up.weight.mul_(0.5)
                model.blocks[2].norm.bias.fill_(0.25)


# Refusals -------------------------------------------------------------------------------------------------------------

KEEPS_WHOLE = Refusal(
    stages=(0, 1, 2),
    reason="below stage 3 parameters are whole on every rank, and nothing is gathered in forward and backward",
    text=r"change how parameters are gathered, and ZeRO stage \d keeps them whole; use stage 3, or leave these out",
)
SHARDS_ONLY = Refusal(
    stages=(0, 1, 2),
    reason="below stage 3 parameters are whole on every rank, and what computes with them reads no int8",
    text=r"stage \d keeps parameters whole, and only shards of them are held quantised",
)
NO_OWNER = Refusal(
    stages=(0,),
    reason="gradients are quantised on the way to their owner, and at stage 0 every rank owns all of them",
    text="reduce_rule quantises gradients on the way to their owner; stage 0 has none: use stage 1",
)
SLICES = Refusal(
    stages=(1, 2, 3),
    reason="what it does to an element depends on the whole tensor, and from stage 1 on it would see slices",
    text=r"Adafactor is not known to update each element on its own, and ZeRO stage \d gives an optimizer slices",
)

NOTHING_SPLIT = Refusal(
    stages=(0,),
    reason="what moves out is a rank's share of the states, and at stage 0 every rank has all of them",
    text="a shard of the states is what moves out, and ZeRO stage 0 has none",
)
NO_SHARDS = Refusal(
    stages=(0, 1, 2),
    reason="what moves out is a rank's shard of the parameters, and below stage 3 they are whole",
    text=r"shards of parameters are what moves out, and ZeRO stage \d has none",
)
ALL_NORMS = Refusal(
    reason="norms over all parameters come before any update, so all states would have to be in memory at once",
    text="Lamb needs the norms of all parameters before it updates one",
    beside=("LAMB",),
)

TORCH_MOMENTS = Refusal(
    precisions=("bf16 without masters", "fp16 without masters"),
    reason="torch's optimizers keep moments in the format of the weights, and the configuration asks for fp32",
    text=r"asks for optimizer moments in torch\.float32 over master weights in .*, and \w+ keeps them in",
)
GRADIENTS_TOO = Refusal(
    precisions=("fp16 without masters",),
    reason="the key is about master weights and gradients",
    text="fp16_master_weights_and_grads keeps gradients in fp16, not in fp32",
)

QUANTISED_GRADIENTS = zero(zero_quantized_gradients=True)

FEATURES: Mapping[str, Feature] = {
    # the loop
    "accumulation": Feature(loop={"micro": 3}),
    "second loss": Feature(loop={"second_loss": True}, kinds=("loop",)),
    "unmanaged": Feature(loop={"style": "unmanaged", "micro": 2}, kinds=("loop",)),
    "no_sync": Feature(loop={"style": "no_sync", "micro": 2}, kinds=("loop",)),
    "plain backward": Feature(loop={"style": "plain"}, kinds=("loop",)),
    "train_batch": Feature(loop={"style": "train_batch"}, kinds=("loop",)),
    "evaluation": Feature(loop={"evaluates": True}, kinds=("loop",)),
    "uneven batches": Feature(loop={"uneven": True}),
    "resumed": Feature(loop={"resumes": True}),
    "edited": Feature(before_step=edit_a_weight),
    "fewer blocks now and then": Feature(before_step=use_fewer_blocks),
    # the model
    "built under Init": Feature(loop={"under_init": True}),
    "tied weights": Feature(shape={"tied": True}),
    "frozen": Feature(shape={"frozen": True}),
    "module used twice": Feature(shape={"twice": True}),
    "recomputed, non-reentrant": Feature(shape={"recompute": "non-reentrant"}, kinds=("recomputation",)),
    "recomputed, reentrant": Feature(shape={"recompute": "reentrant"}, kinds=("recomputation",)),
    "small parameters": Feature(shape={"small": True}),
    "empty parameters": Feature(shape={"empty": True}, kinds=("number of elements",)),
    "unused parameters": Feature(shape={"unused": True}),
    "batch norm": Feature(shape={"batch_norm": True}),
    "dropout": Feature(shape={"dropout": True}),
    "experts": Feature(shape={"experts": True}),
    "sparse embedding": Feature(shape={"sparse": True}),
    # gradients
    "clipping": Feature(config={"gradient_clipping": 0.3}, plain={"max_norm": 0.3}),
    "sum over ranks": Feature(
        config={"gradient_allreduce_op": "sum"},
        plain={"reduce_op": "sum"},
        refused=(
            Refusal(
                stages=(3,),
                reason="stage 3 averages; the configuration's standard says so",
                text='stage 3 averages gradients; "sum" is for stages 0 to 2',
            ),
        ),
    ),
    "divided before": Feature(config={"gradient_predivide_factor": 4.0, **zero(reduce_scatter=False)}),
    "prescaled": Feature(
        config={"prescale_gradients": True},
        refused=(
            Refusal(
                stages=(2, 3),
                reason="each gradient goes to one owner, which divides in one go",
                text=r"with reduce_scatter at stage \d gradients are averaged in one go, not scaled before",
            ),
        ),
    ),
    "added in fp32": Feature(
        config={"data_types": {"grad_accum_dtype": "fp32"}}, plain={"kept": torch.float32}, refused=(GRADIENTS_TOO,)
    ),
    "sent in fp32": Feature(
        config={"communication_data_type": "fp32"}, plain={"wire": torch.float32}, kinds=("format on the wire",)
    ),
    "sent in bf16": Feature(
        config={"communication_data_type": "bf16"}, plain={"wire": torch.bfloat16}, kinds=("format on the wire",)
    ),
    "sent as rows": Feature(config={"sparse_gradients": True}, shape={"sparse": True}),
    # communication
    "no overlap": Feature(config=zero(overlap_comm=False)),
    "small buckets": Feature(config=zero(reduce_bucket_size=150, allgather_bucket_size=150)),
    "no prefetch": Feature(config=zero(stage3_prefetch_bucket_size=0), kinds=("prefetch",)),
    "large prefetch": Feature(config=zero(stage3_prefetch_bucket_size=1_000_000), kinds=("prefetch",)),
    "much reuse": Feature(config=zero(stage3_max_reuse_distance=1_000_000)),
    "little kept alive": Feature(config=zero(stage3_max_live_parameters=0)),
    "all persistent": Feature(config=zero(stage3_param_persistence_threshold=100_000), kinds=("persistence",)),
    "some persistent": Feature(
        config=zero(stage3_param_persistence_threshold=17, stage3_model_persistence_threshold=60),
        kinds=("persistence",),
    ),
    "leaf modules": Feature(config=zero(leaf_module={"names": ["embed", "blocks"]})),
    "fine-grained modules as one": Feature(config=zero(stage3_module_granularity_threshold=1_000_000)),
    "replicas (MiCS)": Feature(config=zero(mics_shard_size=2), ranks=4, half=2e-2),
    "gathered in two steps": Feature(
        config=zero(mics_hierarchical_params_gather=True), ranks=4, hosts=True, refused=(KEEPS_WHOLE,)
    ),
    "second copies (hpZ)": Feature(config=zero(zero_hpz_partition_size=2), ranks=4, refused=(KEEPS_WHOLE,)),
    "quantised gathers (qwZ)": Feature(
        config=zero(zero_quantized_weights=True), tolerance=0.05, refused=(KEEPS_WHOLE,)
    ),
    "quantised reductions (qgZ)": Feature(
        config=QUANTISED_GRADIENTS, tolerance=0.25, refused=(NO_OWNER,), kinds=("quantised reductions",)
    ),
    "quantised over two hosts": Feature(
        config=QUANTISED_GRADIENTS,
        ranks=4,
        hosts=True,
        tolerance=0.25,
        refused=(NO_OWNER,),
        kinds=("quantised reductions",),
    ),
    "error feedback (LoCo)": Feature(
        config=zero(zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8, "reset_T": 100}),
        tolerance=0.25,
        refused=(NO_OWNER,),
        kinds=("quantised reductions",),
    ),
    "states on disk": Feature(
        config=zero(offload_optimizer={"device": "nvme", "nvme_path": DISK}, sub_group_size=300),
        refused=(NOTHING_SPLIT, ALL_NORMS),
        kinds=("states",),
    ),
    "half of the states on disk": Feature(
        config=zero(offload_optimizer={"device": "nvme", "nvme_path": DISK, "ratio": 0.5}, sub_group_size=300),
        refused=(NOTHING_SPLIT, ALL_NORMS),
        kinds=("states",),
    ),
    "parameters on disk": Feature(
        config=zero(offload_param={"device": "nvme", "nvme_path": DISK, "max_in_cpu": 0}),
        refused=(NO_SHARDS,),
    ),
    "frozen in int8": Feature(
        config=zero(zero_quantized_nontrainable_weights=True),
        shape={"frozen": True},
        prepare=round_frozen_weights,
        refused=(SHARDS_ONLY,),
    ),
    "one rank": Feature(ranks=1),
    "three ranks": Feature(ranks=3),
    # optimizers and learning rates
    "parameter groups": Feature(groups=with_and_without_decay),
    "AdamW": Feature(
        config=optimizer("AdamW", lr=0.02, weight_decay=0.1, eps=1e-3),
        plain={"optimizer": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, eps=1e-3)},
        kinds=("optimizer",),
        amplifies=3.0,
    ),
    "Lion": Feature(
        config=optimizer("Lion", lr=0.01, betas=[0.9, 0.99], weight_decay=0.1),
        plain={"optimizer": lambda groups: Lion(bare(groups), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)},
        kinds=("optimizer",),
        amplifies=20.0,
    ),
    "LAMB": Feature(
        config=optimizer("Lamb", lr=0.02, weight_decay=0.01, eps=1e-3),
        plain={"optimizer": lambda groups: Lamb(bare(groups), lr=0.02, weight_decay=0.01, eps=1e-3)},
        kinds=("optimizer",),
        amplifies=3.0,
    ),
    "Muon": Feature(
        config=optimizer("Muon", lr=0.02, weight_decay=0.0, eps=1e-3, ns_method="standard"),
        plain={"optimizer": plain_muon},
        kinds=("optimizer",),
        amplifies=10.0,
    ),
    "an optimizer that is given": Feature(
        given=lambda groups: {"optimizer": torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, eps=1e-3)},
        plain={
            "optimizer": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, eps=1e-3),
            "rounds_as_torch": True,
        },
        kinds=("optimizer",),
        amplifies=3.0,
        refused=(TORCH_MOMENTS,),
    ),
    "a function that makes the optimizer": Feature(
        given=lambda groups: {"optimizer": lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-3)},
        plain={"optimizer": lambda groups: torch.optim.Adagrad(groups, lr=0.02, eps=1e-3), "rounds_as_torch": True},
        kinds=("optimizer",),
        amplifies=3.0,
        refused=(TORCH_MOMENTS,),
    ),
    "an optimizer of whole tensors": Feature(
        given=lambda groups: {"optimizer": torch.optim.Adafactor(groups, lr=0.05)},
        plain={"optimizer": lambda groups: torch.optim.Adafactor(groups, lr=0.05), "rounds_as_torch": True},
        kinds=("optimizer", "number of elements"),  # it divides by that
        amplifies=3.0,
        refused=(SLICES, TORCH_MOMENTS),
    ),
    "warm-up": Feature(
        config=scheduler("WarmupLR", warmup_num_steps=2, warmup_type="linear"),
        plain={"rates": (0.0, 0.5, 1.0)},
        kinds=("schedule",),
    ),
    "one cycle": Feature(
        config=scheduler("OneCycle", cycle_min_lr=0.01, cycle_max_lr=0.05, cycle_first_step_size=2),
        plain={"fixed_rates": (0.03, 0.05, 0.03), "momenta": (0.85, 0.8, 0.85)},
        kinds=("optimizer", "schedule"),  # it moves the momentum of SGD
    ),
    "a scheduler of torch": Feature(
        given=lambda groups: {"lr_scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.5)},
        plain={"rates": (1.0, 0.5, 0.25)},
        kinds=("schedule",),
    ),
}
