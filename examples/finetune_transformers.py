"""Fine-tune a small Hugging Face causal language model on made-up text.

    NPU_PATCH_OPS=default python examples/finetune_transformers.py
    npu-patch run --simulate -- python examples/finetune_transformers.py --model qwen3 --generate 16
    NPU_PATCH_OPS=none python examples/finetune_transformers.py        # the same without patches

The model is built from its config with random weights and small sizes, so nothing is downloaded; any causal language
model that transformers knows by name will do (`--model gemma3_text`, `--set num_experts=4`, ...).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import Progress, TextColumn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a small Hugging Face causal language model on made-up text."
    )
    parser.add_argument("--model", default="llama", help="model type, such as llama, qwen3 or gemma3_text")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="config values beside the defaults")
    parser.add_argument("--device", default="npu" if npu_is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens in each row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="decode N tokens greedily at the end")
    arguments = parser.parse_args()
    try:
        arguments.config = build_config(arguments)
    except ValueError as error:
        parser.error(str(error).splitlines()[0][:200])
    return arguments


def npu_is_available() -> bool:
    return hasattr(torch, "npu") and torch.npu.is_available()


def build_config(arguments: argparse.Namespace) -> Any:
    """The named model's config, small.

    Raises:
        ValueError: transformers knows no such model, or a setting is no NAME=VALUE.
    """
    values = dict(SIZES)
    for setting in arguments.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: expected NAME=VALUE")
        values[name] = json.loads(value)
    name = "gemma3_text" if arguments.model == "gemma3" else arguments.model
    return AutoConfig.for_model(name, **values)


class Text:
    """Text with structure to learn: after each token only a few others follow, one of them most often."""

    def __init__(self, vocabulary: int, seed: int, specials: int = 3, choices: int = 4) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._first = specials
        tokens = torch.arange(vocabulary)
        self._next = torch.randint(specials, vocabulary, (len(tokens), choices), generator=self._generator)
        self._chance = torch.tensor([0.7] + [0.3 / (choices - 1)] * (choices - 1))

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """(rows, length) tokens."""
        token = torch.randint(self._first, len(self._next), (rows,), generator=self._generator)
        columns = [token]
        while len(columns) < length:
            choice = torch.multinomial(self._chance, rows, replacement=True, generator=self._generator)
            token = self._next[token, choice]
            columns.append(token)
        return torch.stack(columns, 1)

    def batches(self, rows: int, length: int, count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            yield self.batch(rows, length)


def evaluate(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return float(loss)


def train(model: torch.nn.Module, text: Text, arguments: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model.train()
    with Progress(*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]}")) as progress:
        task = progress.add_task("training", total=arguments.steps, loss="-")
        for tokens in text.batches(arguments.batch, arguments.length, arguments.steps):
            tokens = tokens.to(arguments.device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(task, advance=1, loss=f"{loss.item():.3f}")


def generate(model: Any, tokens: torch.Tensor, count: int) -> list[int]:
    """Greedy continuation of one row."""
    model.eval()
    prompt = tokens[:1, :16]
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return output[0, prompt.shape[1] :].tolist()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(arguments.config, dtype=DTYPES[arguments.dtype]).to(arguments.device)
    text = Text(arguments.config.vocab_size, arguments.seed)
    held_out = text.batch(arguments.batch, arguments.length).to(arguments.device)

    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{type(model).__name__}, {size:.1f} M parameters, {arguments.dtype} on {arguments.device}")
    before = evaluate(model, held_out)
    train(model, text, arguments)
    print(f"loss on held-out text: {before:.3f} before, {evaluate(model, held_out):.3f} after")
    if arguments.generate:
        print("continuation:", *generate(model, held_out, arguments.generate))


if __name__ == "__main__":
    main()
