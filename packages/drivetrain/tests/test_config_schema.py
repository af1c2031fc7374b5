"""JSON Schema and the reference page: both say what the loader does."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from drivetrain.engine.config import examine, json_schema, load, reference_markdown
from drivetrain.engine.config.schema.tree import walk, walk_arguments

GOOD: list[dict[str, Any]] = [
    {},
    {"$schema": "drivetrain.schema.json", "train_batch_size": 8, "drivetrain": {"seed": 1}},
    {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": None,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "adamw", "params": {"lr": 3e-4, "betas": "auto", "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "LINEAR"},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": "auto",
            "overlap_comm": None,
            "offload_param": {"device": "none"},
            "offload_optimizer": None,
        },
        "communication_data_type": "bfloat16",
        "gradient_allreduce_op": "MEAN",
        "checkpoint": {"tag_validation": "WARN"},
        "tensorboard": {"enabled": False},
    },
    {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
        "zero_optimization": True,
        "bfloat16": {"enabled": True},
        "comms_logger": {"prof_ops": "all_reduce"},
        "elasticity": {"enabled": False, "micro_batch_sizes": [1, 2]},
    },
    {"zero_optimization": {"stage": 2, "cpu_offload": False}},
]
BAD: list[dict[str, Any]] = [
    {"gradient_clipp1ng": 1},
    {"zero_optimization": {"overlap_com": True}},
    {"zero_optimization": {"stage": 4}},
    {"fp16": True},
    {"fp16": {"enabled": "true"}},
    {"train_batch_size": 0},
    {"train_batch_size": 1.5},
    {"optimizer": {"params": {"lr": 1}}},
    {"optimizer": {"type": "ADAMW", "params": {"weight_decya": 0.1}}},
    {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "lin"}}},
    {"communication_data_type": "fp8"},
    {"gradient_clipping": -1},
]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema)


def test_it_is_a_schema_of_draft_2020_12(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema


@pytest.mark.parametrize("values", GOOD)
def test_good_configurations(validator: jsonschema.Draft202012Validator, values: dict[str, Any]) -> None:
    assert [error.message for error in validator.iter_errors(values)] == []
    assert examine(values).problems == ()


@pytest.mark.parametrize("values", BAD)
def test_bad_configurations(validator: jsonschema.Draft202012Validator, values: dict[str, Any]) -> None:
    assert not validator.is_valid(values)
    assert examine(values).problems


@pytest.mark.parametrize("values", [{}, GOOD[2]])
def test_a_configuration_written_out_is_valid(
    validator: jsonschema.Draft202012Validator, values: dict[str, Any]
) -> None:
    assert [error.message for error in validator.iter_errors(load(values).to_dict())] == []


def test_every_key_carries_what_an_editor_shows(schema: dict[str, Any]) -> None:
    zero = schema["$defs"]["ZeroOptimization"]
    assert zero["additionalProperties"] is False
    stage = zero["properties"]["stage"]
    assert stage["default"] == 0
    assert {"enum": [0, 1, 2, 3], "type": "integer"} in stage["anyOf"]
    assert stage["x-status"] == "works"
    assert zero["properties"]["legacy_stage1"]["x-status"] == "planned"
    assert zero["properties"]["elastic_checkpoint"]["x-differs"].startswith("Every checkpoint loads")
    alias = zero["properties"]["stage3_prefetch_bucket_size"]
    assert alias["description"].startswith("Another name of `prefetch_bucket_size`.")
    assert zero["properties"]["cpu_offload"]["deprecated"] is True
    for definition in (schema, *schema["$defs"].values()):
        for name, part in definition["properties"].items():
            assert part.get("description"), name


# ----------------------------------------------------------------------------------------------------------- the page


def test_the_page_has_every_key_once_in_its_table() -> None:
    page = reference_markdown()
    sections = page.split("\n## ")
    for entry in (*walk(), *walk_arguments()):
        if not entry.key.listed:
            continue
        names = ", ".join(f"`{name}`" for name in (entry.path[-1], *entry.key.aliases))
        assert f"| {names} | " in page, entry.dotted
    assert sum(section.startswith("`zero_optimization`") for section in sections) == 1


def test_rows_of_the_page() -> None:
    lines = reference_markdown().split("\n")
    for row in (
        "| `train_batch_size` | integer ≥ 1 or null | `null` | works | Samples per optimizer step, over all ranks. |",
        "| `gradient_clipping` | number ≥ 0 | `1.0` | works | Largest global norm of the gradient; 0 does not clip. |",
        '| `tag_validation` | `"Warn"` / `"Ignore"` / `"Fail"` | `"Warn"` | works | What happens when ranks save under '
        "different tags, in any case: Warn, Ignore or Fail. |",
        "| `total_num_steps` | integer ≥ 1 | required | works | Optimizer steps in the whole run. |",
        "| `betas` | list of 2: number ≥ 0 < 1 | `[0.9, 0.999]` | works | Weights of the update and of the moment. |",
        "| `legacy_stage1` | boolean | `false` | planned | The first implementation of stage 1. |",
        "| `optimizer.params.lr` | an error, unless a hint gives the learning rate |",
        '| `zero_optimization.cpu_offload` | write "offload_optimizer": {"device": "cpu"} |',
    ):
        assert row in lines


def test_tables_of_the_page_are_whole() -> None:
    width = 0
    for line in reference_markdown().split("\n"):
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        width = width or cells
        assert cells == width, line
