from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model import Llama, LlamaConfig
from safetensors.torch import save_file

SMALL = LlamaConfig(vocab_size=61, width=24, inner_width=40, layers=3, heads=2, context=32, end_token=60)


def model(config: LlamaConfig = SMALL) -> Llama:
    torch.manual_seed(0)
    made = Llama(config)
    with torch.no_grad():  # so that every weight matters
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


def test_the_demo_model_has_about_ten_million_parameters() -> None:
    assert Llama(LlamaConfig(vocab_size=512)).parameter_count == pytest.approx(10e6, rel=0.05)


def test_the_future_does_not_show() -> None:
    tokens = torch.randint(0, 61, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 61
    before, after = model()(tokens), model()(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    tokens, targets = torch.randint(0, 61, (2, 2, 12))
    expected = F.cross_entropy(model()(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model()(tokens, targets), expected)


def test_the_last_logits_are_those_of_the_last_position() -> None:
    tokens = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(model()(tokens, last_only=True), model()(tokens)[:, -1:])


def test_config_comes_back() -> None:
    assert LlamaConfig.from_dict(json.loads(json.dumps(SMALL.to_dict()))) == SMALL


def test_transformers_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = model()
    weights = {name: value for name, value in ours.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_dict()))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, 61, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
