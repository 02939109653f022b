"""Pretrain a torchtitan model with torchtitan's own trainer and command-line flags.

    npu-patch run -- python examples/pretrain_torchtitan.py --module llama3 --config llama3_debugmodel
    npu-patch run --simulate=2 -- torchrun --nproc-per-node 2 examples/pretrain_torchtitan.py \
        --module llama3 --config llama3_debugmodel --parallelism.spmd_backend partial_dtensor --training.steps 4
    NPU_PATCH_OPS=none TORCHDYNAMO_DISABLE=1 python examples/pretrain_torchtitan.py ...   # the same without patches

All flags are torchtitan's (`--help` lists them).  A tokenizer and a text, which torchtitan's wheel does not ship, are
made in a temporary folder; batch, length and the like get small defaults, and a flag overrides each.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

DEFAULTS = {
    "--module": ["llama3"],
    "--config": ["llama3_debugmodel"],
    "--training.steps": ["10"],
    "--training.local_batch_size": ["2"],
    "--training.seq_len": ["128"],
}
SWITCHES = {"--checkpoint": "--checkpoint.no-enable", "--validator": "--validator.no-enable"}
SYLLABLES = [consonant + vowel for consonant in "bdklmnrst" for vowel in "aeiou"]


def make_text(folder: Path, documents: int = 1000) -> list[str]:
    """Documents of made-up words, some much more frequent than others, as torchtitan's `c4_test` wants them."""
    chance = random.Random(0)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 4))) for _ in range(500)]
    frequency = [1 / (rank + 1) for rank in range(len(words))]
    texts = [" ".join(chance.choices(words, frequency, k=chance.randint(30, 300))) for _ in range(documents)]
    folder.mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "data.json").write_text("".join(lines), encoding="utf-8")
    return texts


def make_tokenizer(folder: Path, texts: list[str], size: int = 1000) -> None:
    """A byte-level BPE tokenizer, smaller than the vocabulary of every debug model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[begin, end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def with_defaults(arguments: list[str], folder: Path) -> list[str]:
    """torchtitan's arguments: the defaults above and the made files, where the caller says nothing else."""
    given = {argument.partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")}
    made = {
        "--hf_assets_path": [str(folder / "tokenizer")],
        "--dataloader.dataset_path": [str(folder / "text")],
        "--dump_folder": [str(folder / "outputs")],
    }
    added = []
    for flag, values in {**DEFAULTS, **made}.items():
        if flag.replace("-", "_") not in given:
            added += [flag, *values]
    for prefix, switch in SWITCHES.items():
        if not any(flag.startswith(prefix.replace("-", "_")) for flag in given):
            added.append(switch)
    return added + arguments  # in this order: no flag may follow a subcommand such as activation_checkpoint:none


def alone() -> None:
    """Without torchrun, be rank 0 of 1."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def add_set_timeout() -> None:
    """torchtitan 0.3.0 calls `torch.distributed.set_timeout` after its first step, which torch has only from 2.14 on.

    Before, the function was a private one that knows NCCL and Gloo; for other back ends it warns and leaves the timeout
    that the process group was made with.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if hasattr(dist, "set_timeout"):
        return

    def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        distributed_c10d._set_pg_timeout(timeout, group)

    dist.set_timeout = set_timeout  # type: ignore[attr-defined]


def main() -> None:
    alone()
    with tempfile.TemporaryDirectory(prefix="pretrain_torchtitan-") as name:
        folder = Path(name)
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        make_tokenizer(folder / "tokenizer", make_text(folder / "text"))
        sys.argv[1:] = with_defaults(sys.argv[1:], folder)
        add_set_timeout()
        from torchtitan.train import main as train

        train()


if __name__ == "__main__":
    main()
