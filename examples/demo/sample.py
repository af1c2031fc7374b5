"""Let an exported model write. It needs torch and safetensors only, nothing of what trained it.

python examples/demo/sample.py runs/demo/model "class Stack:"
"""

from __future__ import annotations

import argparse
import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from model import Llama, LlamaConfig
from safetensors.torch import load_file
from tokenizer import Tokenizer

PROMPTS = ("def read_", "class ")
TIED = "lm_head.weight"


def load(folder: Path, device: torch.device) -> tuple[Llama, Tokenizer]:
    """The model, in fp32, and its tokenizer.

    Raises RuntimeError if a weight is missing or too much.
    """
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = Llama(config)
    weights = load_file(folder / "model.safetensors")
    weights.setdefault(TIED, weights["model.embed_tokens.weight"])  # a tied weight is stored once
    model.load_state_dict(weights)
    return model.to(device).eval(), Tokenizer.load(folder / "tokenizer.json")


@torch.inference_mode()
def generate(
    model: Llama, ids: Sequence[int], *, tokens: int, temperature: float, top_k: int, generator: torch.Generator
) -> Iterator[int]:
    """`tokens` more ids, each drawn from the `top_k` most likely ones. Ends at the end of a file.

    Nothing is cached: each token costs a pass over the whole context, which for a small model is quick enough.
    """
    device = next(model.parameters()).device
    text = list(ids)
    for _ in range(tokens):
        context = torch.tensor([text[-model.config.context :]], device=device)
        logits = model(context, last_only=True)[0, -1].float().cpu() / temperature
        best = logits.topk(min(top_k, len(logits)))
        choice = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
        text.append(int(best.indices[choice]))
        if text[-1] == model.config.end_token:
            return
        yield text[-1]


def write(folder: Path, prompts: Sequence[str], *, tokens: int, temperature: float, device: torch.device) -> str:
    """Prints text as it is written, and returns it."""
    model, tokenizer = load(folder, device)
    generator = torch.Generator().manual_seed(0)
    table = tokenizer.token_bytes()
    texts = []
    for prompt in prompts:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print(prompt, end="", flush=True)
        pieces = [prompt]
        ids = [tokenizer.end, *tokenizer.encode(prompt)]
        for index in generate(model, ids, tokens=tokens, temperature=temperature, top_k=40, generator=generator):
            pieces.append(decoder.decode(table[index]))
            print(pieces[-1], end="", flush=True)
        print("\n", flush=True)
        texts.append("".join(pieces))
    return "\n\n".join(texts) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path, help="that the model was exported to")
    arguments.add_argument("prompts", nargs="*", default=PROMPTS, help="texts to go on with")
    arguments.add_argument("--tokens", type=int, default=150, help="per prompt (default %(default)s)")
    arguments.add_argument("--temperature", type=float, default=0.7, help="0.1 careful, 1 bold (default %(default)s)")
    arguments.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments.add_argument("--save", type=Path, help="also write the text to this file")
    given = arguments.parse_args()
    text = write(
        given.folder,
        given.prompts,
        tokens=given.tokens,
        temperature=given.temperature,
        device=torch.device(given.device),
    )
    if given.save is not None:
        given.save.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
