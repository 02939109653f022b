"""Pretrain a torchtitan model with torchtitan's own trainer and command-line flags.

    npu-patch run -- python examples/pretrain_torchtitan.py --module llama3 --config llama3_debugmodel
    npu-patch run --simulate=2 -- torchrun --nproc-per-node 2 examples/pretrain_torchtitan.py \
        --module llama3 --config llama3_debugmodel --parallelism.spmd_backend partial_dtensor --training.steps 4
    NPU_PATCH_OPS=none TORCHDYNAMO_DISABLE=1 python examples/pretrain_torchtitan.py ...   # the same without patches

torchtitan 0.2.2 has other flags, and may read a configuration file:

    npu-patch run -- python examples/pretrain_torchtitan.py --model.name qwen3 --model.flavor debugmodel
    npu-patch run -- python examples/pretrain_torchtitan.py --job.config_file my.toml

All flags are torchtitan's (`--help` lists them).  What its wheel does not ship is made in a temporary folder: a
tokenizer, a text, pictures for the models that see, flux's encoders.  Batch, length and the like get small defaults.
Each is overridden by a flag, or by a line of the configuration file.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import socket
import sys
import tarfile
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

SMALL = {"--training.steps": "10", "--training.local_batch_size": "2", "--training.seq_len": "128"}
#: Switches of torchtitan 0.3.0: added unless a flag of that family is given.
SWITCHES = {"--checkpoint": "--checkpoint.no-enable", "--validator": "--validator.no-enable"}
#: Models that read pictures, beside configurations whose name says so. All but flux need torchvision.
PICTURED, PICTURED_SUFFIX = ("flux", "kimi_k2_7", "qwen3_5"), "_mm"
#: What the tokenizers of those models have beside text.
MARKS = "<|endoftext|> <|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|> <|media_pad|> <|media_begin|> "
MARKS += "<|media_end|> [PAD]"
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
        special_tokens=[begin, end, *MARKS.split()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_pictures(folder: Path, texts: list[str], side: int = 64, number: int = 32) -> None:
    """Pictures of coloured noise, each with a text, as torchtitan's `cc12m-test` wants them."""
    from PIL import Image

    chance = random.Random(1)
    folder.mkdir()
    with tarfile.open(folder / "pictures.tar", "w") as archive:
        for index in range(number):
            picture = io.BytesIO()
            Image.frombytes("RGB", (8, 8), chance.randbytes(8 * 8 * 3)).resize((side, side)).save(picture, "JPEG")
            for suffix, content in (("jpg", picture.getvalue()), ("txt", texts[index][:100].encode())):
                member = tarfile.TarInfo(f"{index:04}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def make_encoders(folder: Path) -> None:
    """Configurations of text encoders of one layer, as wide as flux wants them; torchtitan draws their weights."""
    clip = {"hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 12}
    t5 = {"d_model": 4096, "d_ff": 64, "d_kv": 64, "num_heads": 1, "num_layers": 1}
    for name, sizes in (("clip", clip), ("t5", t5)):
        (folder / name).mkdir(parents=True)
        text = json.dumps({"model_type": "clip_text_model" if name == "clip" else name, "vocab_size": 1000, **sizes})
        (folder / name / "config.json").write_text(text, encoding="utf-8")


def make_files(folder: Path) -> None:
    texts = make_text(folder / "text")
    make_tokenizer(folder / "tokenizer", texts)
    make_pictures(folder / "pictures", texts)
    make_encoders(folder / "encoders")


def flags_of_0_3(folder: Path, flux: bool, pictures: bool) -> dict[str, str]:
    flags = {
        "--module": "llama3",
        "--config": "llama3_debugmodel",
        **SMALL,
        "--hf_assets_path": str(folder / "tokenizer"),
        "--dataloader.dataset_path": str(folder / ("pictures" if pictures else "text")),
        "--dump_folder": str(folder / "outputs"),
    }
    if flux:
        flags |= {
            "--tokenizer.test_mode": "",
            "--tokenizer.t5_tokenizer_path": str(folder / "tokenizer"),
            "--tokenizer.clip_tokenizer_path": str(folder / "tokenizer"),
            "--tokenizer.max_t5_encoding_len": "64",
            "--encoder.random_init": "",
            "--encoder.t5_encoder": str(folder / "encoders" / "t5"),
            "--encoder.clip_encoder": str(folder / "encoders" / "clip"),
            "--dataloader.img_size": "64",
        }
    return flags


def flags_of_0_2(folder: Path, flux: bool, pictures: bool) -> dict[str, str]:
    flags = {
        "--model.name": "llama3",
        "--model.flavor": "flux-debug" if flux else "debugmodel",
        **SMALL,
        "--lr_scheduler.warmup_steps": "2",
        "--metrics.log_freq": "1",
        "--model.hf_assets_path": str(folder / "tokenizer"),
        "--training.dataset_path": str(folder / ("pictures" if pictures else "text")),
        "--job.dump_folder": str(folder / "outputs"),
    }
    if flux:
        flags |= {
            "--job.custom_config_module": "torchtitan.models.flux.job_config",
            "--training.dataset": "cc12m-test",
            "--training.test_mode": "",
            "--training.img_size": "64",
            "--encoder.max_t5_encoding_len": "64",
            "--encoder.t5_encoder": str(folder / "encoders" / "t5"),
            "--encoder.clip_encoder": str(folder / "encoders" / "clip"),
        }
    return flags


def values_given(arguments: list[str]) -> dict[str, str]:
    """Flag → value of the command line, and of the configuration file that torchtitan 0.2.2 reads with it."""
    given = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            given[name.replace("-", "_").replace("__", "--", 1)] = value if equals else following
    if "--job.config_file" in given:
        try:
            import tomllib
        except ModuleNotFoundError:  # Python 3.10
            import tomli as tomllib  # type: ignore[no-redef]
        for section, keys in tomllib.loads(Path(given["--job.config_file"]).read_text(encoding="utf-8")).items():
            for key, value in keys.items():
                given.setdefault(f"--{section}.{key}", str(value))
    return given


def with_defaults(arguments: list[str], folder: Path, recent: bool) -> list[str]:
    """torchtitan's arguments: small defaults and the made files, where the caller says nothing else."""
    given = values_given(arguments)
    model = given.get("--module" if recent else "--model.name")
    pictures = model in PICTURED or given.get("--config", "").endswith(PICTURED_SUFFIX)
    added = []
    for flag, value in (flags_of_0_3 if recent else flags_of_0_2)(folder, model == "flux", pictures).items():
        if flag not in given:
            added += [flag, value] if value else [flag]
    if recent:
        added += [switch for family, switch in SWITCHES.items() if not any(flag.startswith(family) for flag in given)]
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


def is_recent() -> bool:
    """Whether torchtitan has the command line of 0.3.0. It is not imported: 0.2.2 reads `sys.argv` when it is."""
    package = importlib.util.find_spec("torchtitan")
    if package is None or not package.submodule_search_locations:
        sys.exit("torchtitan is not installed")
    return Path(package.submodule_search_locations[0], "trainer.py").exists()


def trainer(recent: bool, flux: bool) -> Callable[[], None]:
    """What torchtitan's own launch script runs."""
    if recent:
        from torchtitan.train import main

        return main
    if flux:
        from torchtitan.models.flux.train import FluxTrainer as Trainer
    else:
        from torchtitan.train import Trainer  # type: ignore[no-redef]
    from torchtitan.train import main as train

    return lambda: train(Trainer)


def main() -> None:
    alone()
    recent = is_recent()
    with tempfile.TemporaryDirectory(prefix="pretrain_torchtitan-") as name:
        folder = Path(name)
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        make_files(folder)
        flux = "flux" in values_given(sys.argv[1:]).values()
        sys.argv[1:] = with_defaults(sys.argv[1:], folder, recent)
        add_set_timeout()
        trainer(recent, flux)()


if __name__ == "__main__":
    main()
